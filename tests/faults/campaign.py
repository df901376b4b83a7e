"""Random faults in real runs: `python -m tests.faults.campaign FIRST COUNT [RESULTS.json]`.

Each run must end by itself within its time-outs, with an exit code of fsdpctl and no traceback. It
leaves no process and loses no complete checkpoint. The same command then completes the run, with
the weights of an undisturbed run if the policy promises them.
"""

import hashlib
import json
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.report import write_report
from fsdpctl.checkpoint.manifest import tensor_key
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.run_checkpoints import complete_checkpoints, newest_checkpoint
from fsdpctl.io.run_files import LATEST
from fsdpctl.run.metrics import last_step
from tests.faults.cases import STEPS, Case, case_of
from tests.faults.running import Run, codes_of
from tests.faults.strike import make_room, small_disk, strike
from tests.launch.hosts import hosts

PATIENCE = 200.0  # seconds: four times hang_timeout for a start, twice, and the starts
CUT_PATIENCE = 500.0  # if a cable is unplugged for a minute
MOST_STARTS = 5
CODES = (0, 1, 4, 75, 76, 77, 130)
_DAMAGED = 4

Sums = dict[str, str]


def final_sums(run_dir: Path) -> Sums:
    """Return a digest of every tensor of the model in the last checkpoint."""
    newest = newest_checkpoint(run_dir / "checkpoints")
    assert newest is not None
    reader = CheckpointReader(newest)
    result = {
        name: hashlib.sha256(
            b"".join(bytes(data) for _, data in reader.read(tensor_key("model", name)))
        ).hexdigest()
        for name in reader.names("model")
    }
    assert result
    return result


def run_with_fault(case: Case, run: Run, undisturbed: Sums) -> dict[str, Any]:
    """Run a case; return what happened, and under `wrong` what should not have happened."""
    began, saved = time.monotonic(), set[str]()
    processes = run.start()
    more = strike(case, run, processes, saved)
    first = codes_of(processes, CUT_PATIENCE if run.hosts else PATIENCE)
    wrong = _first_problems(case, run, first, saved)
    make_room(run.run_dir.parent)
    codes = [first]
    while any(codes[-1]) and None not in codes[-1] and len(codes) < MOST_STARTS:
        if _DAMAGED in codes[-1]:  # do what the error tells the user: move the checkpoint away
            newest = newest_checkpoint(run.run_dir / "checkpoints")
            refused = newest or run.run_dir / "checkpoints" / LATEST  # no other one
            refused.rename(run.run_dir.parent / f"damaged-{len(codes)}")
        codes.append(codes_of(run.start(*more), PATIENCE))
    if any(codes[-1]) or None in codes[-1]:
        wrong.append(f"did not go on to the end: {codes}")
    elif last_step(run.run_dir / "metrics.jsonl") != STEPS:
        wrong.append("not all steps were done")
    elif case.keeps_bits and not more and final_sums(run.run_dir) != undisturbed:
        wrong.append("other weights than those of the undisturbed run")
    return {
        "seed": case.seed, "kind": case.kind, "what": case.what, "target": case.target,
        "moment": case.moment, "restarts": case.restarts, "codes": codes,
        "seconds": round(time.monotonic() - began, 1), "wrong": wrong,
    }  # fmt: skip


def _first_problems(case: Case, run: Run, codes: list[int | None], saved: set[str]) -> list[str]:
    """Return what is wrong with the start that the fault struck."""
    wrong = ["did not end in time"] if None in codes else []
    if left := run.end_orphans():
        wrong.append(f"{left} processes were left")
    allowed = (*CODES, -signal.SIGKILL) if case.kills_launcher else CODES
    if messages := [each for each in codes if each is not None and each not in allowed]:
        wrong.append(f"exit codes {messages}")
    if "Traceback" in run.out:
        wrong.append("a traceback on the terminal")
    present = {each.name for each in complete_checkpoints(run.run_dir / "checkpoints")}
    if (lost := saved - present) and len(present) < 2:  # otherwise newer ones replaced them
        wrong.append(f"complete checkpoints are gone: {sorted(lost)}")
    return wrong


def campaign(first: int, count: int, out: Path | None = None) -> list[dict[str, Any]]:
    """Run the cases `first` to `first + count - 1`, and write the results to `out` after each.

    Results that `out` contains are kept: a campaign of two hours may be interrupted.
    """
    known = json.loads(out.read_text())["results"] if out is not None and out.exists() else []
    results = [each for each in known if first <= each["seed"] < first + count]
    done = {each["seed"] for each in results}
    with tempfile.TemporaryDirectory(prefix="faults-") as scratch:
        (reference := Path(scratch) / "whole").mkdir()
        whole = Run(reference)
        assert codes_of(whole.start(), PATIENCE) == [0], whole.out
        sums = final_sums(whole.run_dir)
        for seed in sorted({*range(first, first + count)} - done):
            results.append(run_case(case_of(seed), Path(scratch) / f"case-{seed}", sums))
            print(json.dumps(results[-1]), flush=True)
            write_report(out, "faults", results)
    return results


def run_case(case: Case, folder: Path, sums: Sums) -> dict[str, Any]:
    """Run a case in `folder`, which must not exist; return its result."""
    fault, args = None, [f"launch.max_restarts={case.restarts}", *case.args]
    if case.kind == "planted":
        mark = str(folder / "fired")
        fault = {"kind": case.what, "rank": case.rank, "call": case.step, "mark": mark}
    folder.mkdir()
    with ExitStack() as stack:
        if case.kind == "disk":
            stack.enter_context(small_disk(folder / "disk"))
        on = stack.enter_context(hosts(2)) if case.on_hosts else None
        run = Run(folder, args, fault=fault, hosts=on)
        result = run_with_fault(case, run, sums)
        return {**result, "said": run.out[-3000:]} if result["wrong"] else result


def main() -> None:
    """Run the cases of the command line; exit with 1 if something was wrong."""
    out = Path(sys.argv[3]) if len(sys.argv) > 3 else None
    result = campaign(int(sys.argv[1]), int(sys.argv[2]), out)
    bad = [each for each in result if each["wrong"]]
    print(f"{len(result)} cases, {len(bad)} wrong")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
