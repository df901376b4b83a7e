"""Adapters over a base in NF4: losses of one process, and the same bytes on any number of ranks."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fsdpctl.checkpoint.initial_weights import initial_weights
from fsdpctl.checkpoint.load import load_weights
from fsdpctl.config.compose import compose_config
from fsdpctl.estimate.estimator import Estimator
from fsdpctl.models.build_model import build_model, initialize_parameter
from fsdpctl.models.quantized import NF4, quant_format_of, quantized_shapes
from fsdpctl.plan.schedule import EventKind
from fsdpctl.resolve.launchers import ESTIMATE_ROLE
from fsdpctl.resolve.machine import assign_ranks
from fsdpctl.resolve.prepare import prepare
from fsdpctl.resolve.run_plan import make_run_plan, stored_config
from fsdpctl.training.assemble import make_model
from tests.commands.run import invoke
from tests.distributed import distributed
from tests.engine.events import recording
from tests.matrix import fast
from tests.models.families import save_model, tokens
from tests.models.test_host_memory import MIB, peak_bytes, save_large_model
from tests.training.ranks import resolved
from tests.training.test_lora import lora_args, losses, losses_of_peft, newest, peft, run

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

FOUR_BITS = "model.base_dtype=nf4"


def dequantized_base(typed: list[str], folder: Path) -> Path:
    """Write a base whose matrices have the dequantized values of training; return its folder."""
    model = build_model(resolved(typed).model)
    shapes, packing = quantized_shapes(model), quant_format_of(model)
    assert packing is not None
    shutil.copytree(folder / "base", folder / "four bits" / "base")
    file = folder / "four bits" / "base" / "model.safetensors"
    weights = load_file(file)
    assert shapes
    for name, shape in shapes.items():
        stored = next(each for each in weights if name.endswith(each))  # stored without the prefix
        packed = packing.quantize(weights[stored])
        weights[stored] = packing.dequantize(packed, shape, torch.float32)
    save_file(weights, file, {"format": "pt"})
    return folder / "four bits"


@pytest.mark.slow
@pytest.mark.parametrize(("family", "ranks", "more"), [
    ("llama", 1, []), ("llama", 2, ["accumulation=last", "accumulation.steps=2"]),
    ("llama", 3, ["model.lora.rslora=true", "train.loss_chunk_tokens=10"]),
    ("gpt2", 2, ["strategy=shard_optimizer"]),
    ("qwen3 tied", 3, ["strategy=shard_grad_op", "activation_checkpointing=full"]),
    ("llama", 2, ["model=hf", "activation_checkpointing=selective"]),
    ("llama", 2, ["model.base_dtype=int8"]), ("llama", 2, ["model.base_dtype=float32"]),
    ("gpt2", 3, ["model.base_dtype=int8", "strategy=shard_optimizer"]),
])  # fmt: skip
def test_losses_are_those_of_peft_on_the_dequantized_base(tmp_path, family, ranks, more):
    typed = lora_args(tmp_path, ranks, FOUR_BITS, *more, family=family)
    expected = losses_of_peft(resolved(typed), dequantized_base(typed, tmp_path))
    run(typed, ranks, tmp_path / "state")
    assert losses(tmp_path) == pytest.approx(expected, abs=1e-5)
    assert expected[-1] < expected[0] - 0.1
    is_rounded = abs(losses_of_peft(resolved(typed), tmp_path)[0] - expected[0]) > 1e-4
    assert is_rounded == ("model.base_dtype=float32" not in more)


@pytest.mark.parametrize("world_size", fast(2, slow=[1, 3]))
@distributed()
def test_a_unit_is_sent_as_its_bytes_which_are_the_same_on_any_number_of_ranks(rank, world_size):
    """The quantized random weights equal those that one process quantizes."""
    more = [f"launch.nproc_per_node={world_size}", "launch.device=cpu", "model.vocab_size=64"]
    composed = compose_config(["model.lora.rank=2", FOUR_BITS, *more])
    config = stored_config(assign_ranks(composed.config))
    model = make_model(config, torch.device("cpu"))
    shapes = quantized_shapes(model.module)
    with recording(model) as events:
        model(torch.arange(32).view(2, 16), torch.arange(32).view(2, 16), None)
    gathered = {each.unit: each.nbytes for each in events if each.kind is EventKind.GATHER}
    state = model.state_dict()
    for block in (name for name in gathered if name.startswith("model.layers.")):
        in_unit = {name: shape for name, shape in shapes.items() if name.startswith(f"{block}.")}
        packed = sum(NF4.num_bytes(rows * columns) for rows, columns in in_unit.values())
        assert packed == pytest.approx(0.5161 * sum(a * b for a, b in in_unit.values()), rel=1e-3)
        rest = [
            value.numel()
            for name, value in state.items()
            if name.startswith(f"{block}.") and name not in in_unit
        ]
        padding = 64 * (len(rest) + len(in_unit) + 3 * world_size)  # most elements of padding
        assert 0 <= gathered[block] - packed - 4 * sum(rest) <= 4 * padding
    for name, shape in shapes.items():
        whole = torch.empty(shape)
        initialize_parameter(name, whole, seed=config.train.seed, config=config.model)
        assert torch.equal(state[name], NF4.quantize(whole))


def test_weights_of_a_file_are_quantized_when_they_are_loaded(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    args = ["model=hf", f"model.path={tmp_path}", "model.lora.rank=2", FOUR_BITS]
    config = stored_config(compose_config(args).config)
    model = make_model(config, torch.device("cpu"), empty=True)
    load_weights(initial_weights(config.model, model.module, 0), model)
    state, stored = model.state_dict(), load_file(tmp_path / "model.safetensors")
    shapes = quantized_shapes(model.module)
    assert shapes
    for name in shapes:
        (whole,) = (values for key, values in stored.items() if name.endswith(key))
        assert torch.equal(state[name], NF4.quantize(whole)), name


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two ranks."""
    folder = tmp_path_factory.mktemp("nf4")
    run(lora_args(folder, 2, FOUR_BITS), 2, folder / "state")
    return folder


