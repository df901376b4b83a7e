"""Text generation, token by token."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdpctl.models.cache import Cache
from fsdpctl.models.kernels import without_cudnn
from fsdpctl.models.parts import Decoder, evaluating


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters of random sampling."""

    seed: int
    temperature: float = 0.8  # 0: greedy
    top_p: float = 1.0  # probability mass of the likeliest tokens to sample from
    ends: tuple[int, ...] = ()  # tokens that end the text; they are returned too


@torch.no_grad()
def generate(
    model: Decoder,
    prompt: list[int],
    turns: Iterable[object],
    *,
    context: int,
    sampling: Sampling,
    device: torch.device,
    caches: bool = True,
) -> list[int]:
    """Return the tokens that follow `prompt`, one per turn. Collective for a sharded model.

    `turns` is an iterable of the same length on every rank: `range(COUNT)`, or one that may end
    sooner. The model sees the last `context` tokens. `caches`: whether to cache keys and values;
    compiled blocks would compile for each length.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    tokens, cache = list(prompt), Cache()
    for _ in turns:
        with evaluating(model), without_cudnn():
            if caches and len(tokens) <= context:
                logits = model(torch.tensor([tokens[len(cache) :]], device=device), cache=cache)
            else:  # the position of every token has changed, so nothing in the cache is valid
                logits = model(torch.tensor([tokens[-context:]], device=device))
        tokens.append(draw(logits[0, -1].float().cpu(), sampling, generator))
        if tokens[-1] in sampling.ends:
            break
    return tokens[len(prompt) :]


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw one token from 1-D logits by nucleus sampling (Holtzman et al., 2020)."""
    if not sampling.temperature:
        return int(logits.argmax())
    odds = torch.softmax(logits / sampling.temperature, dim=-1)
    if sampling.top_p < 1:
        sorted_odds, order = odds.sort(descending=True, stable=True)
        before = sorted_odds.cumsum(0) - sorted_odds
        odds[order[before >= sampling.top_p]] = 0
    return int(torch.multinomial(odds, 1, generator=generator))
