"""Short runs on this machine, to measure a configuration or to probe candidates of `auto`."""

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import median

from fsdpctl.config.schema import Settled
from fsdpctl.errors import FsdpctlError, InterruptError, StoppedError, UsageError
from fsdpctl.estimate.candidates import Candidate, Ranking
from fsdpctl.io.run_files import METRICS
from fsdpctl.launch.workers import launch_workers
from fsdpctl.resolve.open import Opened
from fsdpctl.resolve.settle import settle
from fsdpctl.run.assets import collect_assets
from fsdpctl.run.directory import look, prepare_run_dir
from fsdpctl.run.heartbeat import lock_run_dir
from fsdpctl.run.metrics import read_metrics
from fsdpctl.training.worker import MEASURE

_COUNT = 3  # candidates that are probed
_WITHIN = 0.3  # above the fastest prediction: slower candidates are not probed
_LEAST, _MOST = 8, 200  # steps of a probe, a quarter of them to warm up
_SECONDS = 3.0  # of a probe, within these numbers of steps
_IN_TURN: tuple[Callable[[Candidate], object], ...] = (
    lambda each: (each.selection.activation_checkpointing, each.selection.micro_batch_size),
    lambda each: each.selection.strategy,
    id,
)


def worth_probing(ranking: Ranking) -> list[Candidate]:
    """Return the candidates that are predicted to be about as fast as the fastest, if several are.

    The first; one that saves memory in another way, which is where predictions err most; one with
    another strategy; then the next in the ranking.
    """
    if not ranking.ranked:
        return []
    limit = min(each.seconds for each in ranking.ranked) * (1 + _WITHIN)
    near = [each for each in ranking.ranked if each.seconds <= limit]
    picked = near[:1]
    for differs in _IN_TURN:
        left = (each for each in near if differs(each) not in map(differs, picked))
        picked += islice(left, _COUNT - len(picked) if differs is id else 1)
    return picked if len(picked) > 1 else []


def probed(ranking: Ranking, opened: Opened, note: Callable[[str], None]) -> Ranking:
    """Run each candidate that is worth it, and rank those first, the fastest at the top.

    A candidate that fails is removed; UsageError if none is left.
    """
    candidates = worth_probing(ranking)
    if not candidates:
        return ranking
    began = time.monotonic()
    assets = collect_assets(opened.config, opened.data)
    measured: list[Candidate] = []
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="fsdpctl-") as folder:
        for number, each in enumerate(candidates, start=1):
            settings = each.selection.text(ranking.names)
            note(f"probing {number}/{len(candidates)}  {settings}")
            config = settle(opened.config, each.selection).config
            run_dir = str(Path(folder) / str(number))
            steps = min(_MOST, max(_LEAST, round(_SECONDS / each.seconds)))
            train = replace(config.train, run_dir=run_dir, steps=steps, profile=False)
            config = replace(config, train=train)
            found = _probe(config, settings, assets)
            if isinstance(found, str):
                failures.append(f"{settings} failed: {found}")
            else:
                measured.append(replace(each, measured=found))
    if not measured:
        raise UsageError(f"no candidate that fits by its estimate ran: {'; '.join(failures)}")
    measured.sort(key=lambda each: each.measured or 0.0)
    others = [each for each in ranking.ranked if each not in candidates]
    spent = time.monotonic() - began
    return replace(ranking, ranked=(*measured, *others), failures=tuple(failures), probing=spent)


def _probe(config: Settled, settings: str, assets: Mapping[str, bytes]) -> float | str:
    """Return the seconds of a step, or the reason of a failure."""
    try:
        failure = short_run(config, settings, assets, "all candidates were probed")
        lines = read_metrics(Path(str(config.train.run_dir)) / METRICS) if not failure else ()
        seconds = [line.seconds or 0.0 for line in lines if line.is_step]
        return failure or median(seconds[len(seconds) // 4 :])
    except (InterruptError, StoppedError):
        raise
    except FsdpctlError as error:
        return str(error)


def short_run(config: Settled, settings: str, assets: Mapping[str, bytes], what: str) -> str | None:
    """Run the steps of a settled configuration, without validation, checkpoints and samples.

    Its run directory does not exist yet. `settings` and `assets` are written there; `what` a stop
    request prevents is for the message. Returns the reason of a failure.
    """
    run_dir = Path(str(config.train.run_dir))
    lock = lock_run_dir(run_dir, lambda: None)
    prepare_run_dir(look(config, "auto", only_here=True), config, [settings], assets)
    outcome = launch_workers([str(run_dir), MEASURE], config.launch)
    lock.release()
    outcome.raise_if_stopped(what)
    return None if outcome.cause is None else outcome.cause.cause
