"""The learning rate as a function of the step."""

import math

from fsdpctl.config.schema import LrSchedulerConfig


def warmup_steps(config: LrSchedulerConfig, total_steps: int) -> int:
    """Return the number of steps in which the learning rate rises to its peak."""
    if config.warmup_ratio is not None:
        return round(config.warmup_ratio * total_steps)
    return config.warmup_steps


def lr_factor(config: LrSchedulerConfig, step: int, total_steps: int) -> float:
    """Return the factor of the peak learning rate in step `step`, counted from 0.

    It rises to 1 over `warmup_steps`, or `warmup_ratio` of all steps. Then `cosine` decays along
    half a cosine to `min_lr_ratio` at the last step, `wsd` stays at 1 until the last `decay_ratio`
    of the steps and decays linearly, and `constant` stays at 1.
    """
    warmup = warmup_steps(config, total_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if config.name == "constant":
        return 1.0
    begin = warmup
    if config.name == "wsd":
        begin = max(begin, total_steps - round(config.decay_ratio * total_steps))
        if step < begin:
            return 1.0
    done = (step - begin) / max(1, total_steps - 1 - begin)
    fall = 0.5 * (1 + math.cos(math.pi * done)) if config.name == "cosine" else 1 - done
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * fall
