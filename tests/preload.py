"""What the server that ranks are forked from has imported already: what most of them use."""

import gc
from importlib import import_module

gc.disable()
for _name in (
    "torch._dynamo",
    "torch.distributed",
    "pytest",
    "fsdpctl.checkpoint.save",
    "tests.engine.odd",
    "tests.torch_engines.runs",
    "tests.predict.tensor_bytes",
    "tests.reference",
    "tests.training.ranks",
):
    import_module(_name)
# Imports Hydra's plugins and fills the caches of its parser.
import_module("fsdpctl.config.compose").compose_config([])
gc.freeze()  # so that a rank's collections neither visit nor copy what it shares with the server
gc.enable()
