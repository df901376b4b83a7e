"""Commands: each parses, calls one thing and prints what it returns."""
