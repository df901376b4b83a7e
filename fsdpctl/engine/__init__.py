"""The engine: gathers, frees and reduces the units of a model while it runs.

hooks.py connects module and autograd events to runtime.py, which executes the plan. unit.py has the
states of a unit and its unshard buffer.
"""
