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
from fsdpctl.errors import CheckpointError, FsdpctlError, UsageError
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
    """Open the weights in `folder` or `model.path`; `depth` counts the bases that were followed."""
    from fsdpctl.checkpoint.resized_embeddings import (  # imports torch
        stored_config,
        with_resized_embeddings,
    )

    folder = folder or weights_folder(model)
    if not is_foreign_model(folder):
        return with_resized_embeddings(with_base(CheckpointReader(folder), depth), model)
    from fsdpctl.checkpoint.hub_weights import under_model_names  # imports torch

    stored_model = stored_config(model, folder)
    if is_gguf(folder):
        from fsdpctl.checkpoint.gguf_weights import GgufTensors

        stored: TensorSource = GgufTensors(folder, stored_model)
    else:
        next_step = ". Set model.init=random to train from scratch"
        stored = file_tensors(folder, f"model.path={folder}", next_step)
    return with_resized_embeddings(under_model_names(stored, stored_model), model)


def with_base(reader: CheckpointReader, depth: int = 0) -> TensorSource:
    """Return the tensors of a checkpoint, and those of its base, if any."""
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
        return read_assets_in(folder)
    return read_attachments(CheckpointReader(find_checkpoint(folder)))


def read_assets_in(folder: Path) -> dict[str, bytes]:
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
            folders = [run_dir / RUN_ASSETS, checkpoint]  # the run may delete the checkpoint
    return next((str(folder) for folder in folders if has_tokenizer(folder)), None)


def read_attachments(reader: CheckpointReader) -> dict[str, bytes]:
    return {name: reader.attachment(name) for name in reader.manifest.attachments}


def file_tensors(
    folder: Path, location: str, next_step: str = "", error_type: type[FsdpctlError] = UsageError
) -> FileTensors:
    """Open the weights of a directory; transformers selects files by the same rules.

    If they are not found, the message begins with `location` and ends with `next_step`.
    """
    single, index = folder / _SINGLE_FILE, folder / INDEX_JSON
    if not single.is_file() and index.is_file():
        files = _indexed_files(index)
        return FileTensors(folder, {name: (x, x.entries[name]) for name, x in files.items()})
    paths = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not paths:
        others = [*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]
        expected = f"{others[0].name} is not supported; expected *.safetensors" if others else ""
        raise error_type(f"{location}: {expected or '*.safetensors not found'}{next_step}")
    if len(paths) > 1:
        names = f"{', '.join(x.name for x in paths[:3])}; expected {_SINGLE_FILE} or {INDEX_JSON}"
        raise error_type(f"{location}: ambiguous weights in {names}")
    file = open_tensor_file(paths[0])
    return FileTensors(folder, {name: (file, entry) for name, entry in file.entries.items()})


def _indexed_files(index: Path) -> dict[str, TensorFile]:
    weight_map = read_json(index, _Index, error_type=CheckpointError).weight_map
    names = dict.fromkeys(weight_map.values())
    for name in names:
        checked_name(name, r".*\.safetensors", str(index), CheckpointError)
    files = {name: open_tensor_file(index.parent / name) for name in names}
    for tensor, name in weight_map.items():
        if tensor not in files[name].entries:
            problem = f"{tensor} not found; {index.name} names this file"
            raise CheckpointError(f"{index.parent / name}: {problem}")
    return {tensor: files[name] for tensor, name in weight_map.items()}
