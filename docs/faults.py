"""The table of the fault-injection campaign, from its results."""

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results" / "faults.json"
_OUTCOMES = {  # by exit code
    0: "finished",
    1: "reported the failure",
    4: "rejected the corrupted file",
    75: "saved and stopped",
    76: "stopped on a non-finite or spiking step",
    130: "saved and stopped",
}


def faults_table() -> str:
    """Return the number of cases and the outcomes of the disturbed starts, by kind of fault."""
    report = json.loads(RESULTS.read_text())
    cases: list[dict[str, Any]] = report["results"]
    rows = defaultdict(list)
    for each in cases:
        rows[_fault(each)].append(each)
    lines = ["| fault | cases | outcome of the disturbed start | wrong |", "|---|---:|---|---:|"]
    for name, found in sorted(rows.items()):
        counts = Counter(_outcome(each) for each in found)
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
        wrong = sum(1 for each in found if each["wrong"])
        lines.append(f"| {name} | {len(found)} | {outcomes} | {wrong} |")
    seconds = sorted(each["seconds"] for each in cases)
    about = (
        f"{len(cases)} cases, seeds {cases[0]['seed']} to {cases[-1]['seed']}, torch "
        f"{report['torch']}, {report['machine']}. A case with all of its starts took "
        f"{seconds[len(seconds) // 2]:.0f} s (median), {seconds[-1]:.0f} s at most."
    )
    return "\n".join([*lines, "", about])


def _fault(case: dict[str, Any]) -> str:
    if case["kind"] == "signal":
        target = "the launcher" if case["target"] == "launcher" else "a rank"
        return f"{case['what']} to {target}"
    names = {
        "disk": "a full disk",
        "cable": "a network link cut for 1 to 60 s",
        "host": "a host killed",
        "newest checkpoint": "the newest checkpoint corrupted",
        "metrics": "a truncated metrics.jsonl",
        "other ranks": "another number of ranks at the next start",
        "data error": "an error in one rank's data",
        "collective that never comes": "a rank that hangs",
    }
    return names.get(case["what"], f"{case['what']} on one rank")


def _outcome(case: dict[str, Any]) -> str:
    """Return the outcome of the first start, by the exit code of a launcher that was not killed."""
    codes = [each for each in case["codes"][0] if each is not None and each >= 0]
    return _OUTCOMES.get(max(codes), f"code {max(codes)}") if codes else "killed"
