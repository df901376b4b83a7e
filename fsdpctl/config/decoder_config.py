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

CONFIG_LOCATION = "the model's config.json"  # in messages about one that was read before
# About the file rather than the model, or set by fsdpctl. Names of kernels are left out, as private
# names are: transformers would download and run them.
_FILE_KEYS = (
    "architectures", "attn_implementation", "auto_map", "dtype", "experts_implementation",
    "id2label", "label2id", "torch_dtype", "transformers_version", "use_cache",
)  # fmt: skip
_METHODS = (FunctionType, classmethod, staticmethod, dict)  # of transformers' classes, and tables
# Where transformers looks for the text model in a configuration.
_PARTS = ("text_config", "decoder", "generator", "text_encoder")
# Keys about the file, which fsdpctl sets when it writes one, and their values.
_DTYPES = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "auto")
_ABOUT = {"dtype": _DTYPES, "torch_dtype": _DTYPES, "use_cache": ("true", "false")}
# Of the errors of transformers' validators: the key, the type and the value; or what precedes them.
_FIELD = re.compile(r"Field '(\w+)' expected (\w+), got \w+ \(value: (.*)\)")
_VALIDATOR = re.compile(r"Class validation error for validator '\w+': \w+: ")
_TYPES = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text"}
# Our keys, and the attributes of a configuration of transformers; the first that is set counts.
SIZE_NAMES = {
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden_size": ("hidden_size", "d_model", "n_embd"),
    "intermediate_size": ("intermediate_size", "moe_intermediate_size", "ffn_dim", "n_inner"),
    "num_heads": ("num_attention_heads", "n_head"),
    "num_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "vocab_size": ("vocab_size",),
    "max_seq_len": ("max_position_embeddings", "n_positions", "max_seq_len"),
}


def sizes_and_config(content: Mapping[str, Any], where: str) -> dict[str, str]:
    """Return the settings of a model by its config.json, without the prefix `model.`.

    `where` is the file, for messages. UsageError if the installed transformers has no code for a
    causal decoder of this type, or if a value is out of its bounds.
    """
    if content.get("quantization_config") is not None:
        raise UsageError(f"{where}: quantization_config: not supported; expected full weights")
    _check_about(content, where)
    kept = _of_the_model(content)
    config = read_configuration(kept, where, own_code="auto_map" in content)
    if config.model_type != kept["model_type"]:  # the text model of one that sees or hears, too
        kept = {**_of_the_model(config.to_diff_dict()), "model_type": config.model_type}
    words = {"config_json": canonical_json(kept)}
    for ours, theirs in SIZE_NAMES.items():
        value = _value(config, theirs)
        if value is not None and value >= 0:  # negative: a default without a limit
            words[ours] = str(value).lower()
    return {"num_kv_heads": words.get("num_heads", "1"), **words}


def config_dict(model: ModelConfig) -> dict[str, Any]:
    return parse_json(str(model.config_json), dict[str, Any], CONFIG_LOCATION)


@lru_cache(maxsize=8)
def _configuration(text: str) -> Any:
    return read_configuration(parse_json(text, dict[str, Any], CONFIG_LOCATION), CONFIG_LOCATION)


def config_value(model: ModelConfig, name: str) -> Any:
    """Return a value of a model's config.json, or its default in transformers; None without one."""
    return getattr(_configuration(str(model.config_json)), name, None)


def model_type_of(model: ModelConfig) -> str:
    return model_type_in(str(model.config_json))


@lru_cache(maxsize=8)
def model_type_in(text: str) -> str:
    return str(parse_json(text, dict[str, Any], CONFIG_LOCATION).get("model_type"))


