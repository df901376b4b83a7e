"""The model in a GGUF file, as transformers reads it from the file's metadata."""

from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fsdpctl.errors import UsageError, nearest
from fsdpctl.io.files import silenced_errors
from fsdpctl.io.gguf_header import OWN_CONFIG, GgufHeader, is_gguf, read_header
from fsdpctl.io.untrusted import parse_json

_ARCHITECTURES = (
    "falcon", "gemma2", "gemma3", "llama", "nemotron", "phi3", "qwen2", "qwen2moe", "qwen3",
    "qwen3moe", "stablelm", "starcoder2",
)  # fmt: skip
# Sizes that transformers leaves to the defaults of a family.
_MORE_SIZES = {
    "attention.key_length": "head_dim",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
# Tensors that scale rotary embeddings, which transformers does not read.
SCALINGS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def config_of_gguf(path: Path) -> dict[str, Any]:
    """Return the content of the config.json that transformers makes of a GGUF file.

    Raises:
        UsageError: If the file is damaged, or its architecture not supported.
    """
    return dict(_config(path.absolute(), path.stat().st_mtime_ns))


@lru_cache(maxsize=4)
def _config(path: Path, changed: int) -> dict[str, Any]:
    header = read_header(path)
    kind, metadata = header.architecture, header.metadata
    if kind not in _ARCHITECTURES:
        known = f"{nearest(kind, _ARCHITECTURES)}; expected {', '.join(_ARCHITECTURES)}"
        raise UsageError(f"{path}: architecture {kind}: not supported{known}")
    try:
        with silenced_errors(), TemporaryDirectory(prefix="fsdpctl-") as folder:
            from transformers import AutoConfig, modeling_gguf_pytorch_utils

            load: Any = modeling_gguf_pytorch_utils.load_gguf_checkpoint
            content: dict[str, Any] = load(_without_lists(header, Path(folder, "m.gguf")))["config"]
            usual = AutoConfig.for_model(content["model_type"]).to_dict()
        content["vocab_size"] = header.tensors["token_embd.weight"].shape[0]
    except Exception as error:  # of code that expects complete files
        problem = " ".join(f"{type(error).__name__}: {error}".split())
        raise UsageError(f"{path}: transformers cannot read it: {problem:.200}") from None
    for theirs, name in _MORE_SIZES.items():
        if name in usual and f"{kind}.{theirs}" in metadata:
            content.setdefault(name, metadata[f"{kind}.{theirs}"])
    where = f"{path}: {OWN_CONFIG}"
    return content | parse_json(metadata.get(OWN_CONFIG, "{}"), dict[str, Any], where)


def _without_lists(header: GgufHeader, copy: Path) -> str:
    """Write a file with the names and single values of a header, which is read fast.

    With the tokens of a usual vocabulary, transformers takes ten seconds and half a GiB.
    """
    import gguf
    import numpy as np

    writer, kinds = gguf.GGUFWriter(copy, header.architecture), gguf.GGUFValueType
    types = {str: kinds.STRING, bool: kinds.BOOL, int: kinds.INT64, float: kinds.FLOAT64}
    for name, value in header.metadata.items():
        if type(value) in types and name not in ("general.architecture", "tokenizer.ggml.tokens"):
            writer.add_key_value(name, value, types[type(value)])
    for name in header.tensors:
        writer.add_tensor(name, np.zeros(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(copy)


def notes_on_gguf(path: str | None) -> tuple[str, ...]:
    """Return a note if the model is in a GGUF file of which transformers ignores a part."""
    header = read_header(Path(path)) if path is not None and is_gguf(Path(path)) else None
    if header is None or OWN_CONFIG in header.metadata:
        return ()
    kind = header.metadata.get(f"{header.architecture}.rope.scaling.type", "none")
    if kind == "none" and not header.tensors.keys() & set(SCALINGS):
        return ()
    return (
        f"{path}: its scaling of rotary embeddings is not read, as in transformers; set it by "
        "model.overrides.rope_scaling",
    )
