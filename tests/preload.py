"""What the server that ranks are forked from has imported already: what most of them use."""

import gc

import fsdpctl.checkpoint.save  # noqa: F401
import tests.engine.odd
import tests.peers.runs
import tests.predict.watch
import tests.reference
import tests.train.ranks  # noqa: F401
from fsdpctl.config.compose import compose_config

compose_config([])  # imports Hydra's plugins and fills the caches of its parser
gc.collect()
gc.freeze()  # so that a rank's collections neither visit nor copy what it shares with the server
