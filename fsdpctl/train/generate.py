"""Text out of a model, token by token."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is drawn from a model's odds."""

    seed: int
    temperature: float = 0.8  # 0: always the likeliest
    top_p: float = 1.0  # only of the likeliest that together have so much of the odds


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: list[int],
    count: int,
    *,
    context: int,
    sampling: Sampling,
    device: torch.device,
) -> list[int]:
    """`count` tokens that follow `prompt`. All ranks of a sharded model call it alike.

    Args:
        model: token ids in, logits out.
        prompt: at least one token.
        count: how many tokens; a fixed number, so that ranks stay in step.
        context: how many of the last tokens the model sees.
        sampling: how each is drawn.
        device: where the model runs.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    tokens = list(prompt)
    for _ in range(count):
        window = torch.tensor([tokens[-context:]], device=device)
        tokens.append(draw(model(window)[0, -1].float().cpu(), sampling, generator))
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
