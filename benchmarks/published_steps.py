"""Compare published steps of GPUs with predictions from data sheets:

python -m benchmarks.published_steps --out benchmarks/results/published-steps.json
"""

from statistics import median

from benchmarks.report import arguments, write_report
from tests.predict.published import PUBLISHED
from tests.predict.test_published_time import predicted


def main() -> None:
    """Predict, print and write."""
    words, results, errors = arguments(), [], []
    for each in PUBLISHED:
        found, ranks = predicted(each.words)
        speed = found.tokens / found.seconds / ranks
        errors.append(round(speed / each.tokens_per_second - 1, 4))
        results.append(
            {
                "name": each.name,
                "source": each.source,
                "words": each.words,
                "published_tokens_per_second": each.tokens_per_second,
                "predicted_tokens_per_second": round(speed, 1),
                "error": errors[-1],
            }
        )
        print(results[-1])
    off = [abs(each) for each in errors]
    about = {"median_error": median(off), "worst_error": max(off)}
    write_report(words.out, "published_steps", results, **about)


if __name__ == "__main__":
    main()
