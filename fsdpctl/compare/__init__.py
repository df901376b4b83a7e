"""Many runs, one table."""

OK, REFUSED = "ok", "cannot run: "  # the status of a variant, or what it begins with
