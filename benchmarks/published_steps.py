"""Compare published steps of GPUs with predictions from data sheets:

python -m benchmarks.published_steps --out benchmarks/results/published-steps.json

With `--out`, also write the errors by kind to conf/accuracy.json, the source of error bands. Errors
of programs that differ from what fsdpctl can describe are left out.
"""

import json
from collections import defaultdict
from pathlib import Path
from statistics import median

from benchmarks.report import arguments, write_report
from fsdpctl.estimate.accuracy import ACCURACY, kind_of
from tests.predict.published import PUBLISHED
from tests.predict.test_published_time import PREDICTOR, planned, predicted


def main() -> None:
    """Predict, print and write."""
    words, results, errors = arguments(), [], []
    for each in PUBLISHED:
        found, ranks = predicted(each.words)
        kind = kind_of(PREDICTOR.estimate(planned(each.words)), found.seconds)
        speed = found.tokens / found.seconds / ranks
        errors.append(round(speed / each.tokens_per_second - 1, 4))
        results.append(
            {
                "name": each.name,
                "kind": kind,
                "source": each.source,
                "words": each.words,
                "published_tokens_per_second": each.tokens_per_second,
                "predicted_tokens_per_second": round(speed, 1),
                "error": errors[-1],
                **({"differs": each.differs} if each.differs else {}),
            }
        )
        print(results[-1])
    off = [abs(each) for each in errors]
    about = {"median_error": median(off), "worst_error": max(off)}
    write_report(words.out, "published_steps", results, **about)
    if words.out:
        by_kind = defaultdict(list)
        for row in results:
            if "differs" not in row:
                by_kind[row["kind"]].append(row["error"])
        file = Path(__file__).parent.parent / "conf" / ACCURACY
        file.write_text(json.dumps(by_kind, indent=2) + "\n")


if __name__ == "__main__":
    main()
