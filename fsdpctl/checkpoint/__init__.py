"""Checkpoints: safetensors files of spans, one a rank, under a manifest that makes them whole.

A file holds 1-D tensors, each covering `[start, stop)` of a flattened parameter or optimizer
state; spans and checksums stand in the file's own header. Nothing depends on how many ranks wrote
it or how they were sharded.
"""
