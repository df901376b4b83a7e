"""A Llama-style decoder."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fsdpctl.config.schema import ModelConfig
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

    def __init__(self, config: ModelConfig, head_dim: int) -> None:
        super().__init__()
        width, self.head_dim = config.hidden_size, head_dim
        self.config = config
        self.q_proj = nn.Linear(width, config.num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * head_dim, width, bias=False)
        if config.qk_norm:
            self.q_norm = RMSNorm(head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Shape (batch, length, hidden_size) in and out; `cos`, `sin` as `rotation` gives them."""
        batch, length, _ = x.shape

        def heads(values: Tensor) -> Tensor:
            return values.view(batch, length, -1, self.head_dim)

        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            rotate(q, cos, sin),
            rotate(k, cos, sin),
            v,
            is_causal=True,
            enable_gqa=self.config.num_heads != self.config.num_kv_heads,
        )
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class SwiGLU(nn.Module):
    """A gated MLP (Shazeer, 2020)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (..., width) in and out."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, head_dim: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, head_dim)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Shape (batch, length, hidden_size) in and out; `cos`, `sin` as `rotation` gives them."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class _Backbone(nn.Module):
    def __init__(self, config: ModelConfig, head_dim: int, vocab_size: int) -> None:
        super().__init__()
        self.config, self.head_dim = config, head_dim
        # Built from values: drawing some would import half of torch, on the meta device too.
        rows = torch.empty(vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding.from_pretrained(rows, freeze=False)
        self.layers = nn.ModuleList(Block(config, head_dim) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        cos, sin = rotation(self.config, self.head_dim, tokens.shape[-1], x.device, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.norm(x)
        return out


class Head(nn.Linear):
    """The projection to the vocabulary, or the loss of what it gives.

    Note: why torch's `linear_cross_entropy` is not used. It saves the same memory, and returns the
    loss in the dtype of the hidden states: a sum over thousands of tokens in bfloat16.
    """

    def __init__(self, width: int, vocab_size: int) -> None:
        super().__init__(width, vocab_size, bias=False)

    def forward(
        self, x: Tensor, targets: Tensor | None = None, chunk_tokens: int | None = None
    ) -> Tensor:
        """Logits of shape (..., vocab_size); with `targets` the summed cross entropy, in float32.

        A target of -100 does not count. With `chunk_tokens`, logits exist for so many tokens at a
        time, and are computed again in backward.
        """
        if targets is None:
            return super().forward(x)
        x, targets = x.flatten(0, -2), targets.flatten()
        if chunk_tokens is None or len(targets) <= chunk_tokens:
            return self._loss(x, targets)
        loss = torch.zeros((), dtype=torch.float32, device=x.device)
        for chunk, wanted in zip(x.split(chunk_tokens), targets.split(chunk_tokens), strict=True):
            loss = loss + checkpoint(self._loss, chunk, wanted, use_reentrant=False)
        return loss

    def _loss(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = super().forward(x).float()
        return F.cross_entropy(logits, targets, reduction="sum")


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
        self, tokens: Tensor, targets: Tensor | None = None, chunk_tokens: int | None = None
    ) -> Tensor:
        """Shape (batch, length) in, (batch, length, vocab_size) out.

        With `targets`, shaped like `tokens`: the cross entropy in nats, summed over the targets
        that count; with `chunk_tokens` without ever having the logits of more tokens than that.
        """
        out: Tensor = self.lm_head(self.model(tokens), targets, chunk_tokens)
        return out
