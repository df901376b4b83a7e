"""The collectives that this rank has started and not completed, by torch's flight recorder."""

import importlib
import json
from dataclasses import dataclass, field
from typing import Any

# NCCL's collectives have a recorder of their own, which builds without NCCL lack.
_RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")


@dataclass(frozen=True, slots=True)
class CollectiveRecord:
    """The collectives of all process groups of a rank."""

    started: dict[str, int] = field(default_factory=dict)  # number started, by the group's name
    pending: str = ""  # the last one that is not completed


@dataclass(slots=True)
class UnrecordedCollectives:
    """The collectives over shared memory, and the one waited for, as torch does not record them."""

    count: int = 0  # over shared memory
    pending: str = ""


UNRECORDED = UnrecordedCollectives()  # of this process


def read_record() -> CollectiveRecord:
    """Read the recorders. Any thread may call it, also while another waits in a collective."""
    found = _recorded_by_torch()
    own = {"shared memory": UNRECORDED.count} if UNRECORDED.count else {}
    return CollectiveRecord({**found.started, **own}, UNRECORDED.pending or found.pending)


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
    begun = {
        names[number]: int(status["last_enqueued_collective"])
        for number, status in content.get("pg_status", {}).items()
        if number in names
    }
    # Over gloo the state stays "scheduled" after completion.
    open_ones = [each for each in entries if not each["retired"] and each["state"] != "completed"]
    if not open_ones:
        return CollectiveRecord(begun)
    last = open_ones[-1]
    sizes = " ".join("x".join(map(str, each)) for each in last["input_sizes"])
    return CollectiveRecord(
        begun, f"{last['profiling_name']} of {sizes} in {names[str(last['pg_id'])]}"
    )
