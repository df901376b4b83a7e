"""The matrices in fused parameters: queries, keys and values in one, gate and up projection, …

The tables have what the code of the families does with the result of each layer. A layer that seems
fused and is in no table, or has other sizes, is in none of the results.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from fsdpctl.models.products import is_transposed
from fsdpctl.plan.layout import Fused

Sizes = tuple[int, ...]
_MAY_BE_FUSED = (
    "qkv", "query_key_value", "c_attn", "kv_proj", "kv_a_proj", "kv_b_proj", "in_proj", "x_proj",
    "gate_up", "q_gate", "input_linear", "Wi",
)  # fmt: skip
_NOT_GATED = ("JetMoeMoA",)
_ONE_MATRIX = ("in_proj_a", "in_proj_b", "in_proj_z")
# Classes of attention in which the query, key and value rows of each head are adjacent.
_BY_HEAD = (
    "BloomAttention", "FalconAttention", "FalconFlashAttention2", "GPTNeoXAttention",
    "GPTNeoXJapaneseAttention", "MiniMaxLightningAttention", "PersimmonAttention",
)  # fmt: skip


def fused_parameters(module: nn.Module) -> Mapping[str, Fused]:
    """Return the fused parameters of a decoder by name; their parts are matrices."""
    found = {}
    for name, layer, owner in _layers(module):
        sizes, dim = _sizes_of(name.rpartition(".")[2], layer, owner), -2
        if is_transposed(layer):
            dim = -1
        weight = layer._parameters.get("weight")
        if sizes and weight is not None and not weight.shape[dim] % sum(sizes):
            found[f"{name}.weight"] = Fused(dim, sizes)
        found |= _gates_of_experts(name, layer)
    return found


def may_be_fused(name: str) -> bool:
    """Return whether a layer of this name may be several matrices."""
    leaf = name.rpartition(".")[2]
    return leaf not in _ONE_MATRIX and any(word in leaf for word in _MAY_BE_FUSED)


def _layers(module: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Yield each module below `module`: its name, itself and the one that it is in."""
    for above, owner in module.named_modules():
        for key, layer in owner.named_children():
            yield f"{above}.{key}" if above else key, layer, owner


def _sizes_of(word: str, layer: nn.Module, owner: nn.Module) -> Sizes | None:
    """Return the adjacent rows of each matrix in a layer, or None if it is one matrix."""
    is_known = type(owner).__module__.startswith(("transformers.", "fsdpctl."))
    weight = layer._parameters.get("weight")
    is_packed = weight is not None and weight.ndim < 2  # of a quantized layer, which is frozen
    rule = _RULES.get(word) if is_known and not is_packed else None
    try:
        sizes = None if rule is None else rule(owner, layer)
    except AttributeError:  # another module with a layer of this name
        return None
    return sizes if sizes and all(isinstance(n, int) and n > 0 for n in sizes) else None


def _rows(layer: nn.Module) -> int:
    weight: Any = layer.weight
    return int(weight.shape[-1] if is_transposed(layer) else weight.shape[-2])


def _number(owner: Any, *names: str) -> int:
    """Return the first of some attributes of a module or of its configuration."""
    places = (owner, getattr(owner, "config", None))
    for place, name in ((place, name) for name in names for place in places):
        value = getattr(place, name, None)
        if isinstance(value, int) and value:
            return value
    raise AttributeError(names[0])


