"""The learning rate as a function of the step."""

import math
from collections.abc import Callable

from fsdpctl.config.schema import LrSchedulerConfig

# Decay from 1 to 0, as a function of the completed fraction.
_DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "1-sqrt": lambda done: 1 - math.sqrt(done),
}


def warmup_steps(config: LrSchedulerConfig, total_steps: int) -> int:
    steps, ratio = config.warmup_steps, config.warmup_ratio
    if ratio is None:
        assert steps is not None
        return steps
    share = ratio * total_steps
    return math.ceil(share) if steps is None else min(math.floor(share), steps)


def lr_factor(config: LrSchedulerConfig, step: int, total_steps: int) -> float:
    """Return the factor of the peak learning rate in step `step`, counted from 0.

    The factor rises to 1 over the warmup, from `start_lr_ratio` or in equal increments from 0. Then
    `cosine` decays along half a cosine to `min_lr_ratio` at the last step, `wsd` stays at 1 until
    the last `decay_ratio` of the steps and decays by `decay_type`, and `constant` stays at 1.
    Without `reaches_min`, the minimum would be reached one step after the last.
    """
    warmup, start = warmup_steps(config, total_steps), config.start_lr_ratio
    if step < warmup:
        if start is None:
            return (step + 1) / (warmup + 1)
        return start + (1 - start) * (step / warmup)
    if config.name == "constant":
        return 1.0
    begin, kind = warmup, config.name
    if config.name == "wsd":
        begin = max(begin, total_steps - round(config.decay_ratio * total_steps))
        kind = config.decay_type
        if step < begin:
            return 1.0
    end = total_steps - 1 if config.reaches_min else total_steps
    fraction = (step - begin) / max(1, end - begin)
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * _DECAYS[kind](fraction)
