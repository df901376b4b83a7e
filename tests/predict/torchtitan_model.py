"""The decoder and the loss of torchtitan in 2024, which the published runs used."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    """The shape of a Llama model in torchtitan."""

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    vocab: int


LLAMA_7B = Shape(32, 4096, 11008, 32, 32, 32000)
LLAMA_8B = Shape(32, 4096, 14336, 32, 8, 128256)


class _Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(torch.mean(y * y, dim=-1, keepdim=True) + 1e-5)
        return y.type_as(x) * self.weight


def _rotate(x: Tensor, rotations: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotations.view(1, x.shape[1], 1, -1)).flatten(3).type_as(x)


class _Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head = shape.width // shape.heads
        self.times = shape.heads // shape.kv_heads
        self.wq = nn.Linear(shape.width, shape.width, bias=False)
        self.wk = nn.Linear(shape.width, shape.kv_heads * self.head, bias=False)
        self.wv = nn.Linear(shape.width, shape.kv_heads * self.head, bias=False)
        self.wo = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x, rotations):
        batch, length, _ = x.shape
        maps = (self.wq, self.wk, self.wv)
        q, k, v = (each(x).view(batch, length, -1, self.head) for each in maps)
        q, k = _rotate(q, rotations), _rotate(k, rotations)
        k, v = self._repeated(k), self._repeated(v)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).contiguous().view(batch, length, -1))

    def _repeated(self, x: Tensor) -> Tensor:
        if self.times == 1:
            return x
        batch, length, heads, width = x.shape
        wide = x[:, :, :, None, :].expand(batch, length, heads, self.times, width)
        return wide.reshape(batch, length, heads * self.times, width)


class _MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.width, shape.hidden, bias=False)
        self.w2 = nn.Linear(shape.hidden, shape.width, bias=False)
        self.w3 = nn.Linear(shape.width, shape.hidden, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class _Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention = _Attention(shape)
        self.feed_forward = _MLP(shape)
        self.attention_norm = _Norm(shape.width)
        self.ffn_norm = _Norm(shape.width)

    def forward(self, x, rotations):
        h = x + self.attention(self.attention_norm(x), rotations)
        return h + self.feed_forward(self.ffn_norm(h))


class Titan(nn.Module):
    """A decoder from tokens to logits."""

    def __init__(self, shape: Shape, length: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding.from_pretrained(
            torch.empty(shape.vocab, shape.width), freeze=False
        )
        self.layers = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
        self.norm = _Norm(shape.width)
        self.output = nn.Linear(shape.width, shape.vocab, bias=False)
        half = shape.width // shape.heads // 2
        self.register_buffer("rotations", torch.empty(length, half, dtype=torch.complex64))

    def get_input_embeddings(self) -> nn.Module:
        embedding: nn.Module = self.tok_embeddings
        return embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.output

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, self.rotations)
        return self.output(self.norm(h))
