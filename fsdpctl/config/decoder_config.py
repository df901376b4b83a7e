"""Configurations of decoders, as transformers reads them from a config.json."""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from inspect import getattr_static
from types import FunctionType
from typing import Any

from fsdpctl.config.model import ModelConfig
from fsdpctl.errors import UsageError, did_you_mean
from fsdpctl.io.run_files import CONFIG_JSON
from fsdpctl.io.untrusted import parse_json

CONFIG_LOCATION = "the model's config.json"  # location in messages about a stored config.json
# Keys that fsdpctl drops, as private keys: they describe the file, fsdpctl sets them, or they name
# kernels, which transformers would download and run.
_FILE_KEYS = (
    "architectures", "attn_implementation", "auto_map", "dtype", "experts_implementation",
    "id2label", "label2id", "torch_dtype", "transformers_version", "use_cache",
)  # fmt: skip
# Types of class attributes of transformers' configurations that a file must not replace.
_RESERVED_TYPES = (FunctionType, classmethod, staticmethod, dict)
# Keys under which transformers looks for the text model of a multimodal model.
_SUBCONFIGS = ("text_config", "decoder", "generator", "text_encoder")
# Keys that fsdpctl sets when it writes a config.json, and their allowed values.
_DTYPES = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "auto")
_FILE_VALUES = {"dtype": _DTYPES, "torch_dtype": _DTYPES, "use_cache": ("true", "false")}
# Messages of transformers' validators: of a wrong type, and the prefix of all other messages.
_TYPE_ERROR = re.compile(r"Field '(\w+)' expected (\w+), got \w+ \(value: (.*)\)")
_VALIDATOR_PREFIX = re.compile(r"Class validation error for validator '\w+': \w+: ")
_TYPES = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text"}
# fsdpctl's names of sizes, and attributes of transformers' configurations. The first attribute
# that a configuration has is read.
SIZE_NAMES = {
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden_size": ("hidden_size", "d_model", "n_embd"),
    "intermediate_size": ("intermediate_size", "moe_intermediate_size", "ffn_dim", "n_inner"),
    "num_heads": ("num_attention_heads", "n_head"), "num_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",), "vocab_size": ("vocab_size",),
    "max_seq_len": ("max_position_embeddings", "n_positions", "max_seq_len"),
}  # fmt: skip


def sizes_and_config(content: Mapping[str, Any], location: str) -> dict[str, str]:
    """Return the sizes and the canonical config.json of a model as settings.

    `location` begins messages. UsageError if the installed transformers has no causal decoder of
    this type, or rejects a value.
    """
    if content.get("quantization_config") is not None:
        raise UsageError(f"{location}: quantization_config: not supported; expected full weights")
    _check_file_values(content, location)
    model_keys = _without_file_keys(content)
    hf_config = read_hf_config(model_keys, location, has_code="auto_map" in content)
    model_type = hf_config.model_type
    if model_type != model_keys["model_type"]:  # the text part of a multimodal model
        model_keys = {**_without_file_keys(hf_config.to_diff_dict()), "model_type": model_type}
    settings = {"model.config_json": canonical_json(model_keys)}
    for name, hf_names in SIZE_NAMES.items():
        value = _value(hf_config, hf_names)
        if value is not None and value >= 0:  # a negative number means no limit
            settings[f"model.{name}"] = str(value)
    return {"model.num_kv_heads": settings.get("model.num_heads", "1"), **settings}


def config_dict(model: ModelConfig) -> dict[str, Any]:
    """Return the content of a model's config.json."""
    return parse_json(str(model.config_json), dict[str, Any], CONFIG_LOCATION)


@lru_cache(maxsize=8)
def _hf_config(text: str) -> Any:
    return read_hf_config(parse_json(text, dict[str, Any], CONFIG_LOCATION), CONFIG_LOCATION)


def config_value(model: ModelConfig, name: str) -> Any:
    """Return a value of config.json, else its default in transformers, else None."""
    return getattr(_hf_config(str(model.config_json)), name, None)


def model_type_of(model: ModelConfig) -> str:
    """Return transformers' `model_type` of a model, such as llama."""
    return _model_type(str(model.config_json))


@lru_cache(maxsize=8)
def _model_type(text: str) -> str:
    return str(parse_json(text, dict[str, Any], CONFIG_LOCATION).get("model_type"))


