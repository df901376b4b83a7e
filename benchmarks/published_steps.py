"""Compare published steps of GPUs with predictions from data sheets:

python -m benchmarks.published_steps --out benchmarks/results/published-steps.json
"""

import argparse
from pathlib import Path
from statistics import median

from benchmarks.report import write_report
from tests.predict.published import PUBLISHED
from tests.predict.test_published_time import predicted


def main() -> None:
    """Predict, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = []
    for each in PUBLISHED:
        found, ranks = predicted(each.words)
        speed = found.tokens / found.seconds / ranks
        results.append(
            {
                "name": each.name,
                "source": each.source,
                "words": each.words,
                "published_tokens_per_second": each.tokens_per_second,
                "predicted_tokens_per_second": round(speed, 1),
                "error": round(speed / each.tokens_per_second - 1, 4),
            }
        )
        print(results[-1])
    errors = [abs(each["error"]) for each in results if isinstance(each["error"], float)]
    about = {"median_error": median(errors), "worst_error": max(errors)}
    write_report(args.out, "published_steps", results, **about)


if __name__ == "__main__":
    main()
