"""Text out of a model, token by token."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdpctl.models.cache import Cache
from fsdpctl.models.kernels import without_cudnn
from fsdpctl.models.parts import Decoder, evaluating


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is drawn from a model's odds."""

    seed: int
    temperature: float = 0.8  # 0: always the likeliest
    top_p: float = 1.0  # only of the likeliest that together have so much of the odds
    ends: tuple[int, ...] = ()  # after these nothing follows; they are given back too


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
    """The tokens that follow `prompt`, one a turn. All ranks of a sharded model call it alike.

    Args:
        model: token ids in, logits out; with a cache of keys and values.
        prompt: at least one token.
        turns: as many on every rank, so that they stay in step: `range(COUNT)`, or what ends
            sooner.
        context: how many of the last tokens the model sees.
        sampling: how each is drawn.
        device: where the model runs.
        caches: keep keys and values; not where blocks are compiled, for each length anew.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    tokens, cache = list(prompt), Cache()
    for _ in turns:
        with evaluating(model), without_cudnn():
            if caches and len(tokens) <= context:
                logits = model(torch.tensor([tokens[len(cache) :]], device=device), cache=cache)
            else:  # every token's place has changed, and with it all that was computed of it
                logits = model(torch.tensor([tokens[-context:]], device=device))
        tokens.append(draw(logits[0, -1].float().cpu(), sampling, generator))
        if tokens[-1] in sampling.ends:
            break
    return tokens[len(prompt) :]


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token from 1-D logits; nucleus sampling as in Holtzman et al., 2020."""
    if not sampling.temperature:
        return int(logits.argmax())
    odds = torch.softmax(logits / sampling.temperature, dim=-1)
    if sampling.top_p < 1:
        sorted_odds, order = odds.sort(descending=True, stable=True)
        before = sorted_odds.cumsum(0) - sorted_odds
        odds[order[before >= sampling.top_p]] = 0
    return int(torch.multinomial(odds, 1, generator=generator))
