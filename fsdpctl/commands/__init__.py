"""Commands: a file for each has its options, its work and what it prints."""
