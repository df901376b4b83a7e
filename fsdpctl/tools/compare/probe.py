"""Decides between what is foreseen nearly as fast, by short runs on this machine."""

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path

from fsdpctl.config.choosing import with_choice
from fsdpctl.config.schema import Config
from fsdpctl.errors import FsdpctlError, InterruptError, StoppedError, UsageError
from fsdpctl.estimate.choice import Candidate, Choice
from fsdpctl.resolve.run import ResolvedRun, resolved_again
from fsdpctl.run.assets import collect_assets
from fsdpctl.tools.compare.figures import round_of
from fsdpctl.tools.compare.short_run import short_run

_COUNT = 3  # candidates that are probed
_WITHIN = 0.3  # of the fastest: what is foreseen slower than that is not probed
_LEAST, _MOST = 8, 200  # steps of a probe, of which a quarter warms up
_SECONDS = 3.0  # that they take, as far as they may be fewer or more


def worth_probing(choice: Choice) -> list[Candidate]:
    """The candidates that are foreseen about as fast as the fastest; none where it is alone.

    The first; one that saves memory in another way, which is where foresight errs most; one of
    another strategy; else as they come.
    """
    if not choice.ranked:
        return []
    limit = min(each.seconds for each in choice.ranked) * (1 + _WITHIN)
    near = [each for each in choice.ranked if each.seconds <= limit]
    picked = near[:1]
    for differs in (_saving, _strategy, id):
        left = (each for each in near if differs(each) not in map(differs, picked))
        picked += islice(left, _COUNT - len(picked) if differs is id else 1)
    return picked if len(picked) > 1 else []


def _saving(candidate: Candidate) -> object:
    config = candidate.config
    return config.activation_checkpointing.name, config.train.micro_batch_size


def _strategy(candidate: Candidate) -> object:
    return candidate.config.strategy.name


def probed(choice: Choice, run: ResolvedRun, asked: Config, say: Callable[[str], None]) -> Choice:
    """The choice after a short run of each candidate that is worth it, the fastest first.

    One that fails is left out.

    Args:
        choice: for the ranks of `run`.
        run: with something in the place of what was chosen.
        asked: what leaves it open.
        say: is told what is being run.

    Raises:
        UsageError: none of them ran.
        StoppedError, InterruptError: somebody asked to stop.
    """
    candidates = worth_probing(choice)
    if not candidates:
        return choice
    began = time.monotonic()
    assets = collect_assets(run.config, run.data)
    measured, failures = [], []
    with tempfile.TemporaryDirectory(prefix="fsdpctl-") as folder:
        for number, each in enumerate(candidates, start=1):
            words = choice.words(each.config)
            say(f"probing {number}/{len(candidates)}  {words}")
            config = resolved_again(run, with_choice(asked, each.config, choice.names)).config
            config = _shortened(config, each.seconds, Path(folder) / str(number))
            found = _probe(config, words, assets)
            if isinstance(found, str):
                failures.append(f"{words} failed: {found}")
            else:
                measured.append((found, replace(each, measured=found)))
    if not measured:
        raise UsageError(f"nothing that fits by its estimate ran: {'; '.join(failures)}")
    order = [each for _, each in sorted(measured, key=lambda pair: pair[0])]
    others = [each for each in choice.ranked if each not in candidates]
    spent = time.monotonic() - began
    return replace(choice, ranked=(*order, *others), failures=tuple(failures), probing=spent)


def _shortened(config: Config, foreseen: float, run_dir: Path) -> Config:
    steps = min(_MOST, max(_LEAST, round(_SECONDS / foreseen)))
    train = replace(config.train, run_dir=str(run_dir), steps=steps, profile=False)
    return replace(config, train=train)


def _probe(config: Config, words: str, assets: Mapping[str, bytes]) -> float | str:
    """Seconds of a step, or why it failed."""
    try:
        failure = short_run(config, words, assets, "all candidates were probed")
        return failure or round_of(Path(str(config.train.run_dir)), None).step_seconds
    except (InterruptError, StoppedError):
        raise
    except FsdpctlError as error:
        return str(error)
