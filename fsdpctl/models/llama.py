"""Decoders of the Llama family: Llama, Mistral, Qwen2, Qwen3."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdpctl.config.model import ModelConfig
from fsdpctl.models.attention import AttentionMask, layer_masks
from fsdpctl.models.cache import Cache, LayerCache, attend_cached, layer_arguments
from fsdpctl.models.layers import CausalDecoder, activation_of, embedding
from fsdpctl.models.rope import rotate, rotation
from fsdpctl.models.row_documents import Documents


class RMSNorm(nn.Module):
    """A norm that scales each vector to unit root mean square (Zhang and Sennrich, 2019)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension of `x`, with the variance in float32."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    """Causal self-attention whose query heads share key and value heads in groups."""

    def __init__(self, config: ModelConfig, head_dim: int, layer: int) -> None:
        super().__init__()
        width, self.head_dim = config.hidden_size, head_dim
        self.window = config.window_of(layer)
        bias = config.attention_bias or config.architecture == "qwen2"
        shared = config.num_kv_heads * head_dim
        queries = config.num_heads * head_dim
        self.q_proj = nn.Linear(width, queries, bias=bias)
        self.k_proj = nn.Linear(width, shared, bias=bias)
        self.v_proj = nn.Linear(width, shared, bias=bias)
        self.o_proj = nn.Linear(queries, width, bias=config.attention_bias)
        self.norms_heads = config.architecture == "qwen3"
        if self.norms_heads:
            self.q_norm = RMSNorm(head_dim, config.norm_eps)
            self.k_norm = RMSNorm(head_dim, config.norm_eps)

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
        parts = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (part.view(batch, length, -1, self.head_dim) for part in parts)
        if self.norms_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = attend_cached(q, k, v, cache, mask, self.window)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class GatedMLP(nn.Module):
    """An MLP whose hidden units are gated (Shazeer, GLU Variants Improve Transformer, 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, hidden, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(width, hidden, bias=bias)
        self.up_proj = nn.Linear(width, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, width, bias=bias)
        self.activation = activation_of(config)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor shaped like `x`, (..., width)."""
        out: Tensor = self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, head_dim: int, layer: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.input_layernorm = RMSNorm(width, config.norm_eps)
        self.self_attn = Attention(config, head_dim, layer)
        self.post_attention_layernorm = RMSNorm(width, config.norm_eps)
        self.mlp = GatedMLP(config)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: LayerCache | None = None,
        mask: AttentionMask | None = None,
    ) -> Tensor:
        """Return a tensor shaped like `x`; see `Attention`."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache, mask)
        return x + self.feed_forward(x)

    def feed_forward(self, x: Tensor) -> Tensor:
        """Return what the block adds to `x` after attention, token by token."""
        out: Tensor = self.mlp(self.post_attention_layernorm(x))
        return out


class _Backbone(nn.Module):
    def __init__(self, config: ModelConfig, head_dim: int, vocab_size: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.config = config
        self.embed_tokens = embedding(vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Block(config, head_dim, layer) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(
        self, tokens: Tensor, cache: Cache | None = None, documents: Documents | None = None
    ) -> Tensor:
        x = self.embed_tokens(tokens)
        angles = self._rotation(x, cache, documents)
        blocks = cast("list[Block]", list(self.layers))
        windows = [block.self_attn.window for block in blocks]
        masks = layer_masks(x, self.head_dim, windows, documents)
        for index, layer in enumerate(blocks):
            x = layer(x, *angles, *layer_arguments(cache, index, masks[index]))
        out: Tensor = self.norm(x)
        return out

    def _rotation(
        self, x: Tensor, cache: Cache | None, documents: Documents | None
    ) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of the tokens' positions."""
        start = 0 if cache is None else len(cache)
        end = start + (x.shape[1] if documents is None else documents.positions.shape[1])
        # A table serves one token at a time until the length has doubled.
        length = end if cache is None else 1 << (end - 1).bit_length()
        cos, sin = rotation(self.config, self.head_dim, length, x.device, x.dtype)
        if documents is not None:
            places = documents.own_positions
            return cos[places].unsqueeze(1), sin[places].unsqueeze(1)
        return (cos, sin) if cache is None else (cos[start:end], sin[start:end])


class LlamaDecoder(CausalDecoder):
    """A decoder of the Llama family."""

    def __init__(self, config: ModelConfig, head_dim: int, vocab_size: int) -> None:
        super().__init__(_Backbone(config, head_dim, vocab_size), config, vocab_size)
