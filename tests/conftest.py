"""Settings of the whole suite."""

import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in children
for _name in ("GITHUB_ACTIONS", "FORCE_COLOR", "PY_COLORS"):
    os.environ.pop(_name, None)
os.environ.update(NO_COLOR="1", TERM="dumb", TERMINAL_WIDTH="100", HF_HUB_OFFLINE="1")

settings.register_profile("fsdpctl", derandomize=True, deadline=None)
settings.load_profile("fsdpctl")
