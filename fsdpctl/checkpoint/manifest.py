"""What a checkpoint consists of: the file that is written last and makes it complete."""

from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from fsdpctl.checkpoint.tensor_file import ITEMSIZES
from fsdpctl.config.sealed import MANIFEST, read_sealed, seal
from fsdpctl.data.tokenizer import MOST_ASSET_BYTES
from fsdpctl.errors import CheckpointError
from fsdpctl.io.documents import as_type
from fsdpctl.io.files import plain_name

_MOST = 1 << 60  # bytes, elements, steps
_MOST_ACCEPTED = 1 << 10
_RANK_FILE = r"rank-\d{5,}\.safetensors"
_ATTACHMENT = r".*\.(json|jinja|model|txt)"  # files of data: nothing that anybody runs
Count = Annotated[int, Meta(ge=0, le=_MOST)]

PARAMETER, BUFFER = "model", "buffer"  # kinds of tensors; other kinds are optimizer states


def tensor_key(kind: str, name: str) -> str:
    """How a tensor is called in files: its kind, then the parameter's name."""
    return f"{kind}/{name}"


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file of the checkpoint, as it must be."""

    size: Count
    xxh3: str  # of all bytes; of a tensor file's header, which has those of the tensors


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A whole tensor, however many files its spans lie in."""

    shape: Annotated[list[Count], Meta(max_length=64)]
    dtype: str  # safetensors' name

    @property
    def numel(self) -> int:
        """How many elements it has; 1 for a scalar."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return self.numel * ITEMSIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class AcceptedStep:
    """What later steps are measured by: a step that was applied."""

    step: Count
    loss: float
    log_grad_norm: float


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the run had come."""

    step: Count = 0  # optimizer steps done
    samples: Count = 0  # samples consumed: the position in the data
    data_fingerprint: str = ""
    owes_validation: bool = False  # the step's own, which a request to stop cut short
    num_skips: Count = 0  # steps that were left out or gone back from, for their numbers
    accepted: Annotated[list[AcceptedStep], Meta(max_length=_MOST_ACCEPTED)] = field(
        default_factory=list
    )  # the newest; empty where spikes are not looked for
    optimizer_step: Count = 0  # of every parameter that `optimizer_steps` does not name
    optimizer_steps: dict[str, Count] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)  # the caller's own
    param_groups: list[dict[str, Any]] = field(
        default_factory=list
    )  # options, of loops of one's own


@dataclass(frozen=True, slots=True)
class BaseInfo:
    """Weights that are not in the checkpoint, because they are not trained."""

    path: str  # of a Hugging Face directory or a checkpoint
    xxh3: str  # over all weights there, as they are stored


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything about a checkpoint but the tensors' bytes."""

    files: dict[str, FileInfo]  # of tensors
    attachments: dict[str, FileInfo]  # what came with the model, such as its tokenizer
    tensors: dict[str, TensorInfo]  # by key
    progress: Progress
    config: dict[str, str]  # the resolved configuration, as words
    versions: dict[str, str]
    world_size: Count
    base: BaseInfo | None = None  # what has the weights that are not here; None: all are

    def to_json(self) -> str:
        """The contents of manifest.json."""
        content = asdict(self)
        if self.base is None:
            del content["base"]
        return seal(content)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`.

    Raises:
        CheckpointError: it is missing, damaged, or of a version this one does not know.
    """
    where = f"{folder / MANIFEST}: damaged"
    manifest = as_type(read_sealed(folder), Manifest, where, CheckpointError)
    _check(manifest, where)
    return manifest


def _check(manifest: Manifest, where: str) -> None:
    """What types do not say: names that stay in the folder, sizes that can be."""
    for names, form in ((manifest.files, _RANK_FILE), (manifest.attachments, _ATTACHMENT)):
        for name in names:
            plain_name(name, form, where, CheckpointError)
    for name, about in manifest.attachments.items():
        if name == MANIFEST or about.size > MOST_ASSET_BYTES:
            raise CheckpointError(f"{where}: {name} is no attachment that is read")
    for key, info in manifest.tensors.items():
        if info.dtype not in ITEMSIZES or info.numel > _MOST:
            raise CheckpointError(f"{where}: {key[:80]} is no tensor that is read")
