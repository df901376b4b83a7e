"""Decoders with Hugging Face's parameter names, without any knowledge of sharding."""
