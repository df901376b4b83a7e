"""The names of a run's files, and the check that they are regular files without other links."""

import os
import re
from contextlib import suppress
from pathlib import Path

from fsdpctl.errors import UsageError

RUNS = "runs"  # the parent of run directories by default
OVERRIDES_FILE, METRICS, LOGS = "overrides.txt", "metrics.jsonl", "logs"
LOG = f"{LOGS}/node-00000.log"
LOCK = "lock"
HEARTBEAT, ENVIRONMENT, DATA = "heartbeat.json", "environment.json", "data_files.json"
TENSORBOARD, TRACKER_ID = "tensorboard", "tracker-id.txt"
HANDSHAKE, ESTIMATE, PROFILES = "handshake", "estimate.json", "profile"
STOP, SAVE, PROFILE = "STOP", "SAVE", "PROFILE"  # requests
RUN_CONFIG, CHECKPOINTS = "config.yaml", "checkpoints"
CACHE = "cache"  # tokens, if the user's cache can't be written
CONFIG_JSON = "config.json"  # the configuration of a model of transformers
MANIFEST = "manifest.json"
CHECKSUMS = "fsdpctl_checksums.json"  # a file of an export
RUN_ASSETS = "assets"  # files that belong to the model's weights, such as the tokenizer's
LATEST = "latest"  # a link to the newest checkpoint, or to the newest run
BEST = "best"  # a link to the checkpoint with the lowest validation loss
STEP = re.compile(r"step-(\d{8,18})")
_LINKS = re.compile(rf"({LATEST}|{BEST})(\.tmp-\d+)?")  # allowed names
_CHECKED_NAMES = (
    OVERRIDES_FILE, METRICS, f"{METRICS}.old", LOGS, LOCK, HEARTBEAT, ENVIRONMENT, TENSORBOARD,
    TRACKER_ID, HANDSHAKE, ESTIMATE, PROFILES, STOP, SAVE, PROFILE, RUN_CONFIG, RUN_ASSETS, DATA,
    CACHE,
)  # fmt: skip
_SNAPSHOT = "memory-snapshot-"
_NEXT_STEP = "remove it, or replace the link by its target"


def check_run_files(run_dir: Path) -> None:
    """Check that no file that a run reads or writes in `run_dir` is a link or a special file.

    The directory itself may be a link. Files of the user and of wandb are not checked. The content
    of a checkpoint is checked when it is read.
    """
    for each in _entries(run_dir):
        if each.name in _CHECKED_NAMES or each.name.startswith(_SNAPSHOT):
            _check_regular(each)
        elif each.name in (CHECKPOINTS, "wandb") and (each.is_symlink() or not each.is_dir()):
            raise UsageError(f"{each.path}: expected a directory, not a link; {_NEXT_STEP}")
    check_checkpoint_dirs(run_dir / CHECKPOINTS)


def check_run_dir(run_dir: Path) -> None:
    """Check that a run directory does not exist, or passes `check_run_files`."""
    if run_dir.exists() and not run_dir.is_dir():
        raise UsageError(f"train.run_dir={run_dir}: expected a directory, got a file")
    check_run_files(run_dir)


def check_checkpoint_dirs(checkpoints: Path) -> None:
    """Check that checkpoints are directories, and that only `latest` and `best` link to one."""
    for each in _entries(checkpoints):
        if each.is_symlink() and not (_LINKS.fullmatch(each.name) and STEP.fullmatch(_read(each))):
            raise UsageError(f"{each.path}: is a link to {_read(each)}; {_NEXT_STEP}")
        if each.name.startswith("step-") and not each.is_dir():
            raise UsageError(f"{each.path}: expected a directory; remove it")


def _read(link: "os.DirEntry[str]") -> str:
    try:
        return os.readlink(link.path)
    except OSError:  # deleted meanwhile
        return ""


def _entries(folder: Path) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}") from None


def _check_regular(entry: "os.DirEntry[str]") -> None:
    problem = ""
    with suppress(FileNotFoundError):  # deleted meanwhile
        if entry.is_symlink():
            problem = f"is a link to {_read(entry)}"
        elif entry.is_dir():
            for each in _entries(Path(entry.path)):
                _check_regular(each)
        elif not entry.is_file():
            problem = "not a regular file"
        elif entry.stat().st_nlink > 1:
            problem = "has another hard link, whose content would change too"
    if problem:
        raise UsageError(f"{entry.path}: {problem}; {_NEXT_STEP}")
