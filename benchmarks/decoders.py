"""Try a tiny model of every causal decoder family of transformers with the commands.

    python -m benchmarks.decoders --out benchmarks/results/decoders.json
    python -m benchmarks.decoders --out benchmarks/results/decoders.json --only git doge

A model is a directory that transformers writes, with a tokenizer and a chat template. Its loss,
gradients and exported bytes are compared with those of transformers in one process. Then
`estimate-memory`, `train` on two ranks with the self-check, `evaluate` and `consolidate-checkpoint`
run on the model, and transformers loads the result. `--only` repeats families and keeps the rest.
"""

import gc
import json
import multiprocessing
import os
import re
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", NO_COLOR="1", COLUMNS="400")

import torch
import transformers as hf
from safetensors.torch import load_file
from transformers.models.auto import modeling_auto

from benchmarks.report import arguments, write_report
from fsdpctl.checkpoint.hub_weights import under_hub_names
from fsdpctl.checkpoint.manifest import BUFFER, PARAMETER, tensor_key
from fsdpctl.checkpoint.pretrained import open_weights
from fsdpctl.checkpoint.tensor_source import TensorSource
from fsdpctl.config.compose import compose_config
from fsdpctl.errors import FsdpctlError
from fsdpctl.models.build_model import build_base_model
from fsdpctl.models.decoder_check import attention_for, check_decoder
from fsdpctl.resolve.run_plan import stored_config
from fsdpctl.training.assemble import make_module
from tests.models.decoders import (
    batches_of,
    fill,
    load_decoder,
    our_loss,
    their_loss,
    tiny_config,
    whole,
)
from tests.training.chats import make_chat_model, make_chats

_LIMIT = 300.0  # seconds of a command
_IMPORTED = (  # before forks, which save the time of these imports
    "fsdpctl.commands.app", "fsdpctl.commands.estimate", "fsdpctl.commands.train",
    "fsdpctl.commands.checkpoint", "fsdpctl.launch.prepare_run", "fsdpctl.launch.run",
    "fsdpctl.training.worker", "fsdpctl.commands.evaluate", "fsdpctl.checkpoint.consolidate",
    "torch._dynamo",
)  # fmt: skip
_SETTINGS = (
    "model=hf", "model.path=model", "data=chat", "data.path=chats.jsonl",
    "train.seq_len=48", "launch.device=cpu",
)  # fmt: skip
_TRAINING = (
    "train.global_batch_size=4", "train.steps=3", "train.sample_tokens=4", "train.run_dir=run",
    "train.self_check=auto", "data.val_fraction=0.2", "precision=fp32", "launch=env",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tried:
    """The results of a family."""

    family: str  # model_type
    model: str = ""  # the class of transformers
    problem: str = ""  # why the family is not supported, or could not be tried
    is_tried: bool = True  # whether a tiny model could be built
    has_experts: bool = False
    packs: bool = False  # whether documents in a packed sequence do not attend to one another
    loss_difference: float = 0.0  # from transformers', in nats per token
    gradient_difference: float = 0.0  # largest, relative to the largest gradient of the model
    exports_equal: bool = False  # whether exported bytes equal the bytes that were read
    # The commands that failed, with the problem. If the family is not supported, only commands
    # that ended without a result or an error message.
    failed: Mapping[str, str] = field(default_factory=dict)


class Ended(NamedTuple):
    """The end of a process; of several processes, of the first that failed."""

    code: int  # exit status; negative if killed after the limit
    output: str

    @property
    def problem(self) -> str:
        """Return the exit status and the last line; empty if the process succeeded."""
        if self.code == 0:
            return ""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("fsdpctl: ")]
        kind = "traceback" if "Traceback" in self.output else f"exit {self.code}"
        return f"{kind}: {[*lines, *errors][-1] if lines else 'no output'}"[:300]


def call(function: Callable[[], None], folder: Path, *environments: Mapping[str, str]) -> Ended:
    """Call a function in `folder`, in a fork for each environment, which saves imports."""
    context = multiprocessing.get_context("fork")
    logs = [folder / f"output-{number}" for number in range(max(1, len(environments)))]
    forks = [
        context.Process(target=_in_fork, args=(function, log, each))
        for log, each in zip(logs, environments or [{}], strict=True)
    ]
    for fork in forks:
        fork.start()
    until = time.monotonic() + _LIMIT
    for fork in forks:
        fork.join(max(0.0, until - time.monotonic()))
        fork.kill()
        fork.join()
    output = "\n".join(log.read_text(errors="replace") for log in logs)
    return Ended(next((fork.exitcode for fork in forks if fork.exitcode), 0), output)


def _in_fork(function: Callable[[], None], log: Path, environment: Mapping[str, str]) -> None:
    os.chdir(log.parent)
    os.environ.update(environment)
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    function()


