"""`fsdpctl estimate-memory`."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fsdpctl.commands.config_args import (
    ConfigArguments,
    Recipe,
    Settings,
    check_choice,
    composed_from,
    normalized,
)
from fsdpctl.commands.console import AsJson, emit, note, say, show_json
from fsdpctl.commands.convert import words_beside
from fsdpctl.commands.estimate_text import (
    conclusions,
    fit_line,
    heading,
    show_breakdown,
    show_strategies,
    show_translation,
)
from fsdpctl.config.compose import compose_config
from fsdpctl.errors import CheckpointError, DoesNotFitError, UsageError
from fsdpctl.importers.read import read_others
from fsdpctl.io.activity import doing
from fsdpctl.io.units import format_bytes
from fsdpctl.plan.strategy import STRATEGIES, strategies_of
from fsdpctl.predict.memory_recorder import without_gc

if TYPE_CHECKING:
    from fsdpctl.estimate.candidates import Ranking
    from fsdpctl.estimate.changes import Change
    from fsdpctl.estimate.estimator import Estimator
    from fsdpctl.estimate.fit import Fit
    from fsdpctl.estimate.from_others import ImportedConfig
    from fsdpctl.estimate.run_estimate import RunEstimate

_SUFFIXES = (".yaml", ".yml")
_FITTED = ("micro_batch", "seq_len", "model")


@without_gc()  # a quarter of a large estimate's time, for a hundredth of the memory
def estimate_memory(  # noqa: PLR0913  # each is an option
    settings: Settings = None,
    recipe: Recipe = None,
    all_strategies: Annotated[
        bool, typer.Option("--all-strategies", help="Estimate all strategies, one line each.")
    ] = False,
    fit: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(_FITTED),
            help="Find the largest micro-batch, sequence length or number of blocks that fits.",
        ),
    ] = None,
    require_fit: Annotated[
        bool,
        typer.Option("--require-fit", help="Exit with code 3 if the configuration does not fit."),
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory to write charts to.")
    ] = None,
    as_json: AsJson = False,
    source: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="Configuration file of another tool, as `convert` reads it; several or a "
            "directory: a line for each.",
        ),
    ] = None,
) -> None:
    """Estimate peak memory per rank before a run.

    Takes the settings of `train`, for hardware that need not exist: `cluster=h100 launch.nnodes=4`.
    `auto` is resolved for `cluster`. `cluster.memory=80GiB` sets the memory of a rank.
    """
    check_choice("--fit", fit, _FITTED)
    asked = normalized(settings, recipe)
    files = _files_of(source or [])
    if files != (source or [])[:1]:
        if all_strategies or fit or plot:
            raise UsageError("--from: --all-strategies, --fit and --plot take a single file")
        raise typer.Exit(_show_verdicts(files, asked, as_json=as_json, require_fit=require_fit))
    others = _asked_from(files[0], asked) if files else None
    composed = others.composed if others else composed_from(asked, quiet=as_json)
    from fsdpctl.estimate.estimator import Estimator
    from fsdpctl.estimate.search import estimates_of
    from fsdpctl.launch.begin import describe_ranking

    estimator = Estimator()
    found = estimates_of(estimator, composed, every=all_strategies)
    estimates = [each for each, _ in found]
    fits = _fits(estimator, estimates, fit)
    if plot is not None:
        _draw(estimates, fits, plot)
    if others is not None and not as_json:
        show_translation(others)
    if as_json:
        entries = _entries(found, fits)
        if others is not None:
            entries = [{**entry, "from": others.to_dict()} for entry in entries]
        show_json(entries if all_strategies else entries[0])
    elif all_strategies:
        _show_all(estimates, fits)
        for each, ranking in found:
            if ranking is not None:
                say(f"{each.config.strategy.name}: {next(describe_ranking(ranking))}")
    else:
        ranking = found[0][1]
        for line in [] if ranking is None else describe_ranking(ranking):
            say(line)
        _show_one(estimator, estimates[0], fits)
    if require_fit and not any(each.fits for each in estimates):
        raise typer.Exit(DoesNotFitError.exit_code)


def _asked_from(file: Path, asked: ConfigArguments) -> "ImportedConfig":
    """Return the configuration of another tool in `file`, with settings from the command line."""
    words = words_beside(file, asked)
    translation = read_others(file.expanduser())
    from fsdpctl.estimate.from_others import completed  # imports torch, after the file is read

    return completed(translation, words)


def _fits(estimator: "Estimator", estimates: list["RunEstimate"], fit: str | None) -> list["Fit"]:
    if fit is None:
        return []
    from fsdpctl.estimate.fit import largest_that_fits

    return [largest_that_fits(estimator, each.plan, fit) for each in estimates]


def _entries(
    found: "list[tuple[RunEstimate, Ranking | None]]", fits: "list[Fit]"
) -> list[dict[str, Any]]:
    entries = [
        {**estimate.to_dict(), **({} if ranking is None else {"selected": ranking.to_dict()})}
        for estimate, ranking in found
    ]
    for entry, largest in zip(entries, fits, strict=False):
        entry["fit"] = largest.to_dict()
    return entries


def _draw(estimates: list["RunEstimate"], fits: list["Fit"], folder: Path) -> None:
    from fsdpctl.commands.drawing import draw_estimates, draw_largest

    fitted = [each.estimate for each in fits if each.estimate]
    drawn = [*draw_estimates(estimates, folder), *draw_estimates(fitted, folder, "fit")]
    for path in drawn:
        note(f"written: {path}")
    if len(fits) > 1 and any(each.estimate for each in fits):
        names = [each.config.strategy.name for each in estimates]
        note(f"written: {draw_largest(fits, names, folder)}")


def _show_all(estimates: list["RunEstimate"], fits: list["Fit"]) -> None:
    for line in heading(estimates[0]):
        say(line)
    show_strategies(estimates)
    shown = {each.config.strategy.name for each in estimates}
    engine = estimates[0].config.engine.name
    known = strategies_of(engine)
    if missing := [name for name in STRATEGIES if name not in known]:
        say(f"engine={engine} does not support {', '.join(missing)}")
    if refused := [name for name in known if name not in shown]:
        say(f"other settings exclude {', '.join(refused)}; strategy={refused[0]} shows why")
    for each, fit in zip(estimates, fits, strict=False):
        say(f"{each.config.strategy.name}: {fit_line(fit)}")


def _show_one(estimator: "Estimator", found: "RunEstimate", fits: list["Fit"]) -> None:
    for line in heading(found):
        say(line)
    show_breakdown(found)
    say()
    for line in conclusions(found):
        say(line)
    if fits:
        say(f"fit     {fit_line(fits[0])}")
    if fits and fits[0].key == "train.seq_len" and fits[0].estimate is not None:
        from fsdpctl.estimate.fit import longer_samples

        for words, longer in longer_samples(estimator, found.plan, fits[0]):
            say(f"longer  {fit_line(longer)}, with {' '.join(words)}")
    nothing_fits = fits[0].estimate is None if fits else not found.fits
    if nothing_fits:
        from fsdpctl.estimate.advice import advice
        from fsdpctl.launch.check_fit import change_lines

        changes = advice(estimator, found.plan)
        for line in (*change_lines(changes), *_fits_with(estimator, changes, fits)):
            say(line)


def _fits_with(
    estimator: "Estimator", changes: list[tuple["Change", "RunEstimate"]], fits: list["Fit"]
) -> Iterator[str]:
    """Yield the largest size that fits with each change, if nothing fits without."""
    from fsdpctl.estimate.fit import FITTED, largest_that_fits

    for fit in fits:
        (what,) = (name for name, key in FITTED.items() if key == fit.key)
        for change, _ in changes:
            if not any(word.startswith(f"{fit.key}=") for word in change.words):
                found = largest_that_fits(estimator, change.plan, what)
                yield f"fit     {fit_line(found)}, with {' '.join(change.words)}"


def _files_of(sources: Sequence[Path]) -> list[Path]:
    """Return the files that `--from` names; of a directory, all YAML files in it and below.

    Links within a directory are not followed.

    Raises:
        UsageError: If a directory has none, or one of several files does not exist.
    """
    found: list[Path] = []
    for source in sources:
        if not source.is_dir():
            if len(sources) > 1 and not source.exists():
                raise UsageError(f"--from {source}: not found")
            found.append(source)
            continue
        below = (each for each in source.rglob("*") if each.suffix in _SUFFIXES)
        inside = sorted(each for each in below if each.is_file() and not each.is_symlink())
        if not inside:
            raise UsageError(f"--from {source}: contains no YAML file")
        found += inside
    return found


def _show_verdicts(
    files: Sequence[Path], asked: ConfigArguments, *, as_json: bool, require_fit: bool
) -> int:
    """Estimate each file with the settings of the command line; return the exit code."""
    compose_config(words_beside(files[0], asked))
    verdicts = set()
    for number, file in enumerate(files, start=1):
        with doing(f"estimating {file} ({number} of {len(files)})"):
            found = _judged(file, asked)
        verdict, text = found["verdict"], found.get("reason")
        if verdict is not None:
            verdicts.add(verdict)
            peak, available = found["peak_reserved_bytes"], max(0, found["available_bytes"])
            lost = f"; left out: {', '.join(found['left_out'])}" if found["left_out"] else ""
            text = f"{verdict}, {format_bytes(peak)} of {format_bytes(available)}{lost}"
        emit(json.dumps(found)) if as_json else say(f"{file}: {text}")
    if require_fit and verdicts - {"fits"}:
        return DoesNotFitError.exit_code
    return 0 if verdicts else UsageError.exit_code


def _judged(file: Path, asked: ConfigArguments) -> dict[str, Any]:
    """Return the verdict on a file as `StepEstimate.verdict`, or None and the reason."""
    from fsdpctl.estimate.estimator import Estimator
    from fsdpctl.estimate.search import estimates_of

    try:
        others = _asked_from(file, asked)
        ((estimate, _),) = estimates_of(Estimator(), others.composed, every=False)
    except (UsageError, CheckpointError) as error:
        reason = str(error).removeprefix(f"{file}: ")
        return {"file": str(file), "verdict": None, "reason": reason}
    translation = others.translation
    return {
        "file": str(file),
        "verdict": estimate.verdict,
        "tool": translation.tool,
        "peak_reserved_bytes": estimate.peak_reserved,
        "available_bytes": estimate.available,
        "left_out": [*(row.key for row in translation.excluded), *translation.unrecognized],
    }
