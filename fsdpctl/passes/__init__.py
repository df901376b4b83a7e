"""The forwards and backwards of a model: which there are, which autograd runs, which are over."""
