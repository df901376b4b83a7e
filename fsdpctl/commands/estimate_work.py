"""The work of `fsdpctl estimate-memory`: estimates for its options, as text, JSON or recipe."""

from dataclasses import replace
from pathlib import Path

from fsdpctl.commands.charts import draw_estimates
from fsdpctl.commands.config_args import config_as_recipe
from fsdpctl.commands.estimate_report import (
    conclusions,
    fit_line,
    heading,
    show_all,
    show_one,
    show_translation,
    time_dict,
    verdict,
)
from fsdpctl.commands.printing import emit, note, print_error, say, show_json
from fsdpctl.config.compose import Composed
from fsdpctl.config.schema import BATCH_KEYS, Config, Origin
from fsdpctl.config.selection import (
    STRATEGY,
    Selection,
    auto_names,
    unset_names,
    with_auto,
    with_selection,
)
from fsdpctl.errors import CheckpointError, DoesNotFitError, UsageError
from fsdpctl.estimate.estimator import Estimator
from fsdpctl.estimate.imported_config import ImportedConfig, import_config
from fsdpctl.estimate.largest import LargestFit, largest_that_fits
from fsdpctl.estimate.resolve_auto import estimates_of
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.estimate.summary import describe_ranking
from fsdpctl.importers.readers import read_other_tool
from fsdpctl.io.activity import doing
from fsdpctl.io.texts import format_bytes
from fsdpctl.resolve.machine import notes_on_cores, notes_on_memory

# Keys whose `auto` follows from the machine or the data.
_MACHINE_KEYS = (
    "precision.param_dtype", "precision.reduce_dtype", "precision.master_dtype", "train.seq_len",
    BATCH_KEYS[0], "launch.nproc_per_node", "launch.device",
)  # fmt: skip


def show_estimates(
    composed: Composed,
    imported: ImportedConfig | None,
    *,
    all_strategies: bool,
    fit: str | None,
    plot: Path | None,
    as_json: bool,
) -> bool:
    """Print the estimates of a configuration; return whether an estimate fits.

    `imported` is the other tool's file that is estimated.
    """
    estimator = Estimator()
    show = note if as_json else say
    show(*notes_on_memory(composed.config))
    with_rankings = estimates_of(estimator, composed, all_strategies=all_strategies)
    estimates = [each for each, _ in with_rankings]
    show(*notes_on_cores(estimates[0].config))
    fits = [_fit(estimator, composed.config, each, fit) for each in estimates if fit is not None]
    if plot is not None:
        note(f"written: {draw_estimates(estimates, plot)}")
    if as_json:
        entries = [
            each.to_dict()
            | time_dict(estimator, each)
            | ({} if ranking is None else {"selected": ranking.to_dict()})
            for each, ranking in with_rankings
        ]
        for entry, largest in zip(entries, fits, strict=False):
            entry["fit"] = largest.to_dict()
        if imported is not None:
            entries = [entry | {"from": imported.to_dict()} for entry in entries]
        show_json(entries if all_strategies else entries[0])
        return any(each.fits for each in estimates)
    if imported is not None:
        show_translation(imported)
    if all_strategies:
        say(*heading(estimates))
        show_all(estimator, composed.config, estimates, fits)
        for each, ranking in with_rankings:
            if ranking is not None:
                say(f"{each.config.strategy.name}: {ranking.summary}")
    else:
        if (ranking := with_rankings[0][1]) is not None:
            say(*describe_ranking(ranking))
        show_one(estimator, estimates[0], fits)
    return any(each.fits for each in estimates)


def print_recipe(composed: Composed, fit: str | None) -> bool:
    """Print the recipe of an estimate, with its verdict on stderr; return whether it fits."""
    estimator, config = Estimator(), composed.config
    note(*composed.ignored_lines, *composed.renamed, *notes_on_memory(config))
    ((estimate, ranking),) = estimates_of(estimator, composed, all_strategies=False)
    note(*(describe_ranking(ranking) if ranking is not None else ()))
    values: dict[str, int] = {}
    if fit is not None:
        largest = _fit(estimator, config, estimate, fit)
        note(f"fit     {fit_line(largest)}")
        if largest.estimate is not None:
            estimate, values = largest.estimate, largest.values
    emit(config_as_recipe(_estimated_settings(config, estimate).changed(values, Origin.SELECTED)))
    note(*conclusions(estimate)[-1:])
    return estimate.fits


def _fit(estimator: Estimator, config: Config, estimate: RunEstimate, fit: str) -> LargestFit:
    names = [*unset_names(config), *(each for each in auto_names(config) if each != STRATEGY)]
    return largest_that_fits(estimator, estimate.plan, fit, names)


def _estimated_settings(requested: Config, estimate: RunEstimate) -> Config:
    """Return settings with the selection, and with values of `auto` that depend on the machine."""
    names = {*unset_names(requested), *auto_names(requested)}
    config = with_selection(with_auto(requested, names), Selection.of(estimate.config))
    origins = {name: estimate.config.origin(name) for name in names}
    keys = (key for key in _MACHINE_KEYS if requested.is_auto(key))
    values = {key: estimate.config.value(key) for key in keys}
    # The samples per step are known, so the recipe does not need the tokens per step.
    config = config.changed({**values, BATCH_KEYS[1]: None})
    return replace(config, origins={**config.origins, **origins})


def show_verdicts(groups: list[tuple[Path, ...]], settings: list[str], *, require_fit: bool) -> int:
    """Print a line with the verdict of each file of another tool; return the exit code."""
    verdicts, failed = set(), []
    for index, files in enumerate(groups, start=1):
        file = " and ".join(map(str, files))
        try:
            with doing(f"estimating {file} ({index} of {len(groups)})"):
                imported = import_config(read_other_tool(*files), settings)
                [(estimate, _)] = estimates_of(Estimator(), imported.composed, all_strategies=False)
        except (UsageError, CheckpointError) as error:
            say(f"{file}: {str(error).removeprefix(f'{files[0]}: ')}")
            failed.append(file)
            continue
        verdicts.add(estimate.verdict)
        translation = imported.translation
        left_out = [*(row.key for row in translation.not_estimated), *translation.unrecognized]
        rest = f"; left out: {', '.join(left_out)}" if left_out else ""
        available = format_bytes(max(0, estimate.available))
        sizes = f"{format_bytes(estimate.peak_reserved)} of {available}"
        say(f"{file}: {verdict(estimate)}, {sizes}{rest}")
    if require_fit and failed:
        print_error(f"--require-fit: not estimated: {', '.join(failed)}")
    if require_fit and (failed or verdicts - {"fits"}):
        return DoesNotFitError.exit_code
    return 0 if verdicts else UsageError.exit_code
