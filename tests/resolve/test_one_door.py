"""Every command plans the same run, and refuses others with the same message."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast
from unittest import mock

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

import fsdpctl
from docs.examples.regression import Measurements, Model, squared_error
from fsdpctl.config.schema import Resolved
from fsdpctl.config.serialize import to_settings
from fsdpctl.estimate import user_module
from fsdpctl.estimate.planned_steps import engine_steps, plan_of_fullest_rank, plan_training
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.models.module_spec import module_units
from fsdpctl.plan.precision import SPLIT
from fsdpctl.run.directory import read_config
from tests.commands.run import invoke
from tests.importers import test_read as read
from tests.resolve.drawn import Drawn, combined, drawn, sized, write_files

Figures = dict[str, Any]
LENGTHS = ("train.steps", "train.epochs", "train.tokens")
# Not compared: an estimate has no module, which determines the learning rate, and shows the length
# and the paths as they are set; `compare` sets the length.
_OF_RUNS = {
    "train.run_dir", "optimizer.lr", *LENGTHS[1:], "train.global_batch_tokens", "data.path",
}  # fmt: skip
_OF_LENGTH = {*LENGTHS, "train.log_every", "lr_scheduler.warmup_steps"}
_GPUS: dict[str, Any] = {
    "is_available": True, "device_count": 8, "get_device_capability": (8, 0),
    "get_device_name": "NVIDIA A100-SXM4-80GB", "is_bf16_supported": True,
    "get_device_properties": SimpleNamespace(total_memory=80 << 30),
}  # fmt: skip


NAMED = [
    combined("text", *settings.split())
    for settings in (
        f"optimizer=muon strategy=shard_optimizer precision.master_dtype={SPLIT}",
        f"optimizer=sgd optimizer.lr=0.1 precision.master_dtype={SPLIT}",
        "strategy.offload=states strategy=no_shard launch.share_memory=false",
        "engine=fsdp2 launch.share_memory=true",
        "engine=fsdp2 strategy.offload=states",
        "engine=ddp strategy=no_shard activation_checkpointing.offload=true",
        "engine=fsdp2 model.lora.rank=2",
        "optimizer=sgd",
        "optimizer.momentum=0.9",  # also if the value is the default
        "optimizer=sgd optimizer.lr=0.1 optimizer.beta2=0.95",
        "prefetch=auto prefetch.forward=0",
        "prefetch=auto prefetch.backward=1",
        "train.global_batch_size=1",
        "train.micro_batch_size=7",
        "train.seq_len=2000 data.path=little.txt",
        "data.path=gone.txt train.seq_len=auto",
        "train.epochs=2 train.tokens=4096",
        "model.vocab_size=200 train.seq_len=auto",
    )
] + [
    combined("chats", "data.tokenizer=gone"),
    combined("chats", "data.template=gone.jinja"),
    combined("our recipe", "engine=ddp", "strategy=no_shard"),
]


class Reported(BaseException):
    """An exception with the estimate that a command begins to report."""

    def __init__(self, estimate: RunEstimate) -> None:
        self.estimate = estimate


def _report(estimate: RunEstimate) -> NoReturn:
    raise Reported(estimate)


@contextmanager
def machine(device: str) -> Iterator[None]:
    """Imitate a machine with eight GPUs, for runs that are not started."""
    with ExitStack() as stack:
        for name, value in _GPUS.items() if device == "cuda" else ():
            returns = mock.Mock(return_value=value)
            stack.enter_context(mock.patch.object(torch.cuda, name, returns))
        yield


def planned(*command: str) -> Figures | str:
    """Return the figures of a command's plan, or the message of its refusal."""
    with (
        mock.patch.object(RunEstimate, "to_dict", _report),
        mock.patch.object(RunEstimate, "shortages", property(_report)),
    ):
        try:
            code, output = invoke(*command)
        except Reported as reported:
            return figures(reported.estimate)
    assert code in {2, 4}, (command, code, output)
    return output


def figures(estimate: RunEstimate) -> Figures:
    """Return the settings of a run, without those of its cluster, and its sizes."""
    settings = to_settings(estimate.config).items()
    return {
        **{x: text for x, text in settings if x not in _OF_RUNS and not x.startswith("cluster")},
        "batches": estimate.batches,
        "tokens": estimate.tokens_per_step,
        "memory": estimate.peak_reserved,
        "verdict": estimate.verdict,
    }


def of_all_commands(case: Drawn, folder: Path) -> list[Figures | str]:
    """Return what `train`, an estimate and `compare`, if it can set the length, plan or refuse."""
    paths = {name: str(folder / name) for name in ("DIR", "adapters")}
    pairs = [each.partition("=") for each in case.settings]
    settings = [f"{name}={paths.get(text, text)}" for name, _, text in pairs]
    results = [
        planned("train", "--dry-run", *case.options, *settings),
        planned("estimate-memory", "--json", *case.options, "cluster=local", *settings),
    ]
    lengths = [each for each in settings if each.startswith(LENGTHS)]
    if len(lengths) < 2 and "train.epochs" not in str(lengths):  # epochs determine sizes of chats
        settings = [each for each in settings if each not in lengths]
        # Without alternatives, `compare` would compare strategies.
        results.append(planned("compare", *case.options, "train.log_every=9,9", *settings))
    return results


