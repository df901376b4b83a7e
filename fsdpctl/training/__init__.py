"""One training run: its parts, the loop, and what runs between steps."""
