"""How long a step takes: the plan's events priced on streams and links of some hardware."""