def differences(case: Drawn, folder: Path) -> list[tuple[object, ...]]:
    """Return the figures that differ between the commands."""
    results = of_all_commands(case, folder)
    if any(isinstance(each, str) for each in results):
        messages = [each if isinstance(each, str) else "accepted" for each in results]
        return [("messages", *messages)] if len({*messages}) > 1 else []
    plans = [each for each in results if isinstance(each, dict)]
    names = {name for plan in plans for name in plan}
    rows = ((x, *(plan.get(x) for plan in plans[: 2 if x in _OF_LENGTH else 3])) for x in names)
    return [row for row in rows if len({*row[1:]}) > 1]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    write_files(folder)
    return folder


@pytest.fixture(autouse=True)
def here(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    monkeypatch.setenv("HF_HUB_CACHE", str(files / "hub"))


@pytest.mark.parametrize("quarter", range(4))
def test_what_one_command_refuses_every_command_refuses_in_the_same_words(quarter, files):
    for each in NAMED[quarter::4]:
        first, *others = of_all_commands(each, files)
        assert isinstance(first, str)
        assert (each, others) == (each, [first] * len(others))


@pytest.mark.parametrize(("device", "few", "start", "stop"), [
    *(("cpu", True, start, start + 5) for start in range(0, 20, 5)),
    *(("cuda", True, start, start + 5) for start in range(20, 30, 5)),
    *(pytest.param("cpu", False, start, start + 30, marks=pytest.mark.slow) for start in (0, 30)),
    pytest.param("cuda", False, 60, 90, marks=pytest.mark.slow),
])  # fmt: skip
def test_all_commands_plan_the_run_that_starts(device, few, start, stop, files):
    with machine(device):
        for each in islice(drawn(2, few=few), start, stop):
            assert (each, differences(each, files)) == (each, [])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_what_is_selected_for_a_small_memory_is_what_starts(seed, files):
    """Exit codes agree with the verdict, and typed values stay."""
    kinds = set()
    for each in islice(sized(seed), 15):
        assert (each, differences(each, files)) == (each, [])
        plan = planned("train", "--dry-run", *each.settings)
        if isinstance(plan, str):
            continue
        typed = dict(setting.split("=") for setting in each.settings)
        for name in ("strategy", "activation_checkpointing", "prefetch"):
            assert typed.get(name, "auto") in ("auto", plan[name])
        code = 0 if plan["verdict"] == "fits" else 3
        assert invoke("train", "--dry-run", *each.settings)[0] == code
        assert invoke("estimate-memory", "--require-fit", *each.settings)[0] == code
        kinds.add((code, "auto" in typed.values()))
    assert len(kinds) > 2


# ---- scripts --------------------------------------------------------------------------------


def partly_frozen() -> Model:
    model = Model(16, 4)
    model.blocks[:2].requires_grad_(False)
    return model


WIDE = fsdpctl.Precision("float32", "float32", "float32")
BF16 = fsdpctl.Precision("bfloat16", "float32", "float32")
_OF_SCRIPT = [
    "launch.device=cpu", "train.steps=2", "train.global_batch_size=16", "optimizer.lr=1e-3",
]  # fmt: skip
ALONE = "launch.share_memory=false"
SCRIPTS: list[tuple[Callable[[], Model], int, list[str], dict[str, Any], dict[str, Any]]] = [
    (Model, 4, [], {"share_memory": True}, {}),
    (Model, 4, [ALONE, "strategy=shard_optimizer", "strategy.owner_map=matrices"],
     {"strategy": "shard_optimizer", "owner_map": "matrices"}, {}),
    (Model, 4, [ALONE, "strategy=hybrid_shard", "strategy.dp_shard_size=2"],
     {"strategy": "hybrid_shard", "dp_shard_size": 2}, {}),
    (Model, 1, ["train.micro_batch_size=4"], {}, {"num_micro_batches": 4}),
    (Model, 2, [ALONE, "train.micro_batch_size=2", "accumulation=last"], {},
     {"num_micro_batches": 4, "reduce": "last"}),
    (partly_frozen, 4, [ALONE, "strategy=shard_grad_op"], {"strategy": "shard_grad_op"}, {}),
    (Model, 4, [ALONE, "precision=bf16"], {"precision": BF16}, {}),
    (partial(Model, 16, 40), 3, [ALONE, "prefetch=backward"],
     {"prefetch": fsdpctl.Prefetch(0, 1)}, {}),
    (Model, 4, [ALONE, "strategy.offload=states"], {"offload": "states"}, {}),
    (Model, 4, ["strategy.offload=all"], {"offload": "all", "share_memory": True}, {}),
]  # fmt: skip


def started(module: Model, ranks: int, settings: list[str]) -> Resolved:
    """Return the configuration that rank 0 of a script starts with."""
    folder, size = tempfile.mkdtemp(dir="."), str(ranks)
    environment = {
        "RANK": "0", "WORLD_SIZE": size, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
    }  # fmt: skip
    settings = [*_OF_SCRIPT, f"train.run_dir={folder}/run", *settings]
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, environment))
        stack.enter_context(mock.patch("fsdpctl.launch.run._trained_tasks", []))
        reached = mock.Mock(return_value=HashStore())
        stack.enter_context(mock.patch("fsdpctl.launch.addresses.open_store", reached))
        for each in ("handshake.Handshake.invite", "watchdog.watch_as_rank"):
            stack.enter_context(mock.patch(f"fsdpctl.launch.{each}"))
        stack.enter_context(mock.patch("fsdpctl.training.worker.become_rank"))
        data = Measurements(64, seed=1)
        fsdpctl.train(module=module, loss=squared_error, data=data, settings=settings)
    return cast("Resolved", read_config(Path(folder, "run")))