def command(args: Sequence[str], folder: Path, *, ranks: int = 0) -> Ended:
    """Run a command of fsdpctl in one process, or on `ranks` ranks, as torchrun does."""

    def run() -> None:
        sys.argv = ["fsdpctl", *args]
        import_module("fsdpctl.__main__").main()

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    each = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    each["LOCAL_WORLD_SIZE"] = each["WORLD_SIZE"]
    environments = [{**each, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    return call(run, folder, *environments)


def tried(family: str, name: str, folder: Path) -> Tried:
    """Try a family, by a comparison with transformers and by commands, in forks."""
    notes = folder / "tried.json"
    failure = call(partial(_make, family, folder), folder)
    if failure.code:
        return Tried(family, name, _line(failure.problem), is_tried=False)
    compared = call(partial(_compare, family, name, folder, notes), folder)
    if notes.exists():
        content = Tried(**json.loads(notes.read_text()))
    else:
        content = Tried(family, name, failed={"module": _line(compared.problem)})
    ended = {"estimate-memory": command(("estimate-memory", *_SETTINGS), folder)}
    ended["train"] = command(("train", *_SETTINGS, *_TRAINING), folder, ranks=2)
    if content.problem:
        failed = {each: _line(end.problem) for each, end in ended.items() if not _answered(end)}
        return replace(content, failed=failed)
    if not ended["train"].code:
        ended["evaluate"] = command(("evaluate", "run", "launch.device=cpu"), folder)
        export = ("consolidate-checkpoint", "run", "exported")
        ended["consolidate-checkpoint"] = command(export, folder)
        ended["transformers"] = call(partial(_load, folder / "exported"), folder)
    failed = {each: _line(end.problem) for each, end in ended.items() if end.code}
    return replace(content, failed={**content.failed, **failed})


def _answered(ended: Ended) -> bool:
    """Return whether a command ended with a result or an error message."""
    return ended.code in (0, 1, 2, 4) and "Traceback" not in ended.output


def _make(family: str, folder: Path) -> None:
    _silence()
    # The tiny Flint has no router, and its auxiliary loss in transformers fails without one.
    routes = family != "flint" and hasattr(tiny_config(family), "output_router_logits")
    settings = {"output_router_logits": True} if routes else {}
    make_chat_model(folder / "model", family, **settings)
    make_chats(folder / "chats.jsonl", 20)


def _load(folder: Path) -> None:
    _silence()
    make: Any = hf.AutoModelForCausalLM
    _, options = make.from_pretrained(folder, output_loading_info=True)
    missing = {name: result for name, result in options.items() if result}
    assert not missing, missing
    hf.AutoTokenizer.from_pretrained(folder)


def _compare(family: str, name: str, folder: Path, notes: Path) -> None:
    """Write the results of a family to `notes`."""
    _silence()
    notes.write_text(json.dumps(asdict(_compared(family, name, folder / "model"))))


def _compared(family: str, name: str, folder: Path) -> Tried:
    """Compare a family with transformers.

    Raises:
        Exception: If a step fails that succeeds in transformers.
    """
    theirs = load_decoder(folder)
    try:
        config = compose_config(["model=hf", f"model.path={folder}"]).config
        packs = check_decoder(config.model).isolates_documents
        config = stored_config(config.changed({"model.attention": attention_for(config.model)}))
        weights = open_weights(config.model)
        build_base_model(config.model)
    except FsdpctlError as error:
        return Tried(family, name, _line(str(error)))
    module = make_module(config)
    fill(module, weights)
    tokens = batches_of(1, 1)[0][0][0]
    loss, wanted = our_loss(module.train(False), tokens), their_loss(theirs, tokens)
    loss.backward()
    wanted.backward()
    return Tried(
        family,
        type(theirs).__name__,
        has_experts=any(p.ndim == 3 and "expert" in n for n, p in theirs.named_parameters()),
        packs=packs,
        loss_difference=abs(loss.item() - wanted.item()),
        gradient_difference=_gradient_difference(module, theirs),
        exports_equal=_same_bytes(under_hub_names(weights, config.model), folder),
    )


def _silence() -> None:
    warnings.simplefilter("ignore")
    logging: Any = hf.utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _line(text: str) -> str:
    """Return the first line of a message, with files instead of paths."""
    return re.sub(r"/\S*/", "", text.strip().partition("\n")[0])


def _gradient_difference(module: torch.nn.Module, theirs: Any) -> float:
    """Return the largest difference, relative to the largest gradient of the model."""
    wanted = {name: param.grad for name, param in theirs.named_parameters()}
    largest = max(float(each.abs().max()) for each in wanted.values() if each is not None)
    differences = [0.0]
    for name, param in module.named_parameters():
        ours, other = param.grad, wanted[name]
        zero = torch.zeros_like(param)
        difference = (zero if ours is None else ours) - (zero if other is None else other)
        differences.append(float(difference.abs().max()) / largest)
    return max(differences)


def _same_bytes(exported: TensorSource, folder: Path) -> bool:
    """Return whether the exported weights have the names and bytes of the files in `folder`."""
    files: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        files.update(load_file(file))
    result = {
        name: whole(exported, tensor_key(kind, name))
        for kind in (PARAMETER, BUFFER)
        for name in exported.names(kind)
    }
    return result.keys() == files.keys() and all(
        torch.equal(result[name], files[name]) for name in files
    )


def main() -> None:
    """Try families, and write the results after each family."""
    known: dict[str, str] = dict(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    options = arguments(only=())  # families to repeat
    for name in _IMPORTED:
        import_module(name)
    compose_config([])
    gc.freeze()
    results: dict[str, Any] = {}
    if options.only and options.out and options.out.exists():
        before = json.loads(options.out.read_text())["results"]
        results = {each["family"]: each for each in before if each["family"] in known}
    for family in options.only or sorted(known):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
            result = tried(family, known[family], Path(folder))
        print(result, flush=True)
        results[family] = asdict(result)
        in_order = [results[each] for each in sorted(results)]
        write_report(options.out, "decoders", in_order, transformers=hf.__version__)


if __name__ == "__main__":
    main()
