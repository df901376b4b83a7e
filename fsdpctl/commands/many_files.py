"""`estimate-memory --from` with several files or a directory: a line for each."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdpctl.commands.config_args import ConfigArguments
from fsdpctl.commands.console import emit, say
from fsdpctl.commands.from_others import asked_from, typed_beside
from fsdpctl.config.compose import compose_config
from fsdpctl.errors import CheckpointError, DoesNotFitError, UsageError
from fsdpctl.io.activity import doing
from fsdpctl.io.units import format_bytes

_SUFFIXES = (".yaml", ".yml")


def files_of(sources: Sequence[Path]) -> list[Path]:
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


def show_verdicts(
    files: Sequence[Path], asked: ConfigArguments, *, as_json: bool, require_fit: bool
) -> int:
    """Estimate each file with the settings of the command line; return the exit code."""
    compose_config(typed_beside(files[0], asked))
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
        others = asked_from(file, asked)
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
