"""Builds the emulated device, or prints why this is impossible: python -m tests.emulated."""

from tests.emulated import build, missing

print(missing() or build())
