"""The weights in `model.path`: a Hugging Face directory, a GGUF file, or a checkpoint."""

from dataclasses import dataclass
from pathlib import Path

from fsdpctl.checkpoint.manifest import INDEX_JSON, MODEL_CONFIG_FILES, BaseInfo, read_manifest
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.run_checkpoints import find_checkpoint
from fsdpctl.checkpoint.tensor_file import TensorFile, open_tensor_file
from fsdpctl.checkpoint.tensor_source import FileTensors, Overlay, TensorSource
from fsdpctl.config.model import ModelConfig
from fsdpctl.config.model_path import is_foreign_model
from fsdpctl.config.serialize import config_of_checkpoint
from fsdpctl.data.tokenizer import BYTE_TOKENIZER
from fsdpctl.data.tokenizer_files import has_tokenizer, read_files
from fsdpctl.errors import CheckpointError, UsageError
from fsdpctl.io.files import checked_name
from fsdpctl.io.gguf_header import is_gguf
from fsdpctl.io.run_files import CHECKPOINTS, RUN_ASSETS, RUN_CONFIG
from fsdpctl.io.untrusted import read_json

_SINGLE_FILE = "model.safetensors"
_MAX_BASES = 16  # length of a chain of checkpoints, each of which is the base of the next


@dataclass(frozen=True, slots=True)
class _Index:
    """The contents of model.safetensors.index.json."""

    weight_map: dict[str, str]  # from tensors to files


def open_weights(model: ModelConfig, folder: Path | None = None, depth: int = 0) -> TensorSource:
    """Open the weights in `model.path`, or in `folder` if they were found before.

    `depth` is the number of checkpoints that name one another as base and led here.
    """
    from fsdpctl.checkpoint.resized_embeddings import (  # imports torch
        stored_config,
        with_resized_embeddings,
    )

    folder = folder or weights_folder(model)
    if is_foreign_model(folder):
        from fsdpctl.checkpoint.hub_weights import under_model_names  # imports torch

        stored_as = stored_config(model, folder)
        if is_gguf(folder):
            from fsdpctl.checkpoint.gguf_weights import GgufTensors

            return with_resized_embeddings(
                under_model_names(GgufTensors(folder, stored_as), stored_as), model
            )
        files = weight_files(folder)
        stored = {name: (file, file.entries[name]) for name, file in files.items()}
        return with_resized_embeddings(
            under_model_names(FileTensors(folder, stored), stored_as), model
        )
    return with_resized_embeddings(with_base(CheckpointReader(folder), depth), model)


def with_base(reader: CheckpointReader, depth: int = 0) -> TensorSource:
    base = reader.manifest.base
    return reader if base is None else Overlay(reader, open_base(base, reader, depth + 1))


def open_base(base: BaseInfo, reader: CheckpointReader, depth: int = 1) -> TensorSource:
    folder = Path(base.path)
    if depth > _MAX_BASES:
        raise CheckpointError(
            f"{reader}: base model {folder}: more than {_MAX_BASES} checkpoints name one another"
        )
    if not folder.exists():
        raise CheckpointError(
            f"{reader}: base model {folder} not found; the checkpoint stores only the trained "
            f"parameters. Restore {folder}, or create a symlink to it at that path"
        )
    model = config_of_checkpoint(reader.manifest.config, str(reader)).model
    try:
        return open_weights(model, folder, depth)
    except UsageError as error:
        raise CheckpointError(f"{reader}: base model {folder}: {error}") from None


def weights_folder(model: ModelConfig) -> Path:
    """Return the directory of the weights: `model.path`, or the newest checkpoint in it."""
    folder = Path(str(model.path))
    return folder if is_foreign_model(folder) else find_checkpoint(folder)


def read_model_assets(folder: Path) -> dict[str, bytes]:
    """Read the files next to the weights in `model.path`, by name."""
    if is_foreign_model(folder):
        return read_assets(folder)
    return read_attachments(CheckpointReader(find_checkpoint(folder)))


def read_assets(folder: Path) -> dict[str, bytes]:
    """Read the files in `folder` that belong to a model's weights, by name."""
    return read_files(folder, *MODEL_CONFIG_FILES)


def find_tokenizer(folder: Path) -> str | None:
    """Return the tokenizer in `model.path` as a value of `data.tokenizer`, or None if unknown."""
    folders = [folder]
    if not is_foreign_model(folder):
        checkpoint = find_checkpoint(folder)
        if read_manifest(checkpoint).config.get("data.tokenizer") == BYTE_TOKENIZER:
            return BYTE_TOKENIZER
        folders = [checkpoint]
        run_dir = checkpoint.parent.parent
        if checkpoint.parent.name == CHECKPOINTS and (run_dir / RUN_CONFIG).is_file():
            folders = [run_dir / RUN_ASSETS, checkpoint]  # old checkpoints are deleted
    return next((str(folder) for folder in folders if has_tokenizer(folder)), None)


def read_attachments(reader: CheckpointReader) -> dict[str, bytes]:
    return {name: reader.attachment(name) for name in reader.manifest.attachments}


def weight_files(folder: Path) -> dict[str, TensorFile]:
    """Return the file of each weight, by the rules by which transformers selects files."""
    single, index = folder / _SINGLE_FILE, folder / INDEX_JSON
    if not single.is_file() and index.is_file():
        return _indexed_files(index)
    paths = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not paths:
        raise UsageError(f"model.path={folder}: {_missing_weights(folder)}")
    if len(paths) > 1:
        names = ", ".join(path.name for path in paths[:3])
        raise UsageError(
            f"model.path={folder}: ambiguous weights in {names}; "
            f"expected {_SINGLE_FILE} or {INDEX_JSON}"
        )
    file = open_tensor_file(paths[0])
    return dict.fromkeys(file.entries, file)


def _indexed_files(index: Path) -> dict[str, TensorFile]:
    content = read_json(index, _Index, error_type=CheckpointError)
    weight_map = content.weight_map
    names = dict.fromkeys(weight_map.values())
    for name in names:
        checked_name(name, r".*\.safetensors", str(index), CheckpointError)
    files = {name: open_tensor_file(index.parent / name) for name in names}
    for tensor, name in weight_map.items():
        if tensor not in files[name].entries:
            raise CheckpointError(
                f"{index.parent / name}: {tensor} not found; {index.name} names this file"
            )
    return {tensor: files[name] for tensor, name in weight_map.items()}


def _missing_weights(folder: Path) -> str:
    others = [*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]
    unsupported = f"{others[0].name} is not supported; expected *.safetensors" if others else ""
    return (
        f"{unsupported or '*.safetensors not found'}. Set model.init=random to train from scratch"
    )
