"""Figures that support promises of the pages: phrases, and tables of decoders and of faults."""

from collections import Counter, defaultdict
from statistics import median
from typing import Any

from benchmarks.report import PAIRS
from docs.measured import measured_on, report_of, table_of

_OUTCOMES = {  # by exit code
    0: "finished",
    1: "reported the failure",
    4: "rejected the corrupted file",
    **dict.fromkeys((75, 130), "saved and stopped"),
    76: "stopped on a non-finite or spiking step",
}
_FAULTS = {
    "disk": "a full disk",
    "cable": "a network link cut for 1 to 60 s",
    "host": "a host killed",
    "newest checkpoint": "the newest checkpoint corrupted",
    "metrics": "a truncated metrics.jsonl",
    "other ranks": "another number of ranks at the next start",
    "data error": "an error in one rank's data",
    "collective that never comes": "a rank that hangs",
}


def decoders_table() -> str:
    """Return the table of decoder families, by how `model=hf` supports them."""
    report, works = report_of("decoders"), _working_decoders()
    results = report["results"]
    tried = [each for each in results if each["is_tried"]]
    ran = sum("failed" in each for each in works)  # with the commands
    groups = {
        "several samples in a sequence": [each for each in works if each["packs"]],
        "one sample in a sequence": [each for each in works if not each["packs"]],
        "a command fails": [e for e in tried if e.get("failed") and not e["problem"]],
        "rejected": [each for each in tried if each["problem"]],
        "not tried": [each for each in results if not each["is_tried"]],
    }
    rows = []
    for name, result in groups.items():
        families = (f"{each['family']}{'*' * each['has_experts']}" for each in result)
        if result:
            rows.append(f"{name} | {len(result)} | {', '.join(families)}")
    loss = max(each["loss_difference"] for each in works)
    gradient = max(each["gradient_difference"] for each in works)
    options = (
        f"transformers {report['transformers']}, torch {report['torch']}, on a CPU in float32. Of "
        f"the {len(works)} families that work, the loss differs from that of transformers by at "
        f"most {loss:.1e}, and gradients by {gradient:.1e} of the largest one. Each exports the "
        f"bytes that it read. {ran} of them ran by the command, with a tiny model and chats: "
        "`estimate-memory`, `train` on two ranks with the self-check, `evaluate` and "
        "`consolidate-checkpoint`; transformers loads the export."
    )
    header = "chats are packed as | families | `model_type` (with experts: *)"
    return table_of(header, rows, options, align="---")


def _working_decoders() -> list[dict[str, Any]]:
    results = report_of("decoders")["results"]
    return [e for e in results if e["is_tried"] and not e["problem"] and not e.get("failed")]


def faults_table() -> str:
    """Return the number of cases and the outcomes of the disturbed starts, by kind of fault."""
    report = report_of("faults")
    cases, groups = report["results"], defaultdict[str, list[dict[str, Any]]](list)
    for each in cases:
        groups[_fault(each)].append(each)
    rows = []
    for name, result in sorted(groups.items()):
        counts = Counter(map(_outcome, result)).most_common()
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in counts)
        rows.append(f"{name} | {len(result)} | {outcomes} | {_wrong(result)}")
    seconds = sorted(each["seconds"] for each in cases)
    options = (
        f"{len(cases)} cases, seeds {cases[0]['seed']} to {cases[-1]['seed']}, "
        f"{measured_on(report)}. A case with all of its starts took "
        f"{seconds[len(seconds) // 2]:.0f} s (median), {seconds[-1]:.0f} s at most."
    )
    header = "fault | cases | outcome of the disturbed start | wrong"
    return table_of(header, rows, options, align="---")


def _wrong(cases: list[dict[str, Any]]) -> int:
    return sum(bool(each["wrong"]) for each in cases)


def _fault(case: dict[str, Any]) -> str:
    if case["kind"] == "signal":
        target = "the launcher" if case["target"] == "launcher" else "a rank"
        return f"{case['what']} to {target}"
    return _FAULTS.get(case["what"], f"{case['what']} on one rank")


def _outcome(case: dict[str, Any]) -> str:
    """Return the outcome of the first start, by the exit code of a launcher that was not killed."""
    codes = [each for each in case["codes"][0] if each is not None and each >= 0]
    return _OUTCOMES.get(max(codes), f"code {max(codes)}") if codes else "killed"


def phrases() -> dict[str, str]:
    """Return figures in phrases, of docs/method/evidence.md and README.md."""
    cases, works = report_of("faults")["results"], _working_decoders()
    damaged = [each for each in cases if each["what"] == "newest checkpoint"]
    peaks = report_of("peak-memory-cpu")["results"]
    ratios = [each[f"{ours}_over_{theirs}"] for each in peaks for ours, theirs in PAIRS.items()]
    estimates, steps = report_of("estimates")["results"], report_of("published-steps")
    small, published = estimates["small"], [abs(each["error"]) for each in estimates["published"]]
    timed = [abs(each["error"]) for each in steps["results"] if "differs" not in each]
    off = f"off by {median(published):.1%} (median) and {max(published):.1%} (most)"
    first, *later = report_of("growth")["results"]
    largest = max(each["over_first"] for each in later) - 1
    (startup,) = report_of("startup")["results"]
    message = {
        "faults": f"{_wrong(cases)} of {len(cases)} injected faults led to wrong results",
        "damage": f"{_wrong(damaged)} of {len(damaged)} corrupted checkpoints led to wrong results",
        "peak memory": f"{min(ratios):.2f} to {max(ratios):.2f} times PyTorch's peak",
        "estimates": f"peak of all tensors at most {max(e['worst_error'] for e in small):.2%} off "
        f"in {sum(each['configurations'] for each in small)} runs",
        "published runs": f"{off} in {len(published)} measurements on H100 and B300",
        "published steps": f"off by {median(timed):.1%} (median) and {max(timed):.1%} (most) in "
        f"{len(timed)} steps; more in {len(steps['results']) - len(timed)} whose programs differ",
        "growth": f"{later[-1]['over_first'] - 1:+.1%} from step {first['step']:,} to step "
        f"{later[-1]['step']:,}, {largest:+.1%} at most between them",
        "decoders": f"losses of {len(works)} families differ by at most "
        f"{max(each['loss_difference'] for each in works):.0e}",
        "startup": f"`--help` takes {startup['help_over_import_typer']:.2f} times the processor "
        "time of `import typer`, the estimate of 405B on 16,384 GPUs "
        f"{startup['estimate_over_import_torch']:.1f} times that of `import torch`",
    }
    return {f"phrase of {name}": text for name, text in message.items()}
