"""Commands on models and runs: compare, evaluate, sample, and inspect."""
