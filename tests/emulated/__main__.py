"""Builds the emulated device, or says why it cannot be: python -m tests.emulated."""

from tests.emulated import build, missing

print(missing() or build())
