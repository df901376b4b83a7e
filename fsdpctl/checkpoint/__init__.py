"""Checkpoints: one safetensors file per rank, and a manifest that makes them complete.

A file has 1-D tensors, each of which covers `[start, stop)` of a flattened parameter or optimizer
state. The header of the file stores these spans and their checksums. A reader does not depend on
the number of ranks that wrote a checkpoint, or on their sharding.
"""
