"""The table of what became of runs that were disturbed, from what the campaign wrote."""

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results" / "faults.json"
_FIRST_ENDS = {  # by exit code: in words
    0: "went on",
    1: "said what failed",
    4: "refused what is damaged",
    75: "saved and ended",
    76: "ended at bad numbers",
    130: "saved and ended",
}


def faults_table() -> str:
    """A row for each kind of fault: how many, and how the disturbed starts ended."""
    report = json.loads(RESULTS.read_text())
    cases: list[dict[str, Any]] = report["results"]
    rows = defaultdict(list)
    for each in cases:
        rows[_fault(each)].append(each)
    lines = ["| fault | cases | the disturbed start | wrong |", "|---|---:|---|---:|"]
    for name, found in sorted(rows.items()):
        ends = Counter(_end(each) for each in found)
        words = ", ".join(f"{count} {end}" for end, count in ends.most_common())
        wrong = sum(1 for each in found if each["wrong"])
        lines.append(f"| {name} | {len(found)} | {words} | {wrong} |")
    seconds = sorted(each["seconds"] for each in cases)
    about = (
        f"{len(cases)} cases, seeds {cases[0]['seed']} to {cases[-1]['seed']}, torch "
        f"{report['torch']}, {report['machine']}; a case took {seconds[len(seconds) // 2]:.0f} s "
        f"at the median, {seconds[-1]:.0f} s at most, with all of its starts."
    )
    return "\n".join([*lines, "", about])


def _fault(case: dict[str, Any]) -> str:
    if case["kind"] == "signal":
        who = "launcher" if case["target"] == "launcher" else "a rank"
        return f"{case['what']} to {who}"
    words = {
        "disk": "a full disk",
        "cable": "a cable pulled for 1 to 60 s",
        "host": "a host killed",
        "newest checkpoint": "the newest checkpoint damaged",
        "metrics": "a torn metrics.jsonl",
        "other ranks": "other ranks at the next start",
        "data error": "an error in one rank's data",
        "collective that never comes": "a rank that stands still",
    }
    return words.get(case["what"], f"{case['what']} on one rank")


def _end(case: dict[str, Any]) -> str:
    """Of the first start: by the code of a launcher that lived."""
    codes = [each for each in case["codes"][0] if each is not None and each >= 0]
    return _FIRST_ENDS.get(max(codes), f"code {max(codes)}") if codes else "killed"
