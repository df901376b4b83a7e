"""The number of collectives that this rank has started, and the last one in flight."""

import importlib
import json
from dataclasses import dataclass, field
from typing import Any

# NCCL's collectives have a separate recorder. Builds of torch without NCCL do not have it.
_RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")


@dataclass(frozen=True, slots=True)
class CollectiveRecord:
    """The collectives of all process groups of a rank."""

    started: dict[str, int] = field(default_factory=dict)  # number of collectives by group name
    pending: str = ""  # the last collective that is not completed


@dataclass(slots=True)
class UnrecordedCollectives:
    """The collectives over shared memory, and waits over gloo, which torch does not record.

    The training thread writes; other threads may read values that are one collective old.
    """

    count: int = 0  # updates of counters in shared memory
    pending: str = ""


UNRECORDED = UnrecordedCollectives()  # the collectives of this process


def read_record() -> CollectiveRecord:
    """Read the recorders. Any thread may call this while another thread waits in a collective."""
    record = _recorded_by_torch()
    unrecorded = {"shared memory": UNRECORDED.count} if UNRECORDED.count else {}
    return CollectiveRecord({**record.started, **unrecorded}, UNRECORDED.pending or record.pending)


def _recorded_by_torch() -> CollectiveRecord:
    torch_c = importlib.import_module("torch._C._distributed_c10d")
    dumps = (getattr(torch_c, name) for name in _RECORDERS if hasattr(torch_c, name))
    for dump in dumps:
        content = json.loads(dump(includeCollectives=True, onlyActive=False))
        if content.get("entries"):
            return _parse_dump(content)
    return CollectiveRecord()


def _parse_dump(dump: dict[str, Any]) -> CollectiveRecord:
    # Ids of process groups differ by rank, but their names do not.
    entries = dump["entries"]
    names = {str(each["pg_id"]): ":".join(each["process_group"]) for each in entries}
    started = {
        names[pg_id]: int(status["last_enqueued_collective"])
        for pg_id, status in dump.get("pg_status", {}).items()
        if pg_id in names
    }
    # Over gloo, the state stays "scheduled" after completion.
    pending = [each for each in entries if not each["retired"] and each["state"] != "completed"]
    if not pending:
        return CollectiveRecord(started)
    last, group = pending[-1], names[str(pending[-1]["pg_id"])]
    sizes = " ".join("x".join(map(str, each)) for each in last["input_sizes"])
    return CollectiveRecord(started, f"{last['profiling_name']} of {sizes} in {group}")
