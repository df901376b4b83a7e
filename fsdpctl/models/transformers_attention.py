"""fsdpctl's attention in models of transformers.

transformers calls one registered function per mask type before the first layer, and another in
every layer. Here, the first function returns a `_LayerMask`. Layers pass it to the second function,
also when backward recomputes them. Families that do not use transformers' attention interface get
its full masks, in which tokens of other documents are masked.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdpctl.errors import UsageError
from fsdpctl.models.attention import AttentionMask, ScoreOptions, attend, attention_mask
from fsdpctl.models.attention_kernels import compute_dtype, device_type
from fsdpctl.models.packed_documents import PackedDocuments, copy_to_device, pack_documents

_NAME = "fsdpctl"
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # imported by modeling files that use the interface
# Arguments that do not change the result, or whose effect is already in the mask.
_IGNORED_ARGUMENTS = (
    "sliding_window", "is_causal", "position_ids", "use_cache", "cache_position", "max_length_q",
    "max_length_k", "cu_seq_lens_q", "cu_seq_lens_k", "deterministic", "output_router_logits",
)  # fmt: skip
_MASK_KINDS = {
    frozenset({"causal_mask_function"}): "full",
    frozenset({"causal_mask_function", "sliding_window_overlay"}): "window",
    frozenset({"causal_mask_function", "chunked_overlay"}): "chunk",
}


class _CurrentForward(threading.local):
    """The documents of this thread's forward. Recomputation may run in another thread."""

    documents: PackedDocuments | None = None


_current = _CurrentForward()


@dataclass(slots=True)
class _LayerMask:
    """The mask of the layers of one mask type in a forward, converted for each kernel on use."""

    documents: PackedDocuments | None
    window: int | None = None
    pairs: Tensor | None = None  # bool, (batch, 1, queries, keys), for types not in `_MASK_KINDS`
    cached: dict[object, AttentionMask | None] = field(default_factory=dict)

    def mask(self, q: Tensor, options: ScoreOptions) -> AttentionMask | None:
        # Dynamo would run recomputed blocks eagerly if they wrote to a dict.
        if torch.compiler.is_compiling():
            return self._make(q, options)
        key = q.shape[-1], options.has_fused_kernel, options.sinks is None
        if key not in self.cached:
            self.cached[key] = self._make(q, options)
        return self.cached[key]

    def _make(self, q: Tensor, options: ScoreOptions) -> AttentionMask | None:
        if self.pairs is None:
            return attention_mask(q[:, 0], q.shape[-1], self.window, self.documents, options)
        bias = torch.zeros_like(self.pairs, dtype=compute_dtype(q))
        return AttentionMask(window=None, bias=bias.masked_fill_(~self.pairs, -torch.inf))


class TransformersAttention:
    """The attention of a model: fsdpctl's if the model uses transformers' interface, or its own."""

    def __init__(self, model: Any) -> None:
        _register()
        modules = list(model.modules())
        sources = {sys.modules[type(each).__module__] for each in modules}
        self.supports_fsdpctl = any(hasattr(each, _INTERFACE) for each in sources)
        candidates: list[Any] = [getattr(each, "config", None) for each in modules]
        configs = {id(each): each for each in candidates if hasattr(each, "_attn_implementation")}
        self._defaults = [(each, each._attn_implementation) for each in configs.values()]
        self.use(fsdpctl=True)
        for each in modules:  # rotary embeddings of some types depend on the largest position
            if any(kind in str(getattr(each, "rope_type", "")) for kind in ("dynamic", "longrope")):
                each.forward = partial(_rotary_per_document, each.forward)

    def use(self, *, fsdpctl: bool) -> None:
        """Select fsdpctl's attention, if the model supports it, or the model's own."""
        self.is_fsdpctl = fsdpctl and self.supports_fsdpctl
        for config, default in self._defaults:
            config._attn_implementation_internal = _NAME if self.is_fsdpctl else default

    @contextmanager
    def within(self, documents: PackedDocuments | None) -> Iterator[None]:
        """Make forwards inside the block use `documents`. Backward may run after the block."""
        _current.documents = documents
        try:
            yield
        finally:
            _current.documents = None


@cache
def _register() -> None:
    """Register fsdpctl's attention and wrap transformers' eager and sdpa masks, process-wide."""
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _layer_mask)
    for name in ("eager", "sdpa"):
        plain = getattr(masking_utils, f"{name}_mask")
        AttentionMaskInterface.register(name, partial(_within_documents, plain))


