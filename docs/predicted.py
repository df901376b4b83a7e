"""Tables that compare predicted steps with published and measured ones."""

import json
from collections.abc import Sequence
from itertools import combinations, groupby
from pathlib import Path
from statistics import median
from typing import Any

_RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


def published_steps_table() -> str:
    """Return published tokens per second and those predicted from data sheets."""
    report = json.loads((_RESULTS / "published-steps.json").read_text())
    lines = [
        "| step | published, tokens/s per GPU | predicted | error | source |",
        "|---|---:|---:|---:|---|",
    ]
    lines += [
        f"| {each['name']} | {each['published_tokens_per_second']:,.0f} | "
        f"{each['predicted_tokens_per_second']:,.0f} | {each['error']:+.1%} | {each['source']} |"
        for each in report["results"]
    ]
    errors = f"Median error {report['median_error']:.1%}, worst {report['worst_error']:.1%}."
    return "\n".join([*lines, "", errors])


def selections_line() -> str:
    """Return a sentence that compares the selection of `auto` with all that fits."""
    report = json.loads((_RESULTS / "auto.json").read_text())
    found = report["summary"]
    return (
        f"The selection fits in {found['fit']} of {found['cases']} configurations, counting all "
        f"tensors of a step. In {found['within_a_tenth']}, its step takes at most 10% longer than "
        f"the best that fits (median {found['median_over_best']:.2f} times as long, worst "
        f"{found['worst_over_best']:.2f}); torch {report['torch']}, {report['machine']}, two ranks."
    )


def predicted_steps_table() -> str:
    """Return prediction errors for measured steps on two ranks, by the link between them."""
    report = json.loads((_RESULTS / "predicted-steps.json").read_text())
    rows = sorted(report["results"], key=lambda row: row["mbit"] or 0)
    lines = [
        "| link between two ranks | steps | median error | worst | pairs 10% apart in the right "
        "order | 5% apart | worst error of sent bytes |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for mbit, found in groupby(rows, key=lambda row: row["mbit"]):
        lines.append(_line("one machine" if mbit is None else f"{mbit:,} Mbit/s", list(found)))
    machine = f"torch {report['torch']}, {report['machine']}"
    about = (
        f"Strategies, prefetch and accumulation of three models, over gloo; {machine}. On one "
        f"machine, medians of {report['rounds']} rounds in which strategies take turns; over "
        "links, one run each. Pairs are two strategies whose steps differ by at least so much, all "
        "else being equal."
    )
    return "\n".join([*lines, "", about])


def _settings(row: dict[str, Any]) -> tuple[str, ...]:
    return (row["model"], row["prefetch"], row["passes"])


def _line(name: str, rows: Sequence[dict[str, Any]]) -> str:
    errors = sorted(abs(row["error"]) for row in rows)
    sent = [abs(row["sent_error"]) for row in rows if row["sent_error"] is not None]
    bytes_sent = f"{max(sent):.1%}" if sent else "–"
    return (
        f"| {name} | {len(rows)} | {median(errors):.1%} | {errors[-1]:.1%} | "
        f"{_right(rows, 0.1)} | {_right(rows, 0.05)} | {bytes_sent} |"
    )


def _right(rows: Sequence[dict[str, Any]], apart: float) -> str:
    """Return how many pairs of programs, whose times are `apart`, are predicted in their order."""
    found = []
    for _, group in groupby(sorted(rows, key=_settings), key=_settings):
        programs = [row for row in group if not row["strategy"].startswith("hybrid_")]
        for one, other in combinations(programs, 2):
            fast, slow = sorted((one, other), key=lambda row: float(row["measured_seconds"]))
            if slow["measured_seconds"] > (1 + apart) * fast["measured_seconds"]:
                found.append(slow["predicted_seconds"] > fast["predicted_seconds"])
    return f"{sum(found)} of {len(found)}"
