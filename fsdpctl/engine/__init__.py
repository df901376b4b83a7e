"""Makes the plan happen: gathers, frees and reduces the units of a model as it runs.

hooks.py binds module and autograd events to the runtime; runtime.py decides nothing but asks the
plan; unit.py owns the life of one unit, slots.py the memory it is gathered into.
"""
