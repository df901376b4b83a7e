"""The settings of a decoder that transformers implements, from its config.json."""

import json
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fsdpctl.config.hugging_face import CONFIG_JSON
from fsdpctl.errors import UsageError, nearest
from fsdpctl.io.documents import read_json

CONFIG_OF = "model=transformers: config.json"  # in messages about one that was read before
TRANSFORMERS = "transformers"  # the option, and the architecture of its models
# About the file rather than the model, or set by fsdpctl. Names of kernels are left out, as private
# names are: transformers would download and run them.
_NOT_THE_MODELS = (
    "architectures", "attn_implementation", "auto_map", "dtype", "experts_implementation",
    "id2label", "label2id", "torch_dtype", "transformers_version", "use_cache",
)  # fmt: skip
_OLDEST = (5, 20)  # version of transformers
# Our keys, and the attributes of a configuration of transformers; the first that is set counts.
_NUMBERS = {
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden_size": ("hidden_size", "d_model", "n_embd"),
    "intermediate_size": ("intermediate_size", "moe_intermediate_size", "ffn_dim", "n_inner"),
    "num_heads": ("num_attention_heads", "n_head"),
    "num_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "vocab_size": ("vocab_size",),
    "max_seq_len": ("max_position_embeddings", "n_positions", "max_seq_len"),
    "init_std": ("initializer_range",),
}


def transformers_words_of(file: Path) -> dict[str, str]:
    """Return `transformers_words` of a config.json.

    Raises:
        UsageError: If it cannot be read, or transformers cannot build the model.
    """
    return transformers_words(read_json(file, dict[str, Any]), str(file))


def transformers_words(content: Mapping[str, Any], where: str) -> dict[str, str]:
    """Return the settings of a model of transformers, without the prefix `model.`.

    Args:
        content: Of its config.json.
        where: The file, for messages.

    Raises:
        UsageError: If the installed transformers has no code for a causal decoder of this type.
    """
    if content.get("quantization_config") is not None:
        raise UsageError(f"{where}: quantization_config: not supported; expected full weights")
    kept = _of_the_model(content)
    config = read_configuration(kept, where, own_code="auto_map" in content)
    if config.model_type != kept["model_type"]:  # the text model of one that sees or hears, too
        kept = {**_of_the_model(config.to_diff_dict()), "model_type": config.model_type}
    words = {"architecture": TRANSFORMERS, "config_json": canonical(kept)}
    for ours, theirs in _NUMBERS.items():
        value = _value(config, theirs)
        if value is not None and value >= 0:
            words[ours] = str(value)
    words.setdefault("num_kv_heads", words.get("num_heads", "1"))
    words["tie_embeddings"] = str(bool(getattr(config, "tie_word_embeddings", False))).lower()
    return words


def _of_the_model(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that describe the model, in nested configurations too."""
    return {
        name: _of_the_model(value) if isinstance(value, Mapping) else value
        for name, value in content.items()
        if name not in _NOT_THE_MODELS and (name == "__float__" or not str(name).startswith("_"))
    }


def canonical(content: Mapping[str, Any]) -> str:
    """Return the text of a config.json that equal contents share."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def read_configuration(content: Mapping[str, Any], where: str, *, own_code: bool = False) -> Any:
    """Return transformers' configuration object of a causal decoder.

    Args:
        content: Of a config.json.
        where: The file, for messages.
        own_code: Whether the directory comes with code of its own, which is never run.

    Raises:
        UsageError: If transformers is missing, or does not know the model or its values.
    """
    check_installed(where)
    import transformers
    from transformers.models.auto import configuration_auto, modeling_auto

    family, version = str(content.get("model_type")), transformers.__version__
    known = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if family not in known:
        hint = nearest(family, list(known))
        own = ", and fsdpctl runs no code from model directories" if own_code else ""
        raise UsageError(
            f"{where}: model_type {family}: not a causal decoder of transformers {version}"
            f"{own}{hint}"
        )
    if not known[family].endswith(("ForCausalLM", "LMHeadModel")):
        raise UsageError(
            f"{where}: model_type {family}: {known[family]} is not a text decoder; expected the "
            f"{CONFIG_JSON} of a text model"
        )
    try:
        numbers = json.loads(json.dumps(content), object_hook=_special_float)
        return configuration_auto.CONFIG_MAPPING[family].from_dict(numbers).get_text_config()
    except Exception as error:  # its validators raise what they like
        reason = str(error).strip().replace("\n", " ")
        raise UsageError(f"{where}: transformers {version} rejects it: {reason}") from None


def check_installed(where: str) -> None:
    """Check that transformers is installed, in a version whose conversion tables are understood.

    Raises:
        UsageError: If it isn't; the message begins with `where`.
    """
    way_on = "install fsdpctl[transformers]"
    if find_spec("transformers") is None:
        raise UsageError(f"{where}: package transformers not found; {way_on}")
    found = version("transformers")
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise UsageError(f"{where}: transformers {found}: expected {oldest} or later; {way_on}")


def _special_float(content: dict[str, Any]) -> Any:
    """Return an infinite number as transformers writes it to JSON, or the content."""
    return float(content["__float__"]) if [*content] == ["__float__"] else content


def _value(config: Any, names: Sequence[str]) -> int | float | None:
    """Return the first attribute that is a number; one that differs by layer has none."""
    for name in names:
        try:
            value = getattr(config, name)
        except Exception:  # transformers raises its own
            continue
        if isinstance(value, int | float):
            return value
    return None
