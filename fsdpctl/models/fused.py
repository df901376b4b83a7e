"""The matrices in fused parameters: queries, keys and values in one, or gate and up projection."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from fsdpctl.plan.layout import Fused

_ATTENTION = ("c_attn", "qkv_proj", "query_key_value", "Wqkv")
_GATED = "gate_up_proj"
# Families in which each key head is followed by its value head and the next query heads.
_BY_HEAD = (
    "bloom", "falcon", "gpt_bigcode", "gpt_neox", "gpt_neox_japanese", "minimax", "persimmon",
)  # fmt: skip
_BY_ELEMENT = ("gpt_oss",)  # in which gate and up alternate


class Heads(NamedTuple):
    """The attention heads of a model, and its architecture."""

    architecture: str
    queries: int
    keys: int
    width: int

    @staticmethod
    def of_transformers(config: Any) -> "Heads | None":
        """Return those that a configuration of transformers has, if it has any."""
        try:
            queries = getattr(config, "num_attention_heads", None)
            if not isinstance(queries, int) or not queries:
                return None
            names = ("num_key_value_heads", "num_kv_heads")
            keys = next((each for name in names if (each := getattr(config, name, None))), queries)
            if getattr(config, "multi_query", False):
                keys = keys if getattr(config, "new_decoder_architecture", False) else 1
            width = getattr(config, "head_dim", None) or config.hidden_size // queries
        except RuntimeError:  # from transformers, if layers differ
            return None
        return Heads(config.model_type, queries, keys, width)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The adjacent elements of queries, keys and values."""
        if self.architecture in _BY_HEAD:
            return self.queries // self.keys * self.width, self.width, self.width
        return self.queries * self.width, self.keys * self.width, self.keys * self.width


def fused_parameters(module: nn.Module, heads: Heads | None) -> Mapping[str, Fused]:
    """Return the fused parameters of a decoder by name.

    A parameter whose shape is not that of its family is left out.
    """
    shapes = {name: tuple(param.shape) for name, param in module.named_parameters()}
    found = {}
    for name, shape in shapes.items() if heads is not None else ():
        assert heads is not None
        word = name.removesuffix(".weight").rpartition(".")[2]
        fused = None
        if word in _ATTENTION and len(shape) == 2:
            fused = _queries_keys_values(shape, heads)
        elif word == _GATED and len(shape) > 1:
            down = shapes.get(name.replace(_GATED, "down_proj"), (0, 0))
            fused = _gate_and_up(shape, down, heads.architecture in _BY_ELEMENT)
        if fused is not None:
            found[name] = fused
    return found


def _queries_keys_values(shape: tuple[int, ...], heads: Heads) -> Fused | None:
    repeats = heads.keys if heads.architecture in _BY_HEAD else 1
    whole = sum(heads.sizes) * repeats
    dim = next((dim for dim in (-2, -1) if shape[dim] == whole), None)
    return None if dim is None else Fused(dim, heads.sizes)


def _gate_and_up(shape: tuple[int, ...], down: tuple[int, ...], by_element: bool) -> Fused | None:
    """Compare with the projection that follows, to know the sides of either."""
    if shape[-2:] == (2 * down[-1], down[-2]):
        dim, half = -2, down[-1]
    elif shape[-2:] == (down[-1], 2 * down[-2]):
        dim, half = -1, down[-2]
    else:
        return None
    return Fused(dim, (1, 1) if by_element else (half, half))