def exported_config(model: ModelConfig, dtype: str, source: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of config.json, as transformers writes it, for weights of `dtype`.

    Settings of `source`, the config.json of the pretrained model, that don't describe the shape,
    such as token ids, are kept.
    """
    content = config_dict(model)
    family = content["model_type"]
    from transformers.models.auto import modeling_auto

    kept = dict(source) if source.get("model_type") == family else {}
    kept.pop("torch_dtype", None)
    try:
        config = read_configuration({**kept, **content}, CONFIG_LOCATION)
    except UsageError:  # a value that is not the model's, such as a label
        config = read_configuration({**_of_the_model(kept), **content}, CONFIG_LOCATION)
    class_name = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
    config.architectures = kept.get("architectures") or [class_name]
    config.dtype = dtype
    written: dict[str, Any] = json.loads(config.to_json_string())
    return written


def with_sizes(model: ModelConfig, **sizes: Any) -> ModelConfig:
    return with_config(model, with_other_sizes(config_dict(model), sizes, CONFIG_LOCATION), **sizes)


def with_config(model: ModelConfig, content: Mapping[str, Any], **sizes: Any) -> ModelConfig:
    return replace(model, **sizes, config_json=canonical_json(content))


def with_other_sizes(
    content: Mapping[str, Any], sizes: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """Return the content with other sizes by our keys; kinds of blocks repeat if there are more."""
    config, changed = read_configuration(content, where), dict(content)
    for ours, value in sizes.items():
        names = [name for name in SIZE_NAMES.get(ours, ()) if _value(config, [name]) is not None]
        if not names or value is None:
            continue
        before, name = _value(config, names), config.attribute_map.get(names[0], names[0])
        if value != before or ours == "vocab_size":
            changed[name] = value
        for kinds, each in content.items() if ours == "num_layers" else ():
            if isinstance(each, list) and len(each) == before:
                changed[kinds] = (each * -(-value // len(each)))[:value]
    return changed


def _of_the_model(content: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _of_the_model(value) if isinstance(value, Mapping) else value
        for name, value in content.items()
        if name not in _FILE_KEYS and (name == "__float__" or not str(name).startswith("_"))
    }


def canonical_json(content: Mapping[str, Any]) -> str:
    """Return the text of a config.json that equal contents share."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def read_configuration(content: Mapping[str, Any], where: str, *, own_code: bool = False) -> Any:
    """Return transformers' configuration object of a causal decoder with this config.json.

    `where` is the file, for messages; `own_code`: its directory comes with code of its own, which
    is never run. UsageError if transformers does not know the model or its values.
    """
    import transformers
    from transformers.models.auto import configuration_auto, modeling_auto

    family, version = str(content.get("model_type")), transformers.__version__
    known = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if family not in known:
        hint = did_you_mean(family, list(known))
        own = ", and fsdpctl runs no code from model directories" if own_code else ""
        problem = f"model_type {family}: not a causal decoder of transformers {version}{own}{hint}"
        raise UsageError(f"{where}: {problem}")
    if not known[family].endswith(("ForCausalLM", "LMHeadModel")):
        raise UsageError(
            f"{where}: model_type {family}: {known[family]} is not a text decoder; expected the "
            f"{CONFIG_JSON} of a text model"
        )
    try:
        with _silent(transformers.logging):
            made = configuration_auto.CONFIG_MAPPING[family]
            for name in content:
                if isinstance(getattr_static(made, name, None), _METHODS):
                    raise UsageError(f"{where}: {name}: not a key of such a file")
            _check_parts(content, where, made.sub_configs)
            numbers = json.loads(json.dumps(content), object_hook=_special_float)
            return made.from_dict(numbers).get_text_config()
    except UsageError:
        raise
    except Exception as error:  # its validators raise what they like
        raise UsageError(f"{where}: {_rejection(error)} (transformers {version})") from None


def known_names(config: Any) -> dict[str, Collection[str]]:
    """Return the keys of a configuration of transformers, with those of mappings in it."""
    from transformers.modeling_rope_utils import RopeParameters

    names: dict[str, Collection[str]] = {
        name: [*value] if isinstance(value, dict) else ()
        for name, value in {**config.to_dict(), **config.attribute_map}.items()
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


def _check_parts(content: Mapping[str, Any], where: str, parts: Collection[str]) -> None:
    for name in {*_PARTS, *parts} & content.keys():
        value = content[name]
        if value is not None and name not in parts:
            problem = f"{name}: not supported; {content.get('model_type')} has no such part"
            raise UsageError(f"{where}: {problem}")
        if value is not None and not isinstance(value, Mapping):
            raise UsageError(f"{where}: {name}: expected a mapping, got {_shown(value)}")


def _check_about(content: Mapping[str, Any], where: str) -> None:
    for name, known in _ABOUT.items():
        value = content.get(name)
        text = str(value).lower().removeprefix("torch.")
        if text not in (*known, "none") and not isinstance(value, Mapping):
            expected = f"{', '.join(known)}{did_you_mean(text, known)}"
            raise UsageError(f"{where}: {name} {_shown(value)}: expected {expected}")


def _rejection(error: Exception) -> str:
    """Return what transformers rejects: `KEY VALUE: expected TYPE`, or its own reason."""
    reason = " ".join(str(error).split()) or type(error).__name__
    if found := _FIELD.search(reason):
        name, kind, value = found.groups()
        return f"{name} {_shown(value.strip(chr(39)))}: expected {_TYPES.get(kind, kind)}"
    return _VALIDATOR.sub("", reason)


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
