"""Weights to begin from: a Hugging Face directory, or a checkpoint of ours."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fsdpctl.checkpoint.base import Overlay
from fsdpctl.checkpoint.cast import FLOATS
from fsdpctl.checkpoint.folders import find_checkpoint
from fsdpctl.checkpoint.manifest import PARAMETER, BaseInfo, TensorInfo, read_manifest, tensor_key
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.source import Tensors
from fsdpctl.checkpoint.tensor_file import ITEMSIZES, TensorEntry, TensorFile, open_tensor_file
from fsdpctl.config.hugging_face import CONFIG_JSON
from fsdpctl.config.model import ModelConfig
from fsdpctl.config.model_path import CHECKPOINTS, RUN_CONFIG, is_hugging_face
from fsdpctl.config.serialize import config_of_checkpoint
from fsdpctl.data.tokenizer import BYTES, TOKENIZER_FILES, TOKENIZER_JSON, read_files
from fsdpctl.errors import CheckpointError, UsageError
from fsdpctl.io.documents import MIB, read_json
from fsdpctl.io.files import plain_name
from fsdpctl.plan.layout import Span

_WHOLE, INDEX_JSON = "model.safetensors", "model.safetensors.index.json"
RUN_ASSETS = "assets"  # a run directory's folder of what belongs to a model beside its weights
ASSETS = (CONFIG_JSON, "generation_config.json", *TOKENIZER_FILES)
_MOST_INDEX_BYTES = 64 * MIB
_HEAD = "lm_head.weight"
_EMBEDDINGS = ("model.embed_tokens.weight", "transformer.wte.weight")  # GPT-2's last
# Constants that earlier versions of transformers saved as if they were weights.
_CONSTANTS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


@dataclass(frozen=True, slots=True)
class _Index:
    """What model.safetensors.index.json says."""

    weight_map: dict[str, str]  # from tensors to files


def open_weights(model: ModelConfig, folder: Path | None = None) -> Tensors:
    """The weights in `model.path`, or in `folder`, where those were found before.

    Raises:
        UsageError: there are none.
        CheckpointError: a file is missing or damaged.
    """
    folder = folder or weights_folder(model)
    if is_hugging_face(folder):
        return HuggingFaceWeights(folder, model)
    return whole_weights(CheckpointReader(folder))


def whole_weights(reader: CheckpointReader) -> Tensors:
    """All weights of a checkpoint, those too that it leaves to its base.

    Raises:
        CheckpointError: the base is not there any more, or damaged.
    """
    base = reader.manifest.base
    return reader if base is None else Overlay(reader, open_base(base, reader))


def open_base(base: BaseInfo, reader: CheckpointReader) -> Tensors:
    """The weights that the checkpoint of `reader` leaves to its `base`.

    Raises:
        CheckpointError: they are not there any more, or damaged.
    """
    folder = Path(base.path)
    if not folder.is_dir():
        raise CheckpointError(
            f"{reader}: holds only what was trained, and its base {folder} is not there; put it, "
            "or a link to it, where it was"
        )
    model = config_of_checkpoint(reader.manifest.config, str(reader)).model
    try:
        return open_weights(model, folder)
    except UsageError as error:
        raise CheckpointError(f"{reader}: its base {folder}: {error}") from None


def weights_folder(model: ModelConfig) -> Path:
    """Where the weights lie: `model.path`, or the newest checkpoint in it."""
    folder = Path(str(model.path))
    return folder if is_hugging_face(folder) else find_checkpoint(folder)


def assets_beside(folder: Path) -> dict[str, bytes]:
    """The files beside the weights in `model.path`, by name."""
    if is_hugging_face(folder):
        return read_assets(folder)
    reader = CheckpointReader(find_checkpoint(folder))
    return attached_files(reader)


def read_assets(folder: Path) -> dict[str, bytes]:
    """The files in `folder` that belong to a model beside its weights, by name."""
    return read_files(folder, ASSETS)


def tokenizer_beside(folder: Path) -> str | None:
    """The tokenizer of the model in `model.path`, as `data.tokenizer` names it; None if unknown.

    Raises:
        UsageError: it is of a form that is not read.
    """
    places = [folder]
    if not is_hugging_face(folder):
        checkpoint = find_checkpoint(folder)
        if read_manifest(checkpoint).config.get("data.tokenizer") == BYTES:
            return BYTES
        places = [checkpoint]
        run_dir = checkpoint.parent.parent
        if checkpoint.parent.name == CHECKPOINTS and (run_dir / RUN_CONFIG).is_file():
            places = [run_dir / RUN_ASSETS, checkpoint]  # the run's stays longer
    found = next((str(place) for place in places if (place / TOKENIZER_JSON).is_file()), None)
    others = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if found is None and others:
        raise UsageError(
            f"model.path={folder}: its tokenizer ({', '.join(others)}) is not read, only "
            f"{TOKENIZER_JSON}, which transformers writes: AutoTokenizer.from_pretrained(DIR)"
            ".save_pretrained(DIR); or data.tokenizer=bytes"
        )
    return found


def attached_files(reader: CheckpointReader) -> dict[str, bytes]:
    """All attachments of a checkpoint, by name."""
    read = {name: reader.attachment(name) for name in reader.manifest.attachments}
    return {name: content for name, content in read.items() if content is not None}


class HuggingFaceWeights:
    """The weights in a Hugging Face directory, in one safetensors file or several."""

    def __init__(self, folder: Path, model: ModelConfig) -> None:
        """Read the headers.

        Raises:
            UsageError: there are no safetensors files.
            CheckpointError: one is missing, cut short or not what it should be.
        """
        self.folder = folder
        self._found: dict[str, tuple[TensorFile, TensorEntry]] = {
            _full_name(name, model): (file, file.entries[name])
            for name, file in _files_of_weights(folder).items()
            if not name.endswith(_CONSTANTS)
        }
        if model.tie_embeddings and _HEAD in self._found:
            self._tie(_EMBEDDINGS[model.architecture == "gpt2"])

    def _tie(self, embedding: str) -> None:
        """Keep one of the head and the input embedding."""
        head = tensor_key(PARAMETER, _HEAD)
        if embedding in self._found:
            there = tensor_key(PARAMETER, embedding)
            same = self.info(head) == self.info(there) and all(
                ours == theirs
                for (_, ours), (_, theirs) in zip(self.read(head), self.read(there), strict=True)
            )
            if not same:
                raise CheckpointError(
                    f"{self.folder}: {_HEAD} is not {embedding}, which config.json says it is; "
                    "with model.tie_embeddings=false both are read"
                )
        self._found.setdefault(embedding, self._found.pop(_HEAD))

    def __str__(self) -> str:
        return str(self.folder)

    def names(self, kind: str) -> list[str]:
        """Names of the weights; nothing else is kept here."""
        return sorted(self._found) if kind == PARAMETER else []

    def info(self, key: str) -> TensorInfo:
        """Shape and dtype of a weight."""
        file, entry = self._entry(key)
        if entry.dtype not in FLOATS:
            raise CheckpointError(
                f"{file.path}: {entry.name} is {entry.dtype}; quantized weights are not read"
            )
        return TensorInfo(list(entry.shape), entry.dtype)

    def read(self, key: str, span: Span | None = None) -> Iterator[tuple[Span, memoryview]]:
        """The elements `span` of a flattened weight, a chunk at a time; nothing to check it by."""
        file, entry = self._entry(key)
        size = ITEMSIZES[entry.dtype]
        span = span or Span(0, entry.nbytes // size)
        start = span.start
        for data in file.chunks(entry, span.start * size, span.stop * size):
            yield Span(start, start + len(data) // size), data
            start += len(data) // size

    def _entry(self, key: str) -> tuple[TensorFile, TensorEntry]:
        name = key.removeprefix(tensor_key(PARAMETER, ""))
        if name not in self._found:
            raise CheckpointError(f"{self.folder}: there is no {name} in these weights")
        return self._found[name]


def _full_name(name: str, model: ModelConfig) -> str:
    """As the whole model calls it, where only its decoder was saved."""
    prefix = "transformer." if model.architecture == "gpt2" else "model."
    return name if name.startswith((prefix, "lm_head.")) else prefix + name


def _files_of_weights(folder: Path) -> dict[str, TensorFile]:
    """The file that each weight is read from: that which transformers reads it from."""
    whole, index = folder / _WHOLE, folder / INDEX_JSON
    if not whole.is_file() and index.is_file():
        return _files_of_index(index)
    paths = [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
    if not paths:
        raise UsageError(f"model.path={folder}: {_no_weights(folder)}")
    if len(paths) > 1:
        names = ", ".join(path.name for path in paths[:3])
        raise UsageError(
            f"model.path={folder}: which of {names} …? neither {_WHOLE} nor {INDEX_JSON} is in it"
        )
    file = open_tensor_file(paths[0])
    return dict.fromkeys(file.entries, file)


def _files_of_index(index: Path) -> dict[str, TensorFile]:
    content = read_json(index, _Index, most_bytes=_MOST_INDEX_BYTES, refusal=CheckpointError)
    weight_map = content.weight_map
    for name in dict.fromkeys(weight_map.values()):
        plain_name(name, r".*\.safetensors", str(index), CheckpointError)
    files = {
        name: open_tensor_file(index.parent / name) for name in dict.fromkeys(weight_map.values())
    }
    for tensor, name in weight_map.items():
        if tensor not in files[name].entries:
            raise CheckpointError(
                f"{index.parent / name}: {tensor} is not in it, where {index.name} says so"
            )
    return {tensor: files[name] for tensor, name in weight_map.items()}


def _no_weights(folder: Path) -> str:
    others = [*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]
    if others:
        return f"{others[0].name} is not read, only *.safetensors; model.init=random needs none"
    return "no *.safetensors in it; model.init=random trains from scratch"
