"""Attention of transformers' models whose rows several ranks share.

transformers asks a registered function for the mask, before any layer, and another one for
attention in each layer. The first returns how the rows are shared, the second makes the exchange.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from fsdpctl.errors import UsageError
from fsdpctl.models.attention import AttentionMask, attend, attention_mask
from fsdpctl.models.documents import Documents

_NAME = "fsdpctl_shared_rows"
# What some families add to attention, and kernels of full rows do not.
_UNKNOWN = ("softcap", "s_aux", "position_bias", "sinks")
_running = threading.local()


class _LayerMasks:
    """The rows of a forward, and the masks of its layers by their window."""

    def __init__(self, documents: Documents) -> None:
        self._documents = documents
        self._masks: dict[int | None, AttentionMask | None] = {}

    def mask(self, q: Tensor, window: int | None) -> AttentionMask | None:
        if window not in self._masks:
            self._masks[window] = attention_mask(q[:, 0], q.shape[-1], window, self._documents)
        return self._masks[window]


class SharedRows:
    """Lets the layers of a model attend to rows that ranks share, if they can."""

    def __init__(self, model: Any) -> None:
        """Take over the choice of attention of `model`, a PreTrainedModel."""
        found: list[Any] = [getattr(each, "config", None) for each in model.modules()]
        configs = {id(each): each for each in found if hasattr(each, "_attn_implementation")}
        self._usual = [(each, each._attn_implementation) for each in configs.values()]

    @contextmanager
    def among(self, documents: Documents | None) -> Iterator[None]:
        """Run a forward on the rows of `documents`; its backward may follow the block.

        The choice of attention stays until the next forward, since backward may recompute layers.
        """
        shared = documents is not None and documents.context is not None
        if shared:
            _register()
        for config, usual in self._usual:
            config._attn_implementation_internal = _NAME if shared else usual
        _running.rows = _LayerMasks(documents) if shared and documents is not None else None
        try:
            yield
        finally:
            _running.rows = None


@cache
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, lambda *_, **__: _running.rows)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: _LayerMasks,
    dropout: float = 0.0,
    scaling: float | None = None,
    **about: Any,
) -> tuple[Tensor, None]:
    for name in _UNKNOWN:
        if about.get(name) is not None:
            raise UsageError(f"attention with {name}")
    if dropout:
        raise UsageError("train.context_parallel: not supported with dropout in attention")
    width = query.shape[-1]
    if scaling is not None and scaling != width**-0.5:
        query = query * (scaling * width**0.5)  # kernels divide by the root of the width
    window = about.get("sliding_window")
    narrower = width - value.shape[-1]
    if narrower:  # as in latent attention; kernels for packed rows take one width
        value = F.pad(value, (0, narrower))
    mixed = attend(query, key, value, attention_mask.mask(query, window))
    if narrower:
        mixed = mixed[..., :-narrower]
    return mixed.transpose(1, 2).contiguous(), None
