"""The engine: gathers, releases and reduces the units of a model while it runs.

hooks.py binds module and autograd events to runtime.py, which follows the plan. unit.py has the
states of a unit and the memory that it is gathered into.
"""
