"""Damages files and calls the commands that read them: `python -m tests.fuzz.campaign SEED COUNT`.

It runs as a process whose memory is limited. Each call must succeed, or reject the file with an
exit code of REFUSALS and a message, within SECONDS, and write only to its output directory.
The command prints failures, one JSON object per line, and at last their number.
"""

import faulthandler
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import Any

from fsdpctl.commands.app import app
from fsdpctl.errors import FsdpctlError
from tests.fuzz.mutations import damaged_bytes, damaged_json, damaged_value
from tests.hostile import (
    RANK_FILE,
    attach,
    everything_in,
    make_checkpoint,
    make_hugging_face,
    make_tokens,
    read_header,
    reseal,
    rewrite_header,
    write_refitted,
)

SECONDS = 20
MEMORY = 6 << 30  # bytes of address space that calls may add
REFUSALS = (2, 4)

Call = tuple[str, ...]
Damage = Callable[[Path, random.Random], None]


class _TooLongError(BaseException):
    """A call took more than SECONDS."""


def _too_long(number: int, frame: FrameType | None) -> None:
    raise _TooLongError


class Campaign:
    """Undamaged files, and calls on damaged copies of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.originals = folder / "originals"
        make_checkpoint(self.originals / "step-00000001")
        make_hugging_face(self.originals / "step-00000001", self.originals / "hf")
        (self.originals / "tokens").mkdir()
        make_tokens(self.originals / "tokens" / "t.bin")
        (self.originals / "text.txt").write_text("words and more words\n" * 500)
        (self.originals / "recipe").mkdir()
        (self.originals / "recipe" / "r.yaml").write_text(
            "model: llama_tiny\nmodel.num_layers: 2\ntrain: {steps: 7, seq_len: 16}\n"
            "optimizer.lr: 1e-3\ndata.val_fraction: 0.1\n"
        )

    def run_case(self, rng: random.Random) -> dict[str, Any] | None:
        """Damage a file and call a command; return the failure, or None."""
        what = rng.choice(sorted(_TARGETS))
        source, damage, calls = _TARGETS[what]
        folder = self.folder / "case"
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "out").mkdir(parents=True)
        shutil.copytree(self.originals / source, folder / "in" / source)
        damage(folder / "in" / source, rng)
        text = f"data.path={self.originals / 'text.txt'}"
        call = tuple(
            arg.format(path=folder / "in" / source, out=folder / "out", text=text)
            for arg in rng.choice(calls)
        )
        before = everything_in(self.folder)
        began = time.monotonic()
        code, message, trace = _called(call)
        took = time.monotonic() - began
        after = everything_in(self.folder)
        written = [
            name
            for name in after.keys() | before.keys()
            if after.get(name) != before.get(name) and not name.startswith("case/out")
        ]
        wrong = None
        if trace:
            wrong = trace
        elif code not in (0, *REFUSALS):
            wrong = f"exit code {code}: {message}"
        elif code in REFUSALS and not message.strip():
            wrong = "refused without a word"
        elif written:
            wrong = f"written: {written}"
        if wrong is None:
            return None
        return {"what": what, "call": call, "seconds": round(took, 1), "wrong": wrong}


def _called(call: Call) -> tuple[int, str, str]:
    """Return the exit code, the line of an error, and the traceback of another exception."""
    signal.alarm(SECONDS)
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            code = app(list(call), standalone_mode=False)
        return (code if isinstance(code, int) else 0), "", ""
    except FsdpctlError as error:
        return error.exit_code, str(error), ""
    except (OSError, MemoryError, RecursionError) as error:  # the command prints one line
        return 2, str(error), ""
    except _TooLongError:
        return 1, "", f"more than {SECONDS} s: {traceback.format_exc()[-600:]}"
    except BaseException:
        return 1, "", traceback.format_exc()[-4000:]
    finally:
        signal.alarm(0)


def _manifest(checkpoint: Path, rng: random.Random) -> None:
    def change(content: dict[str, Any]) -> None:
        # A lone surrogate has no checksum: write it without.
        damaged = json.loads(json.dumps(damaged_value(content, rng)).replace("\\ud800", "?"))
        content.clear()
        content.update(damaged if isinstance(damaged, dict) else {"files": damaged})

    reseal(checkpoint, change)


def _header(checkpoint: Path, rng: random.Random) -> None:
    text, _ = read_header(checkpoint / RANK_FILE)
    content = json.loads(text)
    if rng.random() < 0.4:  # the spans are JSON within JSON
        options = content["__metadata__"]
        options["fsdpctl.spans"] = damaged_json(options["fsdpctl.spans"].encode(), rng).decode(
            "utf-8", "replace"
        )
        text = json.dumps(content).encode()
    else:
        text = damaged_json(text, rng)
    write_refitted(checkpoint, text)


def _attachment(checkpoint: Path, rng: random.Random) -> None:
    """Write a tokenizer, and damaged files beside the weights with valid checksums."""
    reseal(checkpoint, lambda content: content["config"].update({"data.tokenizer": "its own"}))
    name = rng.choice(("tokenizer.json", "tokenizer_config.json"))
    attach(checkpoint, name, damaged_json((checkpoint / name).read_bytes(), rng))
    if rng.random() < 0.5:
        config = json.dumps({"model_type": "llama", "bos_token_id": 1, "rope_scaling": None})
        attach(checkpoint, "config.json", damaged_json(config.encode(), rng))


def _file(name: str, damaged: Callable[[bytes, random.Random], bytes] = damaged_json) -> Damage:
    def damage(folder: Path, rng: random.Random) -> None:
        file = folder / name
        file.write_bytes(damaged(file.read_bytes(), rng))

    return damage


def _header_of_theirs(folder: Path, rng: random.Random) -> None:
    file = rng.choice(sorted(folder.glob("*.safetensors")))
    rewrite_header(file, damaged_json(read_header(file)[0], rng))


_DRY = ("train", "--dry-run", "train.run_dir={out}/run", "train.seq_len=16")
_OURS: list[Call] = [
    ("verify-checkpoint", "{path}"), ("inspect-checkpoint", "{path}"),
    ("inspect-checkpoint", "{path}", "--json"), ("consolidate-checkpoint", "{path}", "{out}/hf"),
    ("consolidate-checkpoint", "{path}", "{out}/x.gguf", "--format", "gguf"),
    ("sample", "{path}", "--tokens", "2"),
    (*_DRY, "model=hf", "model.path={path}", "data=text", "{text}"),
]  # fmt: skip
_THEIRS: list[Call] = [
    (*_DRY, "model=hf", "model.path={path}", "data=text", "{text}"),
    ("shard-checkpoint", "{path}", "{out}/c"),
    ("estimate-memory", "model=hf", "model.path={path}", "train.seq_len=16"),
]
_TOKENIZER: list[Call] = [
    (*_DRY, "data=text", "{text}", "data.tokenizer={path}"),
    ("tokenize", "{path}/../../../originals/text.txt", "{out}/t.bin", "--tokenizer", "{path}"),
]
_TOKENS: list[Call] = [(*_DRY, "data=tokens", "data.path={path}/t.bin")]
_RECIPES: list[Call] = [("train", "--recipe", "{path}/r.yaml", "--print-config")]
_TARGETS: dict[str, tuple[str, Damage, list[Call]]] = {
    "manifest, refitted": ("step-00000001", _manifest, _OURS),
    "manifest": ("step-00000001", _file("manifest.json", damaged_bytes), _OURS),
    "rank header, refitted": ("step-00000001", _header, _OURS),
    "attachments, refitted": ("step-00000001", _attachment, _OURS),
    "rank bytes": ("step-00000001", _file(RANK_FILE, damaged_bytes), _OURS),
    "config.json": ("hf", _file("config.json"), _THEIRS),
    "index.json": ("hf", _file("model.safetensors.index.json"), _THEIRS),
    "safetensors header": ("hf", _header_of_theirs, _THEIRS),
    "tokenizer.json": ("hf", _file("tokenizer.json"), _TOKENIZER),
    "tokenizer_config.json": ("hf", _file("tokenizer_config.json"), _TOKENIZER),
    "token header": ("tokens", _file("t.json"), _TOKENS),
    "tokens": ("tokens", _file("t.bin", damaged_bytes), _TOKENS),
    "recipe": ("recipe", _file("r.yaml", damaged_bytes), _RECIPES),
}


def main(seed: str, count: int) -> None:
    """Damage a file and call a command `count` times."""
    faulthandler.enable()
    signal.signal(signal.SIGALRM, _too_long)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY,) * 2)
    result = 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}-cache"
        campaign = Campaign(Path(folder))
        for number in range(count):
            wrong = campaign.run_case(random.Random(f"{seed} {number}"))
            if wrong is not None:
                result += 1
                print(json.dumps({"number": number, **wrong}), flush=True)
        shutil.rmtree(f"{folder}-cache", ignore_errors=True)
    print(json.dumps({"calls": count, "wrong": result}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
