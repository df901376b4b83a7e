"""The command line of a training in a shell script, and what launches it. Nothing is executed.

Only plain commands are read: words, quotations, redirections, variables that the script sets once,
and products and quotients of whole numbers. What else decides a training is an error.
"""

import re
from collections.abc import Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from fsdpctl.config.importers.shared import UNUSED_OF_FSDP, read_fsdp
from fsdpctl.config.importers.source_config import SourceConfig, SourceKey
from fsdpctl.config.importers.translation import Translation
from fsdpctl.errors import UsageError
from fsdpctl.io.files import read_text_file
from fsdpctl.io.untrusted import parse_json, read_json, read_yaml

LAUNCH, ACCELERATE = "launch", "accelerate"  # keys of a script's source that are not its options
UNUSED_OF_ACCELERATE = tuple(
    f"{ACCELERATE}.{each}"
    for each in (
        "compute_environment", "debug", "downcast_bf16", "enable_cpu_affinity", "machine_rank",
        "main_*", "mixed_precision", "rdzv_*", "same_network", "tpu_*", "use_cpu", "gpu_ids",
        *(f"fsdp_config.{each}" for each in UNUSED_OF_FSDP),
    )
)  # fmt: skip
_TOOLS = {"swift": "ms-swift", "trl": "TRL"}
_PROGRAM = re.compile(
    r"(?:.*/)?(swift|trl)(?:/cli|/scripts|\.cli|\.scripts)[./](?:sft|pt)(?:\.py)?"
)
_PIECE = r"""\\.|'[^']*'|"(?:\\.|[^"\\])*"|\$\([^()]*\)|\$\(\([^()]*\)\)|[^\s;&|<>()'"\\#]"""
_TOKEN = re.compile(
    rf"""(?P<blank>(?:[ \t\r]|\\\r?\n)+|\#[^\n]*)
    |(?P<other>(?:\d*|&)>>?&?[ \t]*(?:{_PIECE})+|\d*<[ \t]*(?:{_PIECE})+)
    |(?P<end>[\n;&|()]+)
    |(?P<word>(?:{_PIECE})(?:\#|{_PIECE})*)""",
    re.VERBOSE | re.DOTALL,
)
_HEREDOC = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1([^\n]*)\n.*?^[ \t]*\2$", re.DOTALL | re.MULTILINE)
_ASSIGNMENT = re.compile(r"(\w+)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(\w+)|\$\{(\w+)(?::-([^${}]*))?\}")
_NUMBER = re.compile(r"\$\((?:expr |\()[ ]*(\d+(?:[ ]*\\?[*/][ ]*\d+)*)[ ]*\)+")
_MOST = 128 << 10  # characters of a script, and of a word
_MOST_HEREDOCS, _LONGEST = 64, 1024  # and characters of a variable
_BEFORE = ("env", "nohup", "exec", "time", "export", "declare", "-x")
_LAUNCHERS = ("python", "python3", "torchrun", "accelerate")
_SHOWS = ("echo", "printf")
_FILES = frozenset({"config", "accelerate_config"})  # options that name files of options
# Options whose values decide no memory, so that their variables may be unknown.
_FREE = ("output_dir", "dataset", "val_dataset", "run_name", "system", "model_name",
         "model_author", "logging_dir", "report_to", "hub_model_id", "dataset_name")  # fmt: skip
_OF_PLACES = re.compile("machine_rank|node_rank|main_process_.*|master_.*|rdzv_.*|standalone|m|"
                        "config_file|num_processes|num_machines|nproc_per_node|nnodes")  # fmt: skip


