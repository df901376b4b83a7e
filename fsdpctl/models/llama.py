"""Decoders of the Llama family: Llama, Mistral, Qwen2, Qwen3, Gemma, Gemma 3, Phi-3."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdpctl.config.model import ModelConfig
from fsdpctl.models.attention import AttentionMask, layer_masks
from fsdpctl.models.cache import Cache, LayerCache, attend_cached, layer_arguments
from fsdpctl.models.documents import Documents
from fsdpctl.models.parts import CausalDecoder, activation_of, embedding
from fsdpctl.models.rope import rotate, rotation


class RMSNorm(nn.Module):
    """A norm that scales each vector to unit root mean square (Zhang and Sennrich, 2019)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension of `x`, with the variance in float32."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class OffsetRMSNorm(RMSNorm):
    """Gemma's norm, whose weight is added to 1."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps)
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension of `x` in float32."""
        weight = 1.0 + self.weight.float()
        return F.rms_norm(x.float(), (x.shape[-1],), weight, self.eps).type_as(x)


def norm_of(config: ModelConfig, width: int) -> RMSNorm:
    """Return the norm of the architecture."""
    return (OffsetRMSNorm if config.is_gemma else RMSNorm)(width, config.norm_eps)


class Attention(nn.Module):
    """Causal self-attention whose query heads share key and value heads in groups."""

    def __init__(self, config: ModelConfig, head_dim: int, layer: int) -> None:
        super().__init__()
        width, self.head_dim = config.hidden_size, head_dim
        self.window = config.window_of(layer)
        bias = config.attention_bias or config.architecture == "qwen2"
        shared = config.num_kv_heads * head_dim
        self.widths = (config.num_heads * head_dim, shared, shared)
        self.is_fused = config.architecture == "phi3"
        if self.is_fused:
            self.qkv_proj = nn.Linear(width, sum(self.widths), bias=False)
        else:
            self.q_proj = nn.Linear(width, self.widths[0], bias=bias)
            self.k_proj = nn.Linear(width, shared, bias=bias)
            self.v_proj = nn.Linear(width, shared, bias=bias)
        self.o_proj = nn.Linear(self.widths[0], width, bias=config.attention_bias)
        self.norms_heads = config.architecture in ("qwen3", "gemma3_text")
        if self.norms_heads:
            self.q_norm = norm_of(config, head_dim)
            self.k_norm = norm_of(config, head_dim)
        # Kernels divide by the root of head_dim.
        self.query_factor = math.sqrt(head_dim / (config.query_scalar or head_dim))

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: LayerCache | None = None,
        mask: AttentionMask | None = None,
    ) -> Tensor:
        """Return a tensor shaped like `x`, (batch, length, hidden_size).

        `cos` and `sin` are the result of `rotation`, or have the dimensions (batch, 1) before.
        """
        batch, length, _ = x.shape
        q, k, v = (part.view(batch, length, -1, self.head_dim) for part in self._projected(x))
        if self.norms_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.query_factor != 1:
            q = q * self.query_factor
        mixed = attend_cached(q, k, v, cache, mask, self.window)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out

    def _projected(self, x: Tensor) -> Sequence[Tensor]:
        if self.is_fused:
            return self.qkv_proj(x).split(self.widths, dim=-1)  # type: ignore[no-any-return]
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


class GatedMLP(nn.Module):
    """An MLP whose hidden units are gated (Shazeer, GLU Variants Improve Transformer, 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, hidden, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.is_fused = config.architecture == "phi3"
        if self.is_fused:
            self.gate_up_proj = nn.Linear(width, 2 * hidden, bias=False)
        else:
            self.gate_proj = nn.Linear(width, hidden, bias=bias)
            self.up_proj = nn.Linear(width, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, width, bias=bias)
        self.activation = activation_of(config)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor shaped like `x`, (..., width)."""
        if self.is_fused:
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
            return self.down_proj(self.activation(gate) * up)  # type: ignore[no-any-return]
        out: Tensor = self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, head_dim: int, layer: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.input_layernorm = norm_of(config, width)
        self.self_attn = Attention(config, head_dim, layer)
        self.post_attention_layernorm = norm_of(config, width)
        self.mlp = GatedMLP(config)
        self.norms_results = config.architecture == "gemma3_text"
        if self.norms_results:
            self.pre_feedforward_layernorm = norm_of(config, width)
            self.post_feedforward_layernorm = norm_of(config, width)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: LayerCache | None = None,
        mask: AttentionMask | None = None,
    ) -> Tensor:
        """Return a tensor shaped like `x`; see `Attention`."""
        others = (cos, sin, cache, mask)
        if self.norms_results:
            x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), *others))
        else:
            x = x + self.self_attn(self.input_layernorm(x), *others)
        return x + self.feed_forward(x)

    def feed_forward(self, x: Tensor) -> Tensor:
        """Return what the block adds to `x` after attention, token by token."""
        out: Tensor
        if self.norms_results:
            out = self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        else:
            out = self.mlp(self.post_attention_layernorm(x))
        return out


class _Backbone(nn.Module):
    def __init__(self, config: ModelConfig, head_dim: int, vocab_size: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.config = config
        # Gemma 3's layers with a window have other angles.
        self.local = replace(config, rope_theta=config.rope_local_theta, rope_scaling="none")
        self.embedding_factor = math.sqrt(config.hidden_size) if config.is_gemma else 1.0
        self.embed_tokens = embedding(vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Block(config, head_dim, layer) for layer in range(config.num_layers)
        )
        self.norm = norm_of(config, config.hidden_size)

    def forward(
        self, tokens: Tensor, cache: Cache | None = None, documents: Documents | None = None
    ) -> Tensor:
        x = self.embed_tokens(tokens)
        if self.embedding_factor != 1:
            x = x * self.embedding_factor
        angles = local = self._rotation(self.config, x, cache, documents)
        if self.config.architecture == "gemma3_text":
            local = self._rotation(self.local, x, cache, documents)
        blocks = cast("list[Block]", list(self.layers))
        windows = [block.self_attn.window for block in blocks]
        masks = layer_masks(x, self.head_dim, windows, documents)
        for index, layer in enumerate(blocks):
            turns = angles if windows[index] is None else local
            x = layer(x, *turns, *layer_arguments(cache, index, masks[index]))
        out: Tensor = self.norm(x)
        return out

    def _rotation(
        self, config: ModelConfig, x: Tensor, cache: Cache | None, documents: Documents | None
    ) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of the tokens' positions."""
        start = 0 if cache is None else len(cache)
        end = start + (x.shape[1] if documents is None else documents.positions.shape[1])
        # A table serves one token at a time until the length has doubled.
        length = end if cache is None else 1 << (end - 1).bit_length()
        cos, sin = rotation(config, self.head_dim, length, x.device, x.dtype)
        if documents is not None:
            places = documents.own_positions
            return cos[places].unsqueeze(1), sin[places].unsqueeze(1)
        return (cos, sin) if cache is None else (cos[start:end], sin[start:end])


class LlamaDecoder(CausalDecoder):
    """A decoder of the Llama family."""

    model: _Backbone
    _places = ("model", "embed_tokens")

    def __init__(self, config: ModelConfig, head_dim: int, vocab_size: int) -> None:
        super().__init__(_Backbone(config, head_dim, vocab_size), config, vocab_size)