@pytest.mark.parametrize("case", SCRIPTS, ids=lambda case: " ".join(case[2]))
def test_the_estimate_of_a_module_replays_what_its_script_begins(case):
    make, ranks, settings, sharding, assumed = case
    config = started(make(), ranks, settings)
    passes, samples = config.accumulation.steps, config.train.micro_batch_size
    assert passes is not None
    assert samples is not None
    with mock.patch.object(user_module, "engine_steps", wraps=engine_steps) as steps:
        estimate = fsdpctl.estimate_memory(
            make,
            lambda: (torch.empty(samples, 2), torch.empty(samples, 1)),
            world_size=ranks,
            loss_fn=torch.sum,
            sharding=fsdpctl.Sharding(**{"precision": WIDE, **sharding}),
            assumed=fsdpctl.Assumed("cpu", **assumed),
        )
    (_, _, units, replayed, _), _ = steps.call_args
    assert units == module_units(make(), None)
    assert replayed == plan_of_fullest_rank(
        config.engine.name, plan_training(config, units, passes)
    )
    on_host = "offload" in sharding
    states = estimate.host_states if on_host else estimate.breakdown["optimizer_states"]
    assert states >= replayed.states_bytes > 0


# ---- files of other tools -------------------------------------------------------------------

TINY = [
    "model=llama_tiny", "model.vocab_size=1000", "model.max_seq_len=4096", "optimizer.lr=1e-3",
]  # fmt: skip
OF_TRL = ["strategy=ddp", "data.train_on=all", "data.path=chats.jsonl"]
LORA = "adapter: lora\nlora_r: 4\nlora_alpha: 8\nlora_target_linear: true"
FROM: list[tuple[str, list[str]]] = [
    *((read.AXOLOTL + lines, TINY) for lines in (
        "bf16: false", LORA, "batch_size: 8", "gradient_checkpointing: offload", "optimizer: sgd",
        "dp_replicate_size: 4\ndp_shard_size: 2", "deepspeed: {zero_optimization: {stage: 1}}",
        f"{read.SHARES}tiled_mlp: true", "optimizer: adamw_8bit", read.PLUGIN)),
    (read.UNSHARDED + "optimizer: muon", TINY),
    *((f"model_name_or_path: gpt2\n{line}", OF_TRL) for line in (
        "loss_type: nll", "label_smoothing_factor: 0.1")),
    (read.DEGREES, ["model=llama_tiny"]),
    ("compute_environment: LOCAL_MACHINE\nuse_cpu: true", ["model=llama_tiny"]),
    *(((read.FILES / name).read_text(), words.split()) for name, words in {
        "accelerate-deepspeed.yaml": "model=llama_tiny", "axolotl-qlora.yml": "",
        "accelerate-fsdp.yaml": "model=llama_tiny", "axolotl-full.yaml": "",
        "trl-sft.yaml": "data.train_on=all"}.items()),
]  # fmt: skip


@pytest.mark.parametrize("cases", [
    pytest.param(FROM[:2], id="two"), pytest.param(FROM[2:], id="rest", marks=pytest.mark.slow),
])  # fmt: skip
def test_the_estimate_of_a_file_is_that_of_its_recipe(cases, tmp_path):
    file, recipe = tmp_path / "file.yaml", tmp_path / "recipe.yaml"
    estimate, program = ("estimate-memory", "--json"), "engine.program=fsdpctl"
    for text, settings in cases:
        file.write_text(f"{text}\n")
        recipe.unlink(missing_ok=True)
        typed = [*settings, "cluster=h100"]
        plan = planned(*estimate, "--from", str(file), program, *typed)
        assert isinstance(plan, dict), text
        assert invoke("convert", str(file), *typed, "--out", str(recipe))[0] == 0
        assert (text, planned(*estimate, "--recipe", str(recipe), program)) == (text, plan)
