"""What a model has beside its weights: tokenizer files, and the config.json it came with."""

from collections.abc import Mapping
from pathlib import Path

from fsdpctl.checkpoint.pretrained import RUN_ASSETS, assets_beside, read_assets
from fsdpctl.config.schema import Config
from fsdpctl.data.source import DataSet
from fsdpctl.data.tokenizer import TOKENIZER_FILES


def collect_assets(config: Config, data: DataSet) -> dict[str, bytes]:
    """The contents of the files, by name: the model's own, and those of the data's tokenizer."""
    path = config.model.path
    own = {} if path is None else assets_beside(Path(path))
    found = {name: content for name, content in own.items() if name not in TOKENIZER_FILES}
    if data.tokenizer.vocab_size == data.vocab_size:  # else nobody knows what made the tokens
        found |= data.tokenizer.files()
    return found


def write_assets(run_dir: Path, assets: Mapping[str, bytes]) -> None:
    """Keep them with the run."""
    (run_dir / RUN_ASSETS).mkdir(exist_ok=True)
    for name, content in assets.items():
        (run_dir / RUN_ASSETS / name).write_bytes(content)


def read_run_assets(run_dir: Path) -> dict[str, bytes]:
    """Those that the run keeps."""
    return read_assets(run_dir / RUN_ASSETS)
