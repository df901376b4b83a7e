"""What the server that ranks are forked from has imported already: what most of them use."""

import gc
import pkgutil
from importlib import import_module

import fsdpctl

gc.disable()
# All of the package: a module imported by a test would fill registries that the next test needs.
_modules = [each.name for each in pkgutil.walk_packages(fsdpctl.__path__, "fsdpctl.")]
for _name in (
    "torch._dynamo",
    "torch.distributed",
    "pytest",
    *(each for each in _modules if not each.endswith("__main__")),
    "tests.at_rest",
    "tests.engine.odd",
    "tests.peers.runs",
    "tests.predict.watch",
    "tests.reference",
    "tests.training.ranks",
):
    import_module(_name)
# Imports Hydra's plugins and fills the caches of its parser.
import_module("fsdpctl.config.compose").compose_config([])
gc.freeze()  # so that a rank's collections neither visit nor copy what it shares with the server
gc.enable()
