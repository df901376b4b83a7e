"""The collectives that this rank has started and not completed, by torch's flight recorder."""

import importlib
import json
from dataclasses import dataclass, field
from typing import Any

# NCCL's collectives have a separate recorder, which builds without NCCL lack.
_RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")


@dataclass(frozen=True, slots=True)
class CollectiveRecord:
    """The collectives of all process groups of a rank."""

    started: dict[str, int] = field(default_factory=dict)  # number started, by the group's name
    pending: str = ""  # the last collective that is not completed


@dataclass(slots=True)
class UnrecordedCollectives:
    """Collectives that torch does not record: those over shared memory, and waits over gloo."""

    count: int = 0  # over shared memory
    pending: str = ""


UNRECORDED = UnrecordedCollectives()  # of this process


def read_record() -> CollectiveRecord:
    """Read the recorders. Any thread may call this, also while another waits in a collective."""
    record = _recorded_by_torch()
    own_counts = {"shared memory": UNRECORDED.count} if UNRECORDED.count else {}
    return CollectiveRecord({**record.started, **own_counts}, UNRECORDED.pending or record.pending)


def _recorded_by_torch() -> CollectiveRecord:
    torch_c = importlib.import_module("torch._C._distributed_c10d")
    for name in _RECORDERS:
        dump = getattr(torch_c, name, None)
        if dump is None:
            continue
        content = json.loads(dump(includeCollectives=True, onlyActive=False))
        if content.get("entries"):
            return _read(content)
    return CollectiveRecord()


def _read(content: dict[str, Any]) -> CollectiveRecord:
    # Numbers of groups differ by rank, names do not.
    entries = content["entries"]
    names = {str(each["pg_id"]): ":".join(each["process_group"]) for each in entries}
    started = {
        names[number]: int(status["last_enqueued_collective"])
        for number, status in content.get("pg_status", {}).items()
        if number in names
    }
    # Over gloo the state stays "scheduled" after completion.
    pending = [each for each in entries if not each["retired"] and each["state"] != "completed"]
    if not pending:
        return CollectiveRecord(started)
    last = pending[-1]
    sizes = " ".join("x".join(map(str, each)) for each in last["input_sizes"])
    return CollectiveRecord(
        started, f"{last['profiling_name']} of {sizes} in {names[str(last['pg_id'])]}"
    )
