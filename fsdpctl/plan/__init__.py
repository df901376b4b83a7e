"""Where every element lies and what happens in which order, as plain data.

The engine executes the plan, checkpoints address bytes by it, the optimizer steps the spans it
names, the memory estimate adds it up. Nothing here imports torch.
"""
