"""The layout of every element, and the order of a training step, as plain data.

The engine executes the plan, checkpoints address bytes by it, the optimizer updates its spans, and
the memory estimate adds it up. Nothing here imports torch.
"""
