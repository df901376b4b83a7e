"""data_files.json, the record of a run's data, and the check for changed data."""

import json
import os
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from fsdpctl.data.data_set import DataSet
from fsdpctl.data.script_data import ScriptData
from fsdpctl.errors import UsageError, shorten_list
from fsdpctl.io import files
from fsdpctl.io.run_files import DATA
from fsdpctl.io.untrusted import Count, read_json

_MOST_FILES = 2000  # only the number of more files is recorded
_FIRST_BYTES = 1 << 16  # start of a file, hashed to detect changes that keep its size
_MOST_NAMED = 3
_SAME_FILES = "the same files in another order or with other settings"


@dataclass(frozen=True, slots=True)
class DataRecord:
    """The contents of data_files.json."""

    fingerprint: str
    tokenizer: str  # checksum of the tokenizer
    count: Count  # number of files
    files: dict[str, str]  # size and checksum by name; empty for more than _MOST_FILES


def _current_record(data: DataSet) -> DataRecord:
    states, count = dict[str, str](), len(data.files) + len(data.token_files)
    if count <= _MOST_FILES:
        states = {os.path.abspath(path): _size_and_checksum(path) for path in data.files}
        for each in data.token_files:
            path = each.shard.path
            name = os.path.abspath(path) if each.is_local else str(path)
            states[name] = f"{each.size} {each.xxh3 or each.start_checksum}"
    return DataRecord(data.fingerprint, data.tokenizer.checksum, count, states)


def _size_and_checksum(file: Path) -> str:
    with files.os_errors_as(str(file)), file.open("rb") as content:
        start = content.read(_FIRST_BYTES)
        return f"{os.fstat(content.fileno()).st_size} {xxhash.xxh3_64_hexdigest(start)}"


def write_data_record(run_dir: Path, data: DataSet) -> None:
    with files.os_errors_as(f"train.run_dir={run_dir}"):
        text = json.dumps(asdict(_current_record(data)), indent=1)
        files.write_atomic(run_dir / DATA, text + "\n")


def recorded_fingerprint(run_dir: Path, checkpoint_fingerprint: str = "") -> str:
    """Return the fingerprint of a run's data, or `checkpoint_fingerprint` without a record.

    The record comes first, because the checkpoint may come from another run.
    """
    record = _read(run_dir)
    return checkpoint_fingerprint if record is None else record.fingerprint


def _read(run_dir: Path) -> DataRecord | None:
    file = run_dir / DATA
    return read_json(file, DataRecord) if file.exists() else None


def check_same_data(run_dir: Path, data: DataSet, fingerprint: str, location: str = "") -> None:
    """Raise UsageError if the data does not have the run's `fingerprint`, unless that is empty.

    The message begins with `location`, by default with `train.run_dir`.
    """
    if fingerprint in ("", data.fingerprint):
        return
    hint = "; restore the old data"
    if not location:
        resume = f"pass --resume {shlex.quote(str(run_dir))} train.run_dir=NEW"
        resume += " to train on the new data from the run's state"
        is_script = isinstance(data.train, ScriptData)
        hint += ", or " + ("set another train.run_dir" if is_script else resume)
    problem = f"the data has changed since the run's earlier steps{_difference(run_dir, data)}"
    raise UsageError(f"{location or f'train.run_dir={run_dir}'}: {problem}{hint}")


def _difference(run_dir: Path, data: DataSet) -> str:
    """Describe which recorded files differ, or else what has changed; empty if unknown."""
    old, new = _read(run_dir), _current_record(data)
    if old is None:
        return ""
    if not (old.files and new.files):
        return f" ({old.count:,} files before, {new.count:,} now)" * (new.count != old.count)
    common = old.files.keys() & new.files.keys()
    groups = [
        ("added", sorted(new.files.keys() - common)),
        ("removed", sorted(old.files.keys() - common)),
        ("changed", sorted(each for each in common if old.files[each] != new.files[each])),
    ]
    changes = [f"{verb} {shorten_list(names, _MOST_NAMED)}" for verb, names in groups if names]
    if not changes:
        changes = ["another tokenizer" * (old.tokenizer != new.tokenizer) or _SAME_FILES]
    return f" ({'; '.join(changes)})"
