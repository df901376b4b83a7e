"""Collectives, process groups, rank status, and the shards and quantized states of a rank."""