@pytest.mark.slow
def test_checkpoints_leave_the_base_out_unless_it_was_drawn(tmp_path, trained):
    reader = newest(trained)
    assert all("lora_" in key for key in reader.manifest.tensors)
    typed = [
        each
        for each in lora_args(tmp_path, 2, FOUR_BITS, "train.steps=3", "model.vocab_size=320")
        if not each.startswith(("model=", "model.path"))
    ]
    run(typed, 2, tmp_path / "state")
    reader = newest(tmp_path)
    assert {reader.info(key).dtype for key in reader.manifest.tensors} == {"F32", "U8"}
    prepared = prepare(compose_config(typed), ESTIMATE_ROLE)
    estimate = Estimator().estimate(make_run_plan(prepared.config))
    stored = sum(reader.info(key).nbytes for key in reader.manifest.tensors)
    assert stored == estimate.checkpoint_bytes
    more = [each for each in typed if not each.startswith("train.run_dir")]
    more += ["model=hf", f"model.path={tmp_path / 'run'}", f"train.run_dir={tmp_path / 'second'}"]
    dropped = ("model.lora", FOUR_BITS, "model.vocab_size", "optimizer.lr")
    more = [each for each in more if not each.startswith(dropped)]
    after = run([*more, "optimizer.lr=0"], 2, tmp_path / "after")
    before = torch.load(tmp_path / "state")
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_export_is_the_model_that_was_trained(tmp_path, trained, family):
    """The merged export equals the trained model; PEFT opens the adapters over another base."""
    folder = trained if family == "llama" else tmp_path
    if family != "llama":
        run(lora_args(folder, 2, FOUR_BITS, family=family), 2, folder / "state")
    source, typed = str(folder / "run"), lora_args(folder, 2, FOUR_BITS, family=family)
    for name, *options in (("adapters", "--format", "peft"), ("merged", "--merge")):
        code, out = invoke("consolidate-checkpoint", source, str(tmp_path / name), *options)
        assert code == 0, out
    assert f"NF4 weights that they were trained with; the weights in {folder}/base differ" in out
    base_dir = dequantized_base(typed, folder) / "base"
    base = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        assert (merged(tokens()).logits - adapted(tokens()).logits).abs().max() <= 1e-5
    figures = []
    for source in (folder / "run", tmp_path / "merged"):
        more = ["data=text", f"data.path={folder / 'words.txt'}", "train.seq_len=16"]
        more += ["data.val_fraction=0", "data.tokenizer=bytes"]
        code, out = invoke("evaluate", str(source), *(more if source.name == "merged" else []))
        assert code == 0, out
        figures.append(float(out.split("loss ")[1].split()[0]))
    assert figures[0] == pytest.approx(figures[1], abs=2e-4)
    assert invoke("sample", str(folder / "run"), "--tokens", "3")[0] == 0


@distributed(world_size=4)
def loads(rank: int, world_size: int, folder: Path, size: int) -> None:
    args = ["model=hf", f"model.path={folder}", "model.lora.rank=2", FOUR_BITS]
    config = stored_config(compose_config([*args, "model.lora.targets=q_proj"]).config)

    def load() -> None:
        model = make_model(config, torch.device("cpu"), empty=True)
        load_weights(initial_weights(config.model, model.module, 0), model)

    load()
    Path("/proc/self/clear_refs").write_text("5")  # imports have allocated their memory before
    before = peak_bytes()
    load()
    held = peak_bytes() - before
    assert held <= size // 4 / world_size + 48 * MIB, (held // MIB, size // MIB)


@pytest.mark.slow
def test_a_rank_holds_its_part_in_four_bits_while_it_loads(tmp_path):
    loads(folder=tmp_path, size=save_large_model(tmp_path))
