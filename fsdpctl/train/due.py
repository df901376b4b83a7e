"""What is to be done after which step."""

from dataclasses import dataclass

from fsdpctl.config.schema import Config


@dataclass(frozen=True, slots=True)
class Due:
    """What is to be done after a step; nothing as it stands."""

    last: bool = False
    validates: bool = False
    saves: bool = False


def due_after(step: int, config: Config, *, validates: bool) -> Due:
    """What a configuration has done after `step`; `validates`: whether there is data for it."""
    last = step == config.train.steps
    return Due(
        last=last,
        validates=validates and (last or _is_multiple(step, config.train.eval_every)),
        saves=last or _is_multiple(step, config.checkpoint.every),
    )


def _is_multiple(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
