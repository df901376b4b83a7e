"""Many runs, one table."""
