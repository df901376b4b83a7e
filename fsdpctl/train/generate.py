"""Text out of a model, token by token."""

import torch
from torch import nn

_TEMPERATURE = 0.8


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: list[int],
    count: int,
    *,
    context: int,
    seed: int,
    device: torch.device,
) -> list[int]:
    """`count` tokens that follow `prompt`. All ranks of a sharded model call it alike.

    Args:
        model: token ids in, logits out.
        prompt: at least one token.
        count: how many tokens; a fixed number, so that ranks stay in step.
        context: how many of the last tokens the model sees.
        seed: the draw follows from it.
        device: where the model runs.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(count):
        window = torch.tensor([tokens[-context:]], device=device)
        logits = model(window)[0, -1].float().cpu()
        odds = torch.softmax(logits / _TEMPERATURE, dim=-1)
        tokens.append(int(torch.multinomial(odds, 1, generator=generator)))
    return tokens[len(prompt) :]