def read_script(file: Path) -> tuple[str, SourceConfig]:
    """Return the tool of the only training that a script starts, and its options.

    Raises:
        UsageError: If it starts none or several, or one that cannot be read.
    """
    text = read_text_file(file, _MOST)
    if text.count("<<") > _MOST_HEREDOCS:
        raise UsageError(f"{file}: more than {_MOST_HEREDOCS} here-documents")
    text = _HEREDOC.sub(r"\3", text)
    known: dict[str, str | None] = {}  # None: assigned several times
    found = []
    for raw in _commands(text, file):
        words = [_text(each, known) for each in raw]
        own: dict[str, str | None] = {}
        while words and (words[0] in _BEFORE or _ASSIGNMENT.fullmatch(words[0])):
            if match := _ASSIGNMENT.fullmatch(words.pop(0)):
                own[match[1]] = match[2] if len(match[2]) <= _LONGEST else None
        if not words:
            known |= {k: v if known.get(k, v) == v else None for k, v in own.items()}
        elif (command := _training_of(words, file)) is not None:
            found.append((*command, {**known, **own}))
    if len(found) != 1:
        commands = "`swift sft`, `swift pt` or `trl sft`"
        raise UsageError(f"{file}: starts {len(found)} trainings by {commands}; expected one")
    tool, launcher, options, variables = found[0]
    content = dict(_options(options, file))
    for key in _FILES.intersection(content):
        raise UsageError(f"{file}: {key}: {content[key]}: not read; write its options")
    content |= _launch(file, launcher, variables)
    return tool, SourceConfig(file, content)


def _commands(text: str, file: Path) -> Iterator[list[str]]:
    """Yield each command as a list of words, as they are written."""
    words: list[str] = []
    start = 0
    while start < len(text):
        match = _TOKEN.match(text, start)
        if match is None:
            line = text.count("\n", 0, start) + 1
            raise UsageError(f"{file}, line {line}: not read; expected a quotation that ends")
        if match.lastgroup == "word":
            words.append(match[0])
        elif match.lastgroup == "end":
            yield words
            words = []
        start = match.end()
    yield words


def _text(word: str, known: dict[str, str | None]) -> str:
    """Return the text of a word, with `$` where it depends on what is not known."""
    parts = []
    for piece in re.findall(rf"{_PIECE}|\#", word, re.DOTALL):
        if piece[0] == "'":
            parts.append(piece[1:-1])
        elif piece[0] == '"':
            parts.append(re.sub(r'\\(["\\$`])', r"\1", _expanded(piece[1:-1], known)))
        else:
            parts.append(piece[1:] if piece[0] == "\\" else piece)
    whole = "".join(parts)
    if "'" not in word and '"' not in word:
        whole = _expanded(whole, known)
    return whole


def _expanded(text: str, known: dict[str, str | None]) -> str:
    if len(text) > _MOST // _LONGEST:  # few characters must not become very many
        return text

    def value_of(match: re.Match[str]) -> str:
        value = known.get(match[1] or match[2], match[3])
        return match[0] if value is None else value

    def number(match: re.Match[str]) -> str:
        first, *others = re.findall(r"[*/]?[ ]*\d+", match[1])
        return str(reduce(_computed, others, int(first)))

    return _NUMBER.sub(number, _VARIABLE.sub(value_of, text))


def _computed(value: int, operation: str) -> int:
    number = int(operation[1:])
    return value * number if operation[0] == "*" else value // max(1, number)


def _training_of(words: list[str], file: Path) -> tuple[str, list[str], list[str]] | None:
    """Return the tool, the words before its command, and its options."""
    for index, word in enumerate(words):
        name = word.rpartition("/")[2]
        if name in _TOOLS and words[index + 1 : index + 2] in (["sft"], ["pt"]):
            tool, options = _TOOLS[name], words[index + 2 :]
        elif program := _PROGRAM.fullmatch(word):
            tool, options = _TOOLS[program[1]], words[index + 1 :]
        else:
            continue
        launcher = words[:index]
        first = launcher[0].rpartition("/")[2] if launcher else ""
        if first in _SHOWS:
            return None
        if first and first not in _LAUNCHERS:
            raise UsageError(f"{file}: {first}: not read; expected torchrun or accelerate")
        return tool, launcher, options
    return None


