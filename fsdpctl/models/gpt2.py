"""GPT-2 (Radford et al., Language Models are Unsupervised Multitask Learners, 2019)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdpctl.config.model import ModelConfig
from fsdpctl.models.attention import attend, attend_all
from fsdpctl.models.cache import Cache, LayerCache, beside
from fsdpctl.models.documents import Documents
from fsdpctl.models.parts import Head, activation_of, embedding
from fsdpctl.models.sight import Sight, sight


class Projection(nn.Module):
    """A linear layer whose weight has the shape (in, out), as GPT-2's checkpoints have it."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, out))
        self.bias = nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor) -> Tensor:
        """Shape (..., in) to (..., out)."""
        return F.linear(x, self.weight.t(), self.bias)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.c_attn = Projection(config.hidden_size, 3 * config.hidden_size)
        self.c_proj = Projection(config.hidden_size, config.hidden_size)

    def forward(
        self, x: Tensor, cache: LayerCache | None = None, sight: Sight | None = None
    ) -> Tensor:
        """Shape (batch, length, hidden_size) in and out."""
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.num_heads, -1).transpose(1, 2)
            for part in self.c_attn(x).split(width, dim=-1)
        )
        is_next = cache is not None and len(cache) > 0  # the one token that follows what was seen
        if cache is not None:
            k, v = cache.extended(k, v)
        mixed = attend_all(q, k, v) if is_next else attend(q, k, v, sight)
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
        """Shape (..., hidden_size) in and out."""
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
        self, x: Tensor, cache: LayerCache | None = None, sight: Sight | None = None
    ) -> Tensor:
        """Shape (batch, length, hidden_size) in and out."""
        x = x + self.attn(self.ln_1(x), cache, sight)
        out: Tensor = x + self.mlp(self.ln_2(x))
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
            positions = documents.positions
        x = self.wte(tokens) + self.wpe(positions)
        seen = sight(x, self.head_dim, None, documents)
        for index, block in enumerate(self.h):
            x = block(x, *beside(cache, index, seen))
        out: Tensor = self.ln_f(x)
        return out


class Gpt2Decoder(nn.Module):
    """Token ids in, next-token logits or their loss out. It has no dropout."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.transformer = _Backbone(config, vocab_size)
        self.lm_head = Head(config.hidden_size, vocab_size)
        if config.tie_embeddings:
            self.lm_head.weight = self.transformer.wte.weight

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding."""
        return self.transformer.wte

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
        """As that of the Llama decoder."""
        hidden = self.transformer(tokens, cache, documents)
        out: Tensor = self.lm_head(hidden, targets, chunk_tokens)
        return out
