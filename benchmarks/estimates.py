"""The errors of memory estimates, for runs on CPU ranks and for published runs.

    python -m benchmarks.estimates --out benchmarks/results/estimates.json

On CPU ranks, it measures the peak of all tensors in a step of small random configurations, on every
rank of one to four gloo ranks. `--count 0` keeps these errors of the file. Published runs are
described in tests/predict/test_published_memory.py and tests/predict/published.py. Their errors by
kind are also written to conf/memory_accuracy.json: they determine the reserve of a selection.
"""

import json
from collections.abc import Iterable, Iterator
from statistics import median
from typing import Any

from benchmarks.report import arguments, on_ranks, write_report
from fsdpctl.estimate.run_estimate import MEMORY_ACCURACY
from fsdpctl.io.packages import package_folder
from tests.predict.published import PUBLISHED as STEPS
from tests.predict.published_step import Step
from tests.predict.test_published_memory import PUBLISHED
from tests.predict.test_published_time import PREDICTOR, planned, used_bytes
from tests.predict.test_total import peaks_of

_GIB = 1 << 30


def _errors(rank: int, ranks: int, count: int) -> list[float]:
    peaks = [peaks_of(rank, ranks, seed) for seed in range(count)]
    return [abs(estimated / measured - 1) for estimated, measured in peaks]


def small_runs(count: int) -> Iterator[dict[str, Any]]:
    """Yield the errors for each number of ranks, over all ranks of `count` configurations."""
    for ranks in (1, 2, 3, 4):
        errors = [error for of_rank in on_ranks(ranks, _errors, ranks, count) for error in of_rank]
        yield {
            "world_size": ranks,
            "configurations": count,
            "median_error": round(median(errors), 6),
            "worst_error": round(max(errors), 6),
        }


def published_runs() -> Iterator[dict[str, Any]]:
    """Yield the measured and the estimated memory of published runs, in GiB."""
    for each in PUBLISHED:
        estimate = each.estimate()
        estimates = {"allocated": estimate.peak_allocated, "reserved": estimate.peak_reserved}
        for name, measured in each.measured.items():
            yield {"kind": "dense"} | _row(each.name, "torchtitan", name, measured, estimates[name])
    for step in STEPS:
        if step.used is not None:
            yield _row_of(step, "used", step.used, used_bytes(step))
        if step.allocated is not None:
            nbytes = PREDICTOR.estimate(planned(step.settings)).allocated
            yield _row_of(step, "allocated", step.allocated, nbytes)


def _row_of(step: Step, what: str, measured: float, nbytes: int) -> dict[str, Any]:
    kind = PREDICTOR.estimate(planned(step.settings)).kind
    return {"kind": kind} | _row(step.name, step.source, what, measured, nbytes)


def errors_by_kind(rows: Iterable[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the errors by kind of run."""
    errors: dict[str, list[float]] = {}
    for row in rows:
        errors.setdefault(row["kind"], []).append(row["error"])
    return errors


def _row(run: str, source: str, what: str, measured: float, nbytes: int) -> dict[str, Any]:
    estimated = nbytes / _GIB
    return {
        "run": run,
        "source": source,
        "what": what,
        "measured": measured,
        "estimated": round(estimated, 2),
        "error": round(estimated / measured - 1, 4),
    }


def main() -> None:
    """Measure, print and write."""
    options = arguments(count=56)
    if options.count:
        small = list(small_runs(options.count))
    else:
        small = json.loads(options.out.read_text())["results"]["small"]
    results = {"published": list(published_runs()), "small": small}
    print(results)
    write_report(options.out, "estimates", results)
    by_kind = json.dumps(errors_by_kind(results["published"]), indent=2)
    (package_folder("conf") / MEMORY_ACCURACY).write_text(by_kind + "\n")


if __name__ == "__main__":
    main()
