"""The engine: gathers, frees and reduces the units of a model while it runs.

hooks.py connects module and autograd events to runtime.py, which executes the plan. build.py makes
the units (unit.py), gradients.py reduces gradients, offload.py and host_worker.py step in host
memory, and blocks.py checkpoints.
"""