def _layer_mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    local_size: int | None = None,
    **options: Any,
) -> _LayerMask:
    documents = _current.documents
    kind = _MASK_KINDS.get(frozenset(_mask_function_names(mask_function)))
    if kind is None or q_length != kv_length:
        from transformers.masking_utils import sdpa_mask

        sizes = {"q_length": q_length, "kv_length": kv_length, "local_size": local_size}
        options = {**options, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        pairs = _within_documents(sdpa_mask, mask_function=mask_function, **sizes, **options)
        return _LayerMask(documents=None, pairs=pairs)
    if kind == "chunk" and local_size is not None:
        rows, device = options["batch_size"], torch.device(options["device"])
        return _LayerMask(_split_into_chunks(documents, local_size, rows, q_length, device))
    return _LayerMask(documents, local_size)


def _mask_function_names(function: Callable[..., Any]) -> Iterator[str]:
    """Yield the names of the mask functions that transformers combined with `and_masks`."""
    cells = [each.cell_contents for each in getattr(function, "__closure__", None) or ()]
    inner = [each for cell in cells if isinstance(cell, tuple) for each in cell if callable(each)]
    name = str(getattr(function, "__qualname__", "")).partition(".")[0]
    if name != "and_masks":
        yield name
    for each in inner:
        yield from _mask_function_names(each)


def _split_into_chunks(
    documents: PackedDocuments | None, size: int, rows: int, length: int, device: torch.device
) -> PackedDocuments | None:
    """Return the chunks of at most `size` tokens as documents, for chunked attention."""
    lengths = ((length,),) * rows if documents is None else documents.lengths
    if max(map(max, lengths)) <= size:
        return documents
    chunks = tuple(
        tuple(min(size, x - start) for x in row for start in range(0, x, size)) for row in lengths
    )
    if documents is None:
        kernel_device, context = device_type(torch.empty(0, device=device)), None
    else:
        kernel_device, context = documents.device_type, documents.context
    return pack_documents(chunks, device, kernel_device=kernel_device, context=context)


def _within_documents(
    make_mask: Callable[..., Any], *args: Any, mask_function: Callable[..., Any], **options: Any
) -> Any:
    """Return transformers' mask of all pairs of tokens, in which other documents are masked."""
    documents = _current.documents
    if documents is None or (documents.one_per_row and documents.context is None):
        return make_mask(*args, mask_function=mask_function, **options)
    if documents.context is not None:  # decoder_check adds "not supported: "
        raise UsageError("attention that needs a mask of all pairs of tokens")
    from transformers.masking_utils import and_masks

    starts = documents.document_starts.squeeze(-1)

    def is_same_document(row: Any, head: Any, query: Any, key: Any) -> Any:
        return key >= starts[row, query]  # `mask_function` is causal, and excludes later documents

    options["allow_is_causal_skip"] = False
    return make_mask(*args, mask_function=and_masks(mask_function, is_same_document), **options)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    softcap, sinks = options.pop("softcap", None), options.pop("s_aux", None)
    is_set = {name: each is not None and each is not False for name, each in options.items()}
    unsupported = [name for name in options if is_set[name] and name not in _IGNORED_ARGUMENTS]
    if unsupported or not isinstance(attention_mask, _LayerMask):
        raise UsageError(f"attention with {', '.join(unsupported) or 'another mask'}")
    head_dim, value_dim = query.shape[-1], value.shape[-1]
    scale = head_dim**-0.5 if scaling is None else scaling
    score_options = ScoreOptions(scale, softcap, sinks, dropout)
    # In latent attention (MLA), values are narrower; kernels for packed rows require equal widths.
    if value_dim != head_dim:
        size = max(head_dim, value_dim)
        query, key, value = (F.pad(x, (0, size - x.shape[-1])) for x in (query, key, value))
    output = attend(query, key, value, attention_mask.mask(query, score_options), score_options)
    return output[..., :value_dim].transpose(1, 2).contiguous(), None


def _rotary_per_document(
    forward: Callable[..., Any], x: Tensor, position_ids: Tensor, *args: Any, **options: Any
) -> Any:
    """Return the rotary embeddings that each document would have in a separate forward.

    Dynamic rotary embeddings depend on the largest position in a forward. So `forward` is called
    once for each length of documents, with the last position of that length appended. Documents up
    to the short context form group 0.
    """
    module: Any = forward.__self__  # type: ignore[attr-defined]  # a method
    for name in [each for each in vars(module) if each.endswith("max_seq_len_cached")]:
        setattr(module, name, 0)  # an earlier forward may have increased it
    documents = _current.documents
    if documents is None:
        return forward(x, position_ids, *args, **options)
    short_context = _short_context(module)
    token_groups = [
        [length if length > short_context else 0 for length in row for _ in range(length)]
        for row in documents.lengths
    ]
    groups = documents.local_part(copy_to_device(torch.tensor(token_groups), position_ids.device))
    outputs: tuple[Tensor, ...] = ()
    for group in sorted(set(chain(*token_groups))):
        in_group = groups == group
        last_position = position_ids.new_full((len(in_group), 1), max(group - 1, 0))
        positions = torch.cat([torch.where(in_group, position_ids, 0), last_position], 1)
        rotated = forward(x, positions, *args, **options)
        parts = [each[:, :-1] for each in (rotated if isinstance(rotated, tuple) else (rotated,))]
        pairs = zip(parts, outputs or parts, strict=True)
        outputs = tuple(torch.where(in_group.unsqueeze(-1), new, old) for new, old in pairs)
    return outputs if isinstance(rotated, tuple) else outputs[0]


def _short_context(module: Any) -> int:
    """Return the length up to which rotary embeddings do not depend on a document's length."""
    rope = module.config.rope_parameters
    parameters = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    lengths = [each.get("original_max_position_embeddings") for each in parameters]
    return min(int(each) for each in (*lengths, module.config.max_position_embeddings) if each)
