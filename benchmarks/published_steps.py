"""Compare published steps of GPUs with predictions from data sheets:

python -m benchmarks.published_steps --out benchmarks/results/published-steps.json

With `--out`, also write the errors by kind to conf/accuracy.json, the source of error bands. Errors
of programs that differ from what fsdpctl can describe are left out.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import arguments, write_report
from fsdpctl.estimate.accuracy import ACCURACY, error_kind
from fsdpctl.estimate.cluster_specs import gpu_of
from tests.predict.published import PUBLISHED
from tests.predict.test_published_time import PREDICTOR, planned, predicted


def errors_by_kind(results: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Return the errors by kind and GPU, without programs that differ."""
    seen: dict[str, dict[str, list[float]]] = {}
    for row in results:
        if "differs" not in row:
            seen.setdefault(row["kind"], {}).setdefault(row["card"], []).append(row["error"])
    return seen


def main() -> None:
    """Predict, print and write."""
    options, results, errors = arguments(), [], []
    for each in PUBLISHED:
        prediction, ranks = predicted(each.settings)
        plan = planned(each.settings)
        kind = error_kind(PREDICTOR.estimate(plan), prediction.seconds)
        speed = prediction.tokens / prediction.seconds / ranks
        errors.append(round(speed / each.tokens_per_second - 1, 4))
        results.append(
            {
                "name": each.name,
                "kind": kind,
                "card": gpu_of(plan.config),
                "source": each.source,
                "words": each.settings,
                "published_tokens_per_second": each.tokens_per_second,
                "predicted_tokens_per_second": round(speed, 1),
                "error": errors[-1],
                **({"differs": each.differs} if each.differs else {}),
            }
        )
        print(results[-1])
    off = [abs(each) for each in errors]
    kwargs = {"median_error": median(off), "worst_error": max(off)}
    write_report(options.out, "published_steps", results, **kwargs)
    if options.out:
        by_kind = errors_by_kind(results)
        file = Path(__file__).parent.parent / "conf" / ACCURACY
        file.write_text(json.dumps(by_kind, indent=2) + "\n")


if __name__ == "__main__":
    main()
