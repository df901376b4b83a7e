"""Checkpoints: one safetensors file per rank, and a manifest that makes them complete.

A file holds 1-D tensors, each covering `[start, stop)` of a flattened parameter or optimizer
state. The file's own header stores these spans and their checksums. Nothing depends on the number
of ranks that wrote a checkpoint or on how they were sharded.
"""
