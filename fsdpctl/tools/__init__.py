"""Commands on models and runs: compare, evaluate, sample, inspect and profile."""
