"""Bounds for values of a config.json, checked before transformers builds anything from them.

transformers checks the types of the keys that it declares. It has no bounds: a size can be
negative, or large enough to fill the memory. A value that is the default of its class is accepted.
"""

import math
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from fsdpctl.config.model import MOST_LAYERS, MOST_TOKENS, MOST_WIDTH
from fsdpctl.errors import UsageError, nearest

# Where transformers looks for the text model in a configuration.
PARTS = ("text_config", "decoder", "generator", "text_encoder")
_MOST_EXPERTS, _MOST_LABELS = 1 << 14, 1 << 14  # 8 times the most published experts


class _Bounds(NamedTuple):
    """The bounds of numbers whose key matches in full; None: any."""

    names: str
    least: float | None
    most: float | None
    below: bool = False  # `most` itself is excluded
    above: bool = False  # `least` itself is excluded


# The first that matches counts.
_TABLE = (
    _Bounds(r".*(_token_ids?|_tokens|_id)", -1, MOST_TOKENS),
    _Bounds(r".*(dropout|pdrop|layerdrop|drop_path|drop)(_rate|_prob|_p)?", 0, 1, below=True),
    _Bounds(r".*(hidden_)?layers|n_layers?|num_.*blocks|(encoder|decoder)_layers", 0, MOST_LAYERS),
    _Bounds(r"(\w+_)?num_(\w+_)?experts?(_per_tok(en)?)?|n_\w+_experts|moe_(topk|k)", 0,
            _MOST_EXPERTS),
    _Bounds(r"num_labels", 1, _MOST_LABELS),
    _Bounds(r".*rope_theta|.*rotary_(emb_)?base|rope_local_base_freq", 0, None, above=True),
    _Bounds(r"factor|.*freq_factor|partial_rotary_factor|rotary_pct", 0, None, above=True),
    _Bounds(r".*(_eps|_epsilon|_range|_std)", 0, None),
    _Bounds(r".*vocab.*", 0, MOST_TOKENS),
    _Bounds(r".*(_size|_dim|_rank|_width|_heads|head)|d_(model|ff|kv|inner)|n_(embd|inner|head)",
            0, MOST_WIDTH),
)  # fmt: skip
# Sizes of which there must be at least one.
_POSITIVE = re.compile(
    r"num_(hidden_layers|layers|attention_heads|key_value_heads|kv_heads|heads|labels)"
    r"|(encoder|decoder)_(layers|attention_heads|ffn_dim)|n_(layers?|heads?|embd|inner|positions"
    r"|ctx)|d_model|hidden_size|intermediate_size|moe_intermediate_size|ffn_dim|head_dim"
    r"|vocab_size|(original_)?max_position_embeddings|max_seq_len"
    r"|(?!use_).*(sliding|attention)_window"
    r"|.*sliding_window_size|attention_chunk_size"
)
_CHECKS = [(re.compile(each.names), each) for each in _TABLE]
# Keys about the file, which fsdpctl sets when it writes one, and their values.
_DTYPES = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "auto")
_ABOUT = {"dtype": _DTYPES, "torch_dtype": _DTYPES, "use_cache": ("true", "false")}
# Of the errors of transformers' validators: the key, the type and the value; or what precedes them.
_FIELD = re.compile(r"Field '(\w+)' expected (\w+), got \w+ \(value: (.*)\)")
_VALIDATOR = re.compile(r"Class validation error for validator '\w+': \w+: ")
_TYPES = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text"}
_OTHERS = _Bounds("", 0, MOST_TOKENS)
_FLOATS = _Bounds("", None, None)


def check_parts(content: Mapping[str, Any], where: str, parts: Collection[str]) -> None:
    """Check that nested configurations are those that the model has, and are mappings.

    Raises:
        UsageError: If they aren't.
    """
    for name in {*PARTS, *parts} & content.keys():
        value = content[name]
        if value is not None and name not in parts:
            raise UsageError(
                f"{where}: {name}: not supported; {content.get('model_type')} has no such part"
            )
        if value is not None and not isinstance(value, Mapping):
            raise UsageError(f"{where}: {name}: expected a mapping, got {_shown(value)}")


