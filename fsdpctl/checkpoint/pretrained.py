"""Weights to begin from: a Hugging Face directory, or a checkpoint of ours."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from fsdpctl.checkpoint.folders import find_checkpoint
from fsdpctl.checkpoint.manifest import PARAMETER, TensorInfo, tensor_key
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.source import Tensors
from fsdpctl.checkpoint.tensor_file import ITEMSIZES, TensorEntry, TensorFile, open_tensor_file
from fsdpctl.config.hugging_face import CONFIG_JSON, read_json
from fsdpctl.config.schema import ModelConfig
from fsdpctl.data.tokenizer import BYTES, TOKENIZER_FILES, TOKENIZER_JSON
from fsdpctl.errors import CheckpointError, UsageError
from fsdpctl.plan.layout import Span

INDEX_JSON = "model.safetensors.index.json"
# What belongs to a model beside its weights.
RUN_ASSETS = "assets"  # a run directory's folder of them
ASSETS = (CONFIG_JSON, "generation_config.json", *TOKENIZER_FILES)
_HEAD, _EMBEDDINGS = "lm_head.weight", {"gpt2": "transformer.wte.weight"}
_LLAMA_EMBEDDING = "model.embed_tokens.weight"
# Constants that earlier versions of transformers saved as if they were weights.
_CONSTANTS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


def open_weights(model: ModelConfig) -> Tensors:
    """The weights in `model.path`.

    Raises:
        UsageError: there are none.
        CheckpointError: a file is missing or damaged.
    """
    folder = weights_folder(model)
    if is_hugging_face(folder):
        return HuggingFaceWeights(folder, model)
    return CheckpointReader(folder)


def weights_folder(model: ModelConfig) -> Path:
    """Where the weights lie: `model.path`, or the newest checkpoint in it."""
    folder = Path(str(model.path))
    return folder if is_hugging_face(folder) else find_checkpoint(folder)


def is_hugging_face(folder: Path) -> bool:
    """Whether a directory is no run and no checkpoint, but has a config.json."""
    ours = ("manifest.json", "config.yaml")
    return (folder / CONFIG_JSON).is_file() and not any((folder / name).is_file() for name in ours)


def assets_beside(folder: Path) -> dict[str, bytes]:
    """The files beside the weights in `model.path`, by name."""
    if is_hugging_face(folder):
        files = (folder / name for name in ASSETS)
        return {file.name: file.read_bytes() for file in files if file.is_file()}
    reader = CheckpointReader(find_checkpoint(folder))
    return attached_files(reader)


def tokenizer_beside(folder: Path) -> str | None:
    """The tokenizer of the model in `model.path`, as `data.tokenizer` names it; None if unknown."""
    places = [folder]
    if not is_hugging_face(folder):
        checkpoint = find_checkpoint(folder)
        if CheckpointReader(checkpoint).manifest.config.get("data.tokenizer") == BYTES:
            return BYTES
        places = [checkpoint.parent.parent / RUN_ASSETS, checkpoint]  # the run's stays longer
    return next((str(place) for place in places if (place / TOKENIZER_JSON).is_file()), None)


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
        self._found: dict[str, tuple[TensorFile, TensorEntry]] = {}
        for file in _open_files(folder):
            for name, entry in file.entries.items():
                if not name.endswith(_CONSTANTS):
                    self._found[_full_name(name, model)] = (file, entry)
        if model.tie_embeddings:
            head = self._found.pop(_HEAD, None)
            embedding = _EMBEDDINGS.get(model.architecture, _LLAMA_EMBEDDING)
            if head is not None:
                self._found.setdefault(embedding, head)

    def __str__(self) -> str:
        return str(self.folder)

    def names(self, kind: str) -> list[str]:
        """Names of the weights; nothing else is kept here."""
        return sorted(self._found) if kind == PARAMETER else []

    def info(self, key: str) -> TensorInfo:
        """Shape and dtype of a weight."""
        _, entry = self._entry(key)
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


def _open_files(folder: Path) -> list[TensorFile]:
    index = folder / INDEX_JSON
    if not index.is_file():
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise UsageError(f"model.path={folder}: {_no_weights(folder)}")
        return [open_tensor_file(path) for path in paths]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, Mapping):
        raise CheckpointError(f"{index}: damaged: it has no weight_map")
    files = {
        name: open_tensor_file(folder / str(name)) for name in dict.fromkeys(weight_map.values())
    }
    for tensor, name in weight_map.items():
        if tensor not in files[name].entries:
            raise CheckpointError(
                f"{folder / str(name)}: {tensor} is not in it, against {index.name}"
            )
    return list(files.values())


def _no_weights(folder: Path) -> str:
    others = [*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]
    if others:
        return f"{others[0].name} is not read, only *.safetensors; model.init=random needs none"
    return "no *.safetensors in it; model.init=random trains from scratch"