def _queries_keys_values(owner: Any, layer: nn.Module) -> Sizes | None:
    kind, rows = type(owner).__name__, _rows(layer)
    if is_transposed(layer):  # of GPT and GPT-2
        return (rows // 3,) * 3
    if kind == "CodeGenAttention":  # rows are in four parts, one for each of its first accelerators
        return (rows // 12,) * 3
    queries = _number(owner, "num_heads", "num_attention_heads", "n_heads")
    if kind == "GPTBigCodeAttention" and not owner.multi_query:
        return (rows // queries // 3,) * 3
    if kind in _BY_HEAD:
        keys = queries
        if kind.startswith("Falcon") and (owner.new_decoder_architecture or owner.multi_query):
            keys = owner.num_kv_heads
        width = rows // (queries + 2 * keys)
        return queries // keys * width, width, width
    width = _number(owner, "head_dim")
    if rows % width or rows < queries * width:
        return None
    shared = (rows - queries * width) // 2
    return queries * width, shared, shared


def _halves(layer: nn.Module) -> Sizes:
    return (_rows(layer) // 2,) * 2


def _gate_and_up(owner: Any, layer: nn.Module) -> Sizes | None:
    return None if type(owner).__name__ in _NOT_GATED else _halves(layer)


def _into_mamba(owner: Any, layer: nn.Module) -> Sizes | None:
    """Cut the input projection of a state space model."""
    rows, kind = _rows(layer), type(owner).__name__
    if kind.startswith("Zamba") and kind.endswith("MambaMixer") and "2" not in kind:
        return 1, 1
    if kind.endswith("ShortConv"):
        return (rows // 3,) * 3
    width = owner.intermediate_size
    if rows == 2 * width:
        return width, width
    heads, states = owner.num_heads, owner.n_groups * owner.ssm_state_size
    parts = width, width, states, states, heads
    return parts if sum(parts) == rows else None


def _states(owner: Any, layer: nn.Module) -> Sizes:
    return owner.time_step_rank, owner.ssm_state_size, owner.ssm_state_size


def _delta(owner: Any, layer: nn.Module) -> Sizes:
    ratio = owner.num_v_heads // owner.num_k_heads
    return (owner.head_k_dim,) * 2 + (ratio * owner.head_v_dim,) * 2


def _delta_rates(owner: Any, layer: nn.Module) -> Sizes:
    return (owner.num_v_heads // owner.num_k_heads,) * 2


def _with_gates(owner: Any, layer: nn.Module) -> Sizes | None:
    """Cut the queries of attention whose heads have gates, which follow them."""
    is_double = _rows(layer) == 2 * owner.o_proj.weight.shape[-1]
    return (owner.head_dim,) * 2 if is_double else None


_RULES: Mapping[str, Callable[[Any, nn.Module], Sizes | None]] = {
    **dict.fromkeys(("gate_up_proj", "Wi", "input_linear"), _gate_and_up),
    **dict.fromkeys(("c_attn", "qkv_proj", "query_key_value", "Wqkv"), _queries_keys_values),
    "fc1": lambda owner, layer: _halves(layer) if "MoshiGating" in type(owner).__name__ else None,
    "kv_proj": lambda owner, layer: _halves(layer) if "JetMoe" in type(owner).__name__ else None,
    "kv_a_proj_with_mqa": lambda owner, layer: (owner.kv_lora_rank, owner.qk_rope_head_dim),
    "kv_b_proj": lambda owner, layer: (owner.qk_nope_head_dim, owner.v_head_dim),
    "q_proj": _with_gates,
    "q_gate_proj": lambda owner, layer: (owner.qk_head_dim, owner.v_head_dim),
    "in_proj": _into_mamba,
    "in_proj_qkv": lambda owner, layer: (owner.key_dim, owner.key_dim, owner.value_dim),
    "in_proj_qkvz": _delta,
    "in_proj_ba": _delta_rates,
    "x_proj": _states,
}


def _gates_of_experts(name: str, experts: Any) -> Mapping[str, Fused]:
    """Return the gate and up projections of experts that are held as one parameter."""
    both, down = experts._parameters.get("gate_up_proj"), experts._parameters.get("down_proj")
    if both is None or down is None or both.ndim != 3:
        return {}
    hidden, width = both.shape[-2:]
    is_last = getattr(
        experts, "is_transposed", (width, hidden) == (2 * down.shape[-2], down.shape[-1])
    )
    half = both.shape[-1 if is_last else -2] // 2
    sizes = (half, half) if getattr(experts, "is_concatenated", True) else (1, 1)
    return {f"{name}.gate_up_proj": Fused(-1 if is_last else -2, sizes)}
