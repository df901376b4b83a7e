"""Imports of the server that ranks are forked from: modules that most ranks use."""

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
gc.freeze()  # so that garbage collection in ranks does not copy pages shared with the server
gc.enable()
