"""Looks at what was trained: the text that it writes, how well it predicts, what it had seen."""
