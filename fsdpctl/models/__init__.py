"""Plain modules that know nothing of sharding, with Hugging Face's parameter names."""
