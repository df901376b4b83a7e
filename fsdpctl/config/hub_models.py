"""Configurations of published models by their name on the Hugging Face Hub, for estimates.

The table has facts only, with their source: the values of config.json that differ from the defaults
of transformers, with resolved rope_parameters, and the public number of parameters, which a test
compares with the module's.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

from fsdpctl.io.untrusted import read_json

TABLE = Path(__file__).parent / "hub_models.json"


@lru_cache(maxsize=1)
def hub_models() -> dict[str, dict[str, Any]]:
    """Return the entries of the table by name, also those of models with an equal configuration."""
    content = read_json(TABLE, dict[str, Any])
    models: dict[str, dict[str, Any]] = content["models"]
    return {**models, **{name: models[same] for name, same in content["aliases"].items()}}
