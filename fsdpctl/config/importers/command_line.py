"""The command line of a training in a shell script, and what launches it. Nothing is executed."""

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fsdpctl.config.importers.shared import read_fsdp
from fsdpctl.config.importers.source_config import SourceConfig, SourceKey
from fsdpctl.config.importers.translation import Translation
from fsdpctl.errors import UsageError
from fsdpctl.io.files import read_text_file
from fsdpctl.io.untrusted import MIB, parse_json, read_json, read_yaml

LAUNCH, ACCELERATE = "launch", "accelerate"  # keys of a script's source that are not its options
_TOOLS = {"swift": "ms-swift", "trl": "TRL"}
_PROGRAM = re.compile(r"(?:.*/)?(swift|trl)/(?:cli|scripts)/(?:sft|pt)\.py")
_ASSIGNMENT = re.compile(r"\w+=.*", re.DOTALL)
_VARIABLE = re.compile(r"\$\{?(\w+)(?::-([^}]*))?\}?")
_DIVISION = re.compile(r"\$\(expr ((?:\d+ / )*\d+)\)|\$\(\(((?:\d+ ?/ ?)*\d+)\)\)")


def read_script(file: Path) -> tuple[str, SourceConfig]:
    """Return the tool of the only training that a script starts, and its options.

    Variables that the script sets are replaced, and quotients of numbers computed.

    Raises:
        UsageError: If it starts none or several, or cannot be read.
    """
    text = read_text_file(file, MIB).replace("\\\r\n", " ").replace("\\\n", " ")
    variables: dict[str, str] = {}
    found = []
    for line in text.splitlines():
        try:
            words = shlex.split(_replaced(line, variables), comments=True)
        except ValueError as error:
            raise UsageError(f"{file}: {line[:80]}: {str(error).lower()}") from None
        words = words[1:] if words[:1] == ["export"] else words
        for word in words:
            if not _ASSIGNMENT.fullmatch(word):
                break
            name, _, value = word.partition("=")
            variables[name] = value
        if (command := _training_of(words)) is not None:
            found.append((*command, dict(variables)))
    if len(found) != 1:
        commands = "`swift sft`, `swift pt` or `trl sft`"
        raise UsageError(f"{file}: starts {len(found)} trainings by {commands}; expected one")
    tool, launcher, options, variables = found[0]
    content = dict(_options(options, file)) | _launch(file, launcher, variables)
    return tool, SourceConfig(file, content)


def _replaced(line: str, variables: dict[str, str]) -> str:
    def value_of(match: re.Match[str]) -> str:
        return variables.get(match[1], match[2] if match[2] is not None else match[0])

    def quotient(match: re.Match[str]) -> str:
        first, *others = map(int, re.findall(r"\d+", match[0]))
        for each in others:
            first //= max(1, each)
        return str(first)

    return _DIVISION.sub(quotient, _VARIABLE.sub(value_of, line))


def _training_of(words: Sequence[str]) -> tuple[str, Sequence[str], Sequence[str]] | None:
    """Return the tool, the words before its command, and its options."""
    for index, word in enumerate(words):
        if word in _TOOLS and words[index + 1 : index + 2] in (["sft"], ["pt"]):
            return _TOOLS[word], words[:index], words[index + 2 :]
        if program := _PROGRAM.fullmatch(word):
            return _TOOLS[program[1]], words[:index], words[index + 1 :]
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
    for name, *values in groups:
        if len(values) == 1 and values[0].startswith("{"):
            yield name, parse_json(values[0], dict[str, Any], f"{file}: {name}")
        else:
            yield name, values[0] if len(values) == 1 else values or "true"


def _launch(file: Path, words: Sequence[str], variables: dict[str, str]) -> dict[str, Any]:
    """Return what launches the training, and accelerate's configuration if its file exists."""
    options = dict(_options(words, file))
    path = str(options.get("config_file", ""))
    places = (each / path for each in (Path(), *file.parents))
    found = next((each for each in places if path and each.is_file()), None)
    about: dict[str, Any] = {}
    if found is not None:
        is_json = found.suffix == ".json"
        about[ACCELERATE] = read_json(found, dict[str, Any]) if is_json else read_yaml(found)
    about[LAUNCH] = {
        "nproc_per_node": options.get("nproc_per_node", variables.get("NPROC_PER_NODE")),
        "nnodes": options.get("nnodes", variables.get("NNODES")),
        "num_processes": options.get("num_processes"),
        "config_file": path if found is None else None,
        "devices": len(variables.get("CUDA_VISIBLE_DEVICES", "").split(",")),
    }
    return about


def read_launch(found: Translation) -> bool:
    """Translate the ranks and accelerate's FSDP, and return whether that decides the strategy."""
    source = found.source
    if lost := source.take(f"{LAUNCH}.config_file"):
        text = f"{lost.key}: {lost.text}: not found; add strategy=full_shard and cluster=NAME"
        found.missing.append(("strategy", text))
        return True
    nodes = source.positive(f"{LAUNCH}.nnodes") or 1
    devices = source.positive(f"{LAUNCH}.devices") or 1
    ranks = source.positive(f"{LAUNCH}.nproc_per_node")
    processes = source.positive(f"{LAUNCH}.num_processes", f"{ACCELERATE}.num_processes")
    if ranks is None and processes is not None:
        ranks = max(1, processes // nodes)
    if ranks is None and devices > 1:
        why = "which fsdpctl does not; set NPROC_PER_NODE"
        raise UsageError(f"{source.file}: one process splits the layers over {devices} GPUs, {why}")
    shown = SourceKey("(ranks)", f"{ranks or 1} x {nodes}", ())
    found.map(shown, f"launch.nproc_per_node={ranks or 1}", f"launch.nnodes={nodes}")
    if source.text(f"{ACCELERATE}.distributed_type").upper() != "FSDP":
        return False
    section = f"{ACCELERATE}.fsdp_config"
    read_fsdp(found, section, version=source.text(f"{section}.fsdp_version", default="1"))
    return True
