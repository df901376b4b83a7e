"""GPT-2 (Radford et al., Language Models are Unsupervised Multitask Learners, 2019)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdpctl.config.model import ModelConfig
from fsdpctl.models.attention import AttentionMask, attention_mask
from fsdpctl.models.cache import Cache, LayerCache, attend_cached, layer_arguments
from fsdpctl.models.documents import Documents
from fsdpctl.models.parts import CausalDecoder, activation_of, embedding


class Projection(nn.Module):
    """A linear layer whose weight has the shape (in, out), as in GPT-2's checkpoints."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, out))
        self.bias = nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor) -> Tensor:
        """Project from shape (..., in) to (..., out)."""
        return F.linear(x, self.weight.t(), self.bias)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.c_attn = Projection(config.hidden_size, 3 * config.hidden_size)
        self.c_proj = Projection(config.hidden_size, config.hidden_size)

    def forward(
        self, x: Tensor, cache: LayerCache | None = None, mask: AttentionMask | None = None
    ) -> Tensor:
        """Return a tensor shaped like `x`, (batch, length, hidden_size)."""
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.num_heads, -1).transpose(1, 2)
            for part in self.c_attn(x).split(width, dim=-1)
        )
        mixed = attend_cached(q, k, v, cache, mask)
        out: Tensor = self.c_proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class MLP(nn.Module):
    """Two projections and an activation between them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.c_fc = Projection(config.hidden_size, config.intermediate_size)
        self.c_proj = Projection(config.intermediate_size, config.hidden_size)
        self.activation = activation_of(config)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor shaped like `x`, (..., hidden_size)."""
        out: Tensor = self.c_proj(self.activation(self.c_fc(x)))
        return out


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, cache: LayerCache | None = None, mask: AttentionMask | None = None
    ) -> Tensor:
        """Return a tensor shaped like `x`, (batch, length, hidden_size)."""
        x = x + self.attn(self.ln_1(x), cache, mask)
        return x + self.feed_forward(x)

    def feed_forward(self, x: Tensor) -> Tensor:
        """Return what the block adds to `x` after attention, token by token."""
        out: Tensor = self.mlp(self.ln_2(x))
        return out


class _Backbone(nn.Module):
    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.head_dim = config.hidden_size // config.num_heads
        self.wte = embedding(vocab_size, config.hidden_size)
        self.wpe = embedding(config.max_seq_len, config.hidden_size)
        self.h = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.ln_f = nn.LayerNorm(config.hidden_size, config.norm_eps)

    def forward(
        self, tokens: Tensor, cache: Cache | None = None, documents: Documents | None = None
    ) -> Tensor:
        start = 0 if cache is None else len(cache)
        positions = torch.arange(start, start + tokens.shape[-1], device=tokens.device)
        if documents is not None:
            positions = documents.own_positions
        x = self.wte(tokens) + self.wpe(positions)
        mask = attention_mask(x, self.head_dim, None, documents)
        for index, block in enumerate(self.h):
            x = block(x, *layer_arguments(cache, index, mask))
        out: Tensor = self.ln_f(x)
        return out


class Gpt2Decoder(CausalDecoder):
    """GPT-2 without dropout."""

    _places = ("transformer", "wte")

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__(_Backbone(config, vocab_size), config, vocab_size)
