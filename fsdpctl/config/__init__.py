"""Typed, checked settings from text and YAML. Modules of this package do not import torch."""