def _options(words: Sequence[str], file: Path) -> Iterator[tuple[str, Any]]:
    """Yield names and values: true without one, a list of several, or what JSON describes."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            groups.append([name.replace("-", "_"), *([value] if equals else [])])
        elif groups:
            groups[-1].append(word)
        else:
            raise UsageError(f"{file}: {word[:80]}: not read; expected options that begin with --")
    for name, *values in groups:
        unknown = [each for each in values if "$" in each or "`" in each]
        if unknown and not (name in _FREE and unknown == values[:1]):
            raise UsageError(f"{file}: {name}: {unknown[0][:80]}: not known; write its value")
        if len(values) == 1 and values[0].startswith("{") and name not in _FREE:
            yield name, parse_json(values[0], dict[str, Any], f"{file}: {name}")
        else:
            yield name, values[0] if len(values) == 1 else values or "true"


def _launch(file: Path, words: list[str], variables: dict[str, str | None]) -> dict[str, Any]:
    """Return what launches the training, with accelerate's configuration."""
    start = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    options = dict(_options([each for each in words[start:] if each != "-m"], file))
    for name in options:
        if not _OF_PLACES.fullmatch(name):
            raise UsageError(f"{file}: {words[0]} --{name}: not read; expected a --config_file")
    about: dict[str, Any] = {}
    if (path := options.get("config_file")) is not None:
        places = (each / path for each in (Path(), *file.parents))
        found = next((each for each in places if len(path) < 255 and each.is_file()), None)
        if found is None:
            raise UsageError(f"{file}: config_file: {path[:80]}: not found")
        is_json = found.suffix == ".json"
        content = read_json(found, dict[str, Any]) if is_json else read_yaml(found)
        about[ACCELERATE] = SourceConfig(found, content).content
    known = {name: f"${name}" if text is None else text for name, text in variables.items()}
    devices = known.get("CUDA_VISIBLE_DEVICES")
    if devices is not None and "$" in devices:
        raise UsageError(f"{file}: CUDA_VISIBLE_DEVICES={devices[:80]}: not known; write its value")
    about[LAUNCH] = {
        "nproc_per_node": options.get("nproc_per_node", known.get("NPROC_PER_NODE")),
        "nnodes": options.get("nnodes", known.get("NNODES")),
        "program": words[0] if words else None,
        "num_processes": options.get("num_processes"),
        "num_machines": options.get("num_machines"),
        "devices": None if devices is None else len(devices.split(",")),
    }
    return about


def read_launch(found: Translation, *, splits: bool) -> bool:
    """Translate the ranks and accelerate's FSDP, and return whether ranks shard by that.

    Raises:
        UsageError: If one process uses several devices, as `splits` says the tool does; or if
            accelerate launches otherwise.
    """
    source = found.source
    nodes = source.positive(f"{LAUNCH}.nnodes", f"{LAUNCH}.num_machines",
                            f"{ACCELERATE}.num_machines") or 1  # fmt: skip
    devices = source.positive(f"{LAUNCH}.devices")
    ranks = source.positive(f"{LAUNCH}.nproc_per_node")
    processes = source.positive(f"{LAUNCH}.num_processes", f"{ACCELERATE}.num_processes")
    if ranks is None and processes is not None:
        ranks = max(1, processes // nodes)
    if splits and devices is not None and devices > (ranks or 1):
        why = "which fsdpctl does not; set NPROC_PER_NODE"
        raise UsageError(f"{source.file}: one process splits the layers over several GPUs, {why}")
    alone = 1 if splits and not source.text(f"{LAUNCH}.program") else None
    if (ranks := ranks or devices or alone) is not None:
        shown = SourceKey("(ranks)", f"{ranks} x {nodes}", ())
        found.map(shown, f"launch.nproc_per_node={ranks}", f"launch.nnodes={nodes}")
    kind = source.take(f"{ACCELERATE}.distributed_type")
    if kind is None or kind.text.upper() in ("NO", "MULTI_GPU"):
        return False
    if kind.text.upper() != "FSDP":
        raise source.error(kind, "expected FSDP, MULTI_GPU or NO")
    section = f"{ACCELERATE}.fsdp_config"
    version = source.text(f"{section}.fsdp_version", default="1")
    read_fsdp(found, section, version=version, reentrant=splits)  # as ms-swift sets it
    return True