def exported_config(model: ModelConfig, dtype: str, source: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of config.json as transformers writes it, for weights of `dtype`.

    Other keys, such as token ids, are those of `source`, the pretrained model's config.json.
    """
    content = config_dict(model)
    model_type = content["model_type"]
    from transformers.models.auto import modeling_auto

    source_keys = dict(source) if source.get("model_type") == model_type else {}
    source_keys.pop("torch_dtype", None)
    try:
        hf_config = read_hf_config({**source_keys, **content}, CONFIG_LOCATION)
    except UsageError:  # another key of the source, such as a label, is invalid
        hf_config = read_hf_config({**_without_file_keys(source_keys), **content}, CONFIG_LOCATION)
    class_name = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    hf_config.architectures = source_keys.get("architectures") or [class_name]
    hf_config.dtype = dtype
    exported: dict[str, Any] = json.loads(hf_config.to_json_string())
    return exported


def with_sizes(model: ModelConfig, **sizes: Any) -> ModelConfig:
    """Return a model with other sizes, in its keys and in its config.json."""
    resized = with_config(model, resize(config_dict(model), sizes, CONFIG_LOCATION))
    return replace(resized, **sizes)


def with_config(model: ModelConfig, content: Mapping[str, Any]) -> ModelConfig:
    """Return a model with another content of config.json."""
    return replace(model, config_json=canonical_json(content))


def resize(content: Mapping[str, Any], sizes: Mapping[str, Any], location: str) -> dict[str, Any]:
    """Return the content of config.json with other sizes, which have fsdpctl's names.

    Lists with one item per block, such as kinds of attention, are repeated or cut.
    """
    hf_config, resized = read_hf_config(content, location), dict(content)
    for size, value in sizes.items():
        hf_names = [x for x in SIZE_NAMES.get(size, ()) if _value(hf_config, [x]) is not None]
        if not hf_names or value is None:
            continue
        old_value = _value(hf_config, hf_names)
        name = hf_config.attribute_map.get(hf_names[0], hf_names[0])
        # config.json has a set vocabulary size even if it is the default, which the data replaces.
        if value != old_value or size == "vocab_size":
            resized[name] = value
        for key, items in content.items() if size == "num_layers" else ():
            if isinstance(items, list) and len(items) == old_value:
                resized[key] = (items * -(-value // len(items)))[:value]
    return resized


def _without_file_keys(content: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_file_keys(value) if isinstance(value, Mapping) else value
        for name, value in content.items()
        if name not in _FILE_KEYS and (name == "__float__" or not str(name).startswith("_"))
    }


def canonical_json(content: Mapping[str, Any]) -> str:
    """Return the JSON of a content; equal contents have equal texts."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def read_hf_config(content: Mapping[str, Any], location: str, *, has_code: bool = False) -> Any:
    """Return transformers' configuration object for the content of a config.json.

    `location` begins messages. `has_code`: the directory has Python code, which fsdpctl never runs.
    UsageError if transformers has no such causal decoder, or rejects a value.
    """
    import transformers
    from transformers.models.auto import configuration_auto, modeling_auto

    model_type, version = str(content.get("model_type")), transformers.__version__
    class_names = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if model_type not in class_names:
        problem = f"model_type {model_type}: not a causal decoder of transformers {version}"
        problem += ", and fsdpctl runs no code from model directories" if has_code else ""
        raise UsageError(f"{location}: {problem}{did_you_mean(model_type, list(class_names))}")
    if not class_names[model_type].endswith(("ForCausalLM", "LMHeadModel")):
        problem = f"{class_names[model_type]} is not a text decoder"
        expected = f"the {CONFIG_JSON} of a text model"
        raise UsageError(f"{location}: model_type {model_type}: {problem}; expected {expected}")
    try:
        with _silent(transformers.logging):
            config_class = configuration_auto.CONFIG_MAPPING[model_type]
            for name in content:
                if isinstance(getattr_static(config_class, name, None), _RESERVED_TYPES):
                    raise UsageError(f"{location}: {name}: not a key of config.json")
            _check_subconfigs(content, location, config_class.sub_configs)
            plain_content = json.loads(json.dumps(content), object_hook=_special_float)
            return config_class.from_dict(plain_content).get_text_config()
    except UsageError:
        raise
    except Exception as error:  # validators of transformers raise arbitrary exceptions
        raise UsageError(f"{location}: {_rejection(error)} (transformers {version})") from None


def known_names(hf_config: Any) -> dict[str, Collection[str]]:
    """Return the keys of a configuration of transformers, each with the keys of its mapping."""
    from transformers.modeling_rope_utils import RopeParameters

    names: dict[str, Collection[str]] = {
        name: [*value] if isinstance(value, dict) else ()
        for name, value in {**hf_config.to_dict(), **hf_config.attribute_map}.items()
        if name not in _FILE_KEYS and not name.startswith("_")
    }
    if "rope_parameters" in names:
        names |= {"rope_theta": (), "partial_rotary_factor": ()}
        ropes = (*names["rope_parameters"], *RopeParameters.__annotations__)
        names |= {"rope_parameters": ropes, "rope_scaling": ropes}
    return names


@contextmanager
def _silent(logging: Any) -> Iterator[None]:
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _special_float(content: dict[str, Any]) -> Any:
    """Return the float of transformers' {"__float__": "Infinity"}, or the content."""
    return float(content["__float__"]) if [*content] == ["__float__"] else content


def _value(hf_config: Any, names: Sequence[str]) -> int | float | None:
    """Return the first attribute that is a number, not a list of sizes that differ by layer."""
    for name in names:
        try:
            value = getattr(hf_config, name)
        except Exception:  # attributes may be properties that raise arbitrary exceptions
            continue
        if isinstance(value, int | float):
            return value
    return None


def _check_subconfigs(content: Mapping[str, Any], location: str, allowed: Collection[str]) -> None:
    for name in {*_SUBCONFIGS, *allowed} & content.keys():
        value = content[name]
        if value is not None and name not in allowed:
            problem = f"{name}: not supported by model_type {content.get('model_type')}"
            raise UsageError(f"{location}: {problem}")
        if value is not None and not isinstance(value, Mapping):
            raise UsageError(f"{location}: {name}: expected a mapping, got {_shortened(value)}")


def _check_file_values(content: Mapping[str, Any], location: str) -> None:
    for name, allowed in _FILE_VALUES.items():
        value = content.get(name)
        text = str(value).lower().removeprefix("torch.")
        if text not in (*allowed, "none") and not isinstance(value, Mapping):
            expected = f"{', '.join(allowed)}{did_you_mean(text, allowed)}"
            raise UsageError(f"{location}: {name} {_shortened(value)}: expected {expected}")


def _rejection(error: Exception) -> str:
    """Return the reason of a rejection: `KEY VALUE: expected TYPE`, or transformers' message."""
    reason = " ".join(str(error).split()) or type(error).__name__
    if match := _TYPE_ERROR.search(reason):
        name, type_name, value = match.groups()
        text = _shortened(value.strip("'"))
        return f"{name} {text}: expected {_TYPES.get(type_name, type_name)}"
    return _VALIDATOR_PREFIX.sub("", reason)


def _shortened(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
