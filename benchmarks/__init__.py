"""Measurements beside PyTorch's own engines; what they print goes into docs/performance.md."""