def check_about(content: Mapping[str, Any], where: str) -> None:
    """Check the keys about the file, which nothing else reads; UsageError names one."""
    for name, known in _ABOUT.items():
        value = content.get(name)
        text = str(value).lower().removeprefix("torch.")
        if text not in (*known, "none") and not isinstance(value, Mapping):
            expected = f"{', '.join(known)}{nearest(text, known)}"
            raise UsageError(f"{where}: {name} {_shown(value)}: expected {expected}")


def rejection(error: Exception) -> str:
    """Return what transformers rejects: `KEY VALUE: expected TYPE`, or its own reason."""
    reason = " ".join(str(error).split()) or type(error).__name__
    if found := _FIELD.search(reason):
        name, kind, value = found.groups()
        return f"{name} {_shown(value.strip(chr(39)))}: expected {_TYPES.get(kind, kind)}"
    return _VALIDATOR.sub("", reason)


def check_values(
    content: Mapping[str, Any], where: str, usual: Mapping[str, Any], place: str = ""
) -> None:
    """Check that numbers are in their bounds.

    Args:
        content: Of a config.json, or of a mapping in it.
        where: The file, for messages.
        usual: The defaults.
        place: The names of the mappings around.

    Raises:
        UsageError: If a value is out of bounds; the message has its key.
    """
    for name, value in content.items():
        known = usual.get(name)
        if type(value) is type(known) and value == known:
            continue
        if isinstance(value, Mapping):
            inner = known if isinstance(known, Mapping) else {}
            check_values(value, where, {**usual, **inner}, f"{place}{name}.")
            continue
        problem = _problem(str(name), value, known)
        if problem:
            raise UsageError(f"{where}: {place}{name} {_shown(value)}: {problem}")


def _problem(name: str, value: object, usual: object, depth: int = 0) -> str:
    """Return what a value must be, or an empty text."""
    if isinstance(usual, bool) and not isinstance(value, bool) and value is not None:
        return "expected true or false"
    if isinstance(value, list):
        return next(
            (found for each in value if (found := _problem(name, each, None, depth + 1))), ""
        )
    if isinstance(value, str):
        bounds = _bounds_of(name, 0, depth)
        is_number = _is_number(usual) and not isinstance(usual, bool)
        if bounds.above or bounds.below or is_number or (_POSITIVE.fullmatch(name) and not depth):
            return "expected a number"
        return ""
    if isinstance(value, bool):
        is_size = _POSITIVE.fullmatch(name) or (_is_number(usual) and not isinstance(usual, bool))
        return "expected a number" if is_size else ""
    if not isinstance(value, int | float):
        return ""
    return _out_of(_bounds_of(name, value, depth), value, usual)


def _bounds_of(name: str, value: float, depth: int) -> _Bounds:
    found = next((bounds for names, bounds in _CHECKS if names.fullmatch(name)), None)
    if found is None:
        found = _OTHERS if isinstance(value, int) else _FLOATS
    if _POSITIVE.fullmatch(name) and not depth:
        found = found._replace(least=1 if isinstance(value, int) else found.least)
        found = found._replace(most=found.most or MOST_TOKENS)
    if depth > 1:  # repetitions, such as of kinds of layers
        found = found._replace(most=MOST_LAYERS if isinstance(value, int) else found.most)
    return found


def _out_of(bounds: _Bounds, value: float, usual: object) -> str:
    least, most = bounds.least, bounds.most
    if not math.isfinite(value):
        return "expected a finite number"
    if isinstance(usual, int | float) and least is not None:
        least = min(least, usual)
    if least is not None and (value < least or (bounds.above and value == least)):
        return f"expected a number {'above' if bounds.above else 'of at least'} {least:.15g}"
    if most is not None and (value > most or (bounds.below and value == most)):
        return f"expected a number {'below' if bounds.below else 'of at most'} {most:.15g}"
    return ""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
