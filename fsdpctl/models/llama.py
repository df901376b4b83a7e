"""Decoders of the Llama family: Llama, Mistral, Qwen2, Qwen3."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdpctl.config.model import ModelConfig
from fsdpctl.models.attention import attend, attend_all
from fsdpctl.models.cache import Cache, LayerCache, beside
from fsdpctl.models.documents import Documents
from fsdpctl.models.parts import Head, activation_of, embedding
from fsdpctl.models.rope import rotate, rotation


class RMSNorm(nn.Module):
    """Scales each vector to unit root mean square (Zhang and Sennrich, 2019)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """`x` with its last dimension normalised; the variance is computed in float32."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    """Causal self-attention whose query heads share key and value heads in groups."""

    def __init__(self, config: ModelConfig, head_dim: int, layer: int) -> None:
        super().__init__()
        width, self.head_dim = config.hidden_size, head_dim
        self.window = config.sliding_window if layer >= config.first_sliding_layer else None
        bias = config.attention_bias or config.architecture == "qwen2"
        self.q_proj = nn.Linear(width, config.num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(width, config.num_kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(width, config.num_kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * head_dim, width, bias=config.attention_bias)
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
        documents: Documents | None = None,
    ) -> Tensor:
        """Shape (batch, length, hidden_size) in and out.

        `cos` and `sin` are as `rotation` gives them, or with a dimension (batch, 1) before.
        """
        batch, length, _ = x.shape

        def heads(values: Tensor) -> Tensor:
            return values.view(batch, length, -1, self.head_dim)

        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        if self.norms_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        is_next = cache is not None and len(cache) > 0  # the one token that follows what was seen
        if cache is not None:
            k, v = cache.extended(k, v)
        if is_next:
            seen = 0 if self.window is None else -self.window
            mixed = attend_all(q, k[:, :, seen:], v[:, :, seen:])
        else:
            mixed = attend(q, k, v, window=self.window, documents=documents)
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
        """Shape (..., width) in and out."""
        out: Tensor = self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, head_dim: int, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, head_dim, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: LayerCache | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Shape (batch, length, hidden_size) in and out; the rest as `Attention` takes it."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache, documents)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class _Backbone(nn.Module):
    def __init__(self, config: ModelConfig, head_dim: int, vocab_size: int) -> None:
        super().__init__()
        self.config, self.head_dim = config, head_dim
        self.embed_tokens = embedding(vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Block(config, head_dim, layer) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(
        self, tokens: Tensor, cache: Cache | None = None, documents: Documents | None = None
    ) -> Tensor:
        x = self.embed_tokens(tokens)
        start = 0 if cache is None else len(cache)
        end = start + tokens.shape[-1]
        # Token by token, one table serves until it is twice as long.
        length = end if cache is None else 1 << (end - 1).bit_length()
        cos, sin = rotation(self.config, self.head_dim, length, x.device, x.dtype)
        turns = (cos, sin) if cache is None else (cos[start:end], sin[start:end])
        if documents is not None:
            cos, sin = (each[documents.positions].unsqueeze(1) for each in turns)
            turns = cos, sin
        for index, layer in enumerate(self.layers):
            x = layer(x, *turns, *beside(cache, index, documents))
        out: Tensor = self.norm(x)
        return out


class LlamaDecoder(nn.Module):
    """Token ids in, next-token logits or their loss out."""

    def __init__(self, config: ModelConfig, head_dim: int, vocab_size: int) -> None:
        super().__init__()
        self.model = _Backbone(config, head_dim, vocab_size)
        self.lm_head = Head(config.hidden_size, vocab_size)
        if config.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding."""
        embedding: nn.Module = self.model.embed_tokens
        return embedding

    def get_output_embeddings(self) -> nn.Module:
        """The output head."""
        return self.lm_head

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        chunk_tokens: int | None = None,
        cache: Cache | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Shape (batch, length) in, (batch, length, vocab_size) out.

        With `targets`, shaped like `tokens`: the cross entropy in nats, summed over the targets
        that count; with `chunk_tokens` without ever having the logits of more tokens than that.
        With a `cache`, `tokens` follow what it has, one at a time once it has any. With
        `documents` rows hold several, which do not see one another.
        """
        out: Tensor = self.lm_head(self.model(tokens, cache, documents), targets, chunk_tokens)
        return out
