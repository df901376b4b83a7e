"""Runs with adapters: losses of PEFT on any number of ranks, and checkpoints without the base."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig

from fsdpctl.checkpoint.consolidate import consolidate
from fsdpctl.checkpoint.merge import exported_weights
from fsdpctl.checkpoint.peft import write_peft
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.run_checkpoints import newest_checkpoint
from fsdpctl.config.compose import compose_config
from fsdpctl.config.decoder_config import model_type_of
from fsdpctl.config.peft import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from fsdpctl.config.schema import Config
from fsdpctl.data.batches import Batches
from fsdpctl.data.open_data import open_data
from fsdpctl.errors import UsageError
from fsdpctl.models.build_model import initialize_parameter
from fsdpctl.plan.batch_plan import plan_batches
from fsdpctl.plan.layout import Span
from fsdpctl.plan.schedule import EventKind
from fsdpctl.resolve.machine import assign_ranks
from fsdpctl.resolve.run_plan import stored_config
from fsdpctl.training.assemble import make_model
from tests.commands.run import figures, invoke, make_text
from tests.distributed import distributed
from tests.engine.events import recording
from tests.matrix import fast
from tests.models.families import _SIZES, FAMILIES, save_model, tokens
from tests.training.ranks import resolved, train

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

PREFIX = "base_model.model."
STEPS, THREE = 6, "train.steps=3"
ALSO = "model.lora.also"


def lora_args(folder: Path, ranks: int, *more: str, family: str = "llama") -> list[str]:
    """Return the settings of a run on a model of `family` with a constant learning rate."""
    base = folder / "base"
    if not base.is_dir():
        save_model(family, base)
    args = [
        "model=hf", f"model.path={base}", "data=text", f"data.path={make_text(folder)}",
        "data.tokenizer=bytes", "data.val_fraction=0", "train.seq_len=16",
        "train.global_batch_size=12", f"train.steps={STEPS}", "train.sample_tokens=0",
        "optimizer.lr=1e-2", "lr_scheduler=constant", "lr_scheduler.warmup_steps=0",
        "optimizer.max_grad_norm=0", "checkpoint.mode=sync", "checkpoint.every=3",
        f"launch.nproc_per_node={ranks}", "launch.device=cpu", f"train.run_dir={folder / 'run'}",
        "model.lora.rank=4", "model.lora.alpha=12", *more,
    ]  # fmt: skip
    last = dict(arg.split("=", 1) for arg in args)
    return [f"{name}={value}" for name, value in last.items()]


def run(typed: list[str], ranks: int, result: Path, **kwargs: Any) -> dict[str, torch.Tensor]:
    train(world_size=ranks, typed=typed, plants={}, result=str(result), **kwargs)
    assert Path(f"{result}.error").read_text() == kwargs.get("error", "")
    state: dict[str, torch.Tensor] = torch.load(result)
    return state


def newest(folder: Path) -> CheckpointReader:
    result = newest_checkpoint(folder / "run" / "checkpoints")
    assert result is not None
    return CheckpointReader(result)


def losses(folder: Path) -> list[float]:
    return [loss for _, loss, _ in figures(folder / "run") if loss is not None]


def losses_of_peft(config: Config, folder: Path) -> list[float]:
    """Train with PEFT in one process; return the loss of each step."""
    lora, seed = config.model.lora, config.train.seed
    model = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32),
        peft.LoraConfig(
            r=lora.rank, lora_alpha=lora.alpha, use_rslora=lora.rslora, target_modules="all-linear",
            fan_in_fan_out=model_type_of(config.model) == "gpt2", task_type="CAUSAL_LM",
            modules_to_save=lora.also and lora.also.split(","),
            ensure_weight_tying=lora.also == "embed_tokens",
        ),
    )  # fmt: skip
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    with torch.no_grad():
        for name, param in trained.items():
            if "lora_" not in name:
                continue
            ours = name.removeprefix(PREFIX).replace(".default", "")
            initialize_parameter(ours, param.data, seed=seed, config=config.model)
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    data = open_data(config.data)
    rows = data.train.samples(config.train.seq_len)
    batches = Batches(rows, plan_batches(12, 1), seed, data.vocab_size)
    results = []
    for step in range(STEPS):
        batch = batches.training(step * 12, 0, 0)
        loss = F.cross_entropy(model(batch.tokens).logits.flatten(0, 1), batch.targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        results.append(loss.item())
    return results


@pytest.mark.parametrize(("family", "ranks", "more"), [
    ("llama", 2, ["accumulation=last", "accumulation.steps=2", f"{ALSO}=embed_tokens,lm_head"]),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [
            ("llama", 1, []),
            ("llama", 2, [f"{ALSO}=layers.1.mlp", "model.base_dtype=float32"]),
            ("qwen3 tied", 2, [f"{ALSO}=embed_tokens", "strategy=shard_optimizer"]),
            ("llama", 3, ["model.lora.rslora=true", "train.loss_chunk_tokens=10"]),
            ("gpt2", 2, ["strategy=shard_optimizer"]),
            ("qwen3 tied", 2, ["strategy=shard_grad_op", "activation_checkpointing=full"]),
        ]
    ),
])  # fmt: skip
def test_losses_are_those_of_a_plain_loop_with_peft(tmp_path, family, ranks, more):
    typed = lora_args(tmp_path, ranks, *more, family=family)
    expected = losses_of_peft(resolved(typed), tmp_path)
    run(typed, ranks, tmp_path / "state")
    assert losses(tmp_path) == pytest.approx(expected, abs=1e-5)
    assert expected[-1] < expected[0] - 0.1


@pytest.fixture(scope="module")
def trained_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on two ranks."""
    folder = tmp_path_factory.mktemp("llama")
    run(lora_args(folder, 2, "model.lora.rslora=true"), 2, folder / "state")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("family", fast("llama", slow=["gpt2", "qwen3 tied"]))
def test_an_export_opens_in_peft_and_merged_in_transformers(tmp_path, family, trained_llama):
    trained = trained_llama
    if family != "llama":
        trained = tmp_path
        run(lora_args(trained, 2, "model.lora.rslora=true", family=family), 2, trained / "state")
    source = str(trained / "run")
    for name, *options in (("adapters", "--format", "peft"), ("merged", "--merge")):
        code, out = invoke("consolidate-checkpoint", source, str(tmp_path / name), *options)
        assert code == 0, out
    code, out = invoke("consolidate-checkpoint", source, str(tmp_path / "neither"))
    assert (code, "--merge" in out, "--format peft" in out) == (2, True, True), out
    base = AutoModelForCausalLM.from_pretrained(trained / "base", dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        expected = adapted(tokens()).logits
        assert (merged(tokens()).logits - expected).abs().max() <= 1e-5
        with adapted.disable_adapter():
            assert (adapted(tokens()).logits - expected).abs().max() > 1e-2


@pytest.mark.slow
def test_validation_changes_nothing(tmp_path):
    """Validation does not change the random numbers of dropout."""
    typed = lora_args(tmp_path, 2, "model.lora.dropout=0.2", "data.val_fraction=0.1")
    without = run([*typed, "train.eval_every=0"], 2, tmp_path / "without")
    shutil.rmtree(tmp_path / "run")
    with_it = run([*typed, "train.eval_every=2", "train.eval_batches=1"], 2, tmp_path / "with")
    assert all(torch.equal(with_it[name], without[name]) for name in without)


@pytest.mark.slow
@pytest.mark.parametrize(("offset", "passes"), [(0, ()), (100_000, ("sample", "evaluate"))])
def test_another_base_is_rejected(tmp_path, monkeypatch, offset, passes):
    """If the change is between the samples that a start compares, a save detects it."""
    monkeypatch.setitem(FAMILIES, "wide", LlamaConfig(**_SIZES | {"vocab_size": 12000}))
    typed = lora_args(tmp_path, 1, "train.steps=1", family="wide")
    run(typed, 1, tmp_path / "state")
    base, checkpoint = tmp_path / "base", newest(tmp_path).folder
    code, output = invoke("verify-checkpoint", str(checkpoint))
    assert (code, "base model verified" in output) == (0, True), output
    weights = load_file(base / "model.safetensors")
    weights["model.embed_tokens.weight"].view(-1)[offset] += 1
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    commands = [["verify-checkpoint"], ["sample", "--tokens=1", "--prompt", "a"], ["evaluate"]]
    commands += [["consolidate-checkpoint", "--merge"], ["consolidate-checkpoint", "--format=gguf"]]
    results = []
    for name, *more in commands:
        out = [str(tmp_path / "out")] if name == "consolidate-checkpoint" else []
        code, output = invoke(name, str(checkpoint), *out, *more)
        if name in passes:
            assert code == 0, output
        else:
            results.append((code, output, "has changed"))
    shutil.copytree(checkpoint, tmp_path / "copy")
    starts = (f"train.run_dir={tmp_path / 'other'}", f"model.path={tmp_path / 'copy'}")
    for typed in lora_args(tmp_path, 1), lora_args(tmp_path, 1, *starts):  # a resumed and a new run
        again = {"typed": typed, "result": str(tmp_path / "second")}
        message = "has changed: expected the weights"
        if not passes:
            with pytest.raises(AssertionError, match=f"CheckpointError: .* {message}"):
                train(world_size=1, plants={}, **again)
        else:
            train(world_size=1, plants={}, **again)
            error = Path(tmp_path, "second.error").read_text()
            results.append((int(error[0]), error[2:], "has changed"))
    assert [*tmp_path.glob("*/checkpoints/step-*")] == [checkpoint]
    base.rename(tmp_path / "elsewhere")
    results.append((*invoke("verify-checkpoint", str(checkpoint)), "not found"))
    for code, output, expected in results:
        assert (code, f"base model {base} {expected}" in output) == (4, True), output
        assert len(output.splitlines()) == 1


@pytest.mark.slow
def test_only_trained_parameters_are_saved(tmp_path):
    typed = [arg for arg in lora_args(tmp_path, 2) if not arg.startswith("model.lora")]
    run([*typed, "model.trainable=layers.2.mlp|norm"], 2, tmp_path / "state")
    reader = newest(tmp_path)
    saved = reader.names("model")
    assert len(saved) == 3 + 2 * 3 + 1
    consolidate(reader, tmp_path / "whole")
    AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    before = load_file(tmp_path / "base" / "model.safetensors")
    after = load_file(tmp_path / "whole" / "model.safetensors")
    assert {name for name in before if not torch.equal(before[name], after[name])} == set(saved)
    for code, out in (
        invoke("sample", str(tmp_path / "run"), "--tokens", "3"),
        invoke("evaluate", str(tmp_path / "run")),
        invoke("inspect-checkpoint", str(tmp_path / "run")),
    ):
        assert code == 0, out
    assert f"base model (untrained weights): {tmp_path / 'base'}" in out
    words_of_merge = (str(tmp_path / "run"), str(tmp_path / "x"), "--merge")
    code, out = invoke("consolidate-checkpoint", *words_of_merge)
    assert (code, "has no adapters" in out) == (2, True), out


@pytest.mark.slow
@pytest.mark.parametrize(("more", "others"), [
    ([], [1, 3]), (["model.base_dtype=nf4"], [1, 3]), (["model.lora.dropout=0.2"], []),
])  # fmt: skip
def test_a_stopped_run_resumes_at_any_number_of_ranks(tmp_path, more, others):
    """The same number of ranks has the same bits, with dropout too."""
    whole = run(lora_args(tmp_path, 2, *more), 2, tmp_path / "whole")
    expected = losses(tmp_path)
    shutil.rmtree(tmp_path / "run")
    run(lora_args(tmp_path, 2, THREE, *more), 2, tmp_path / "first")
    shutil.move(tmp_path / "run", tmp_path / "stopped")
    for ranks in (2, *others):
        shutil.copytree(tmp_path / "stopped", tmp_path / "run", symlinks=True)
        resumed = run(lora_args(tmp_path, ranks, *more), ranks, tmp_path / "second")
        assert losses(tmp_path) == pytest.approx(expected, abs=0 if ranks == 2 else 1e-5)
        for name, value in whole.items():
            if value.dtype == torch.uint8 or ranks == 2:
                assert torch.equal(resumed[name], value), name
        shutil.rmtree(tmp_path / "run")


@pytest.mark.slow
def test_a_run_with_adapters_can_be_continued_over_a_skipped_step(tmp_path):
    """A run that starts from a run with adapters trains these."""
    run(lora_args(tmp_path, 2), 2, tmp_path / "first")
    before = torch.load(tmp_path / "first")
    typed = [
        *(arg for arg in lora_args(tmp_path, 2) if not arg.startswith(("model.", "train.run_dir"))),
        f"model.path={tmp_path / 'run'}", f"train.run_dir={tmp_path / 'second'}",
        "train.on_nonfinite=skip",
    ]  # fmt: skip
    train(world_size=2, typed=typed, plants={4: ("loss", 1)}, result=str(tmp_path / "after"))
    assert Path(f"{tmp_path / 'after'}.error").read_text() == ""
    after = torch.load(tmp_path / "after")
    assert after.keys() == before.keys()
    assert {n for n in after if not torch.equal(after[n], before[n])} == {
        name for name in after if "lora_" in name
    }
    write_adapters(tmp_path, resolved(lora_args(tmp_path, 1)))
    with pytest.raises(UsageError, match="already has adapters"):
        resolved([*typed, f"model.lora.path={tmp_path / 'adapters'}"])


@pytest.mark.slow
@distributed(world_size=2)
def test_the_head_is_gathered_once_each_way_however_many_chunks_the_loss_has(rank, world_size):
    more = ["model.vocab_size=64", "model.overrides.tie_word_embeddings=false", "model.lora.rank=2"]
    for prefetch in ("none", "both"):
        config = compose_config([*more, f"prefetch={prefetch}", "launch.device=cpu"]).config
        config = stored_config(assign_ranks(config))
        model = make_model(config, torch.device("cpu"))
        tokens = torch.arange(60).view(2, 30)
        with recording(model) as forward:
            loss = model(tokens, tokens, 7)
        with recording(model) as backward:
            loss.backward()
        for events, most in ((forward, 1), (backward, 1)):
            gathers = [e for e in events if e.kind is EventKind.GATHER and e.unit == "lm_head"]
            assert len(gathers) <= most


def test_a_merge_rounds_once(tmp_path):
    save_model("gpt2", tmp_path / "base", torch.bfloat16)
    run(lora_args(tmp_path, 1), 1, tmp_path / "state")
    reader = newest(tmp_path)
    consolidate(reader, tmp_path / "merged", merge=True)
    consolidate(reader, tmp_path / "whole", merge=True, dtype="float32")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    base = load_file(tmp_path / "base" / "model.safetensors")
    adapters = torch.load(tmp_path / "state")
    for name, weight in base.items():
        layer = name.removesuffix(".weight")
        expected = weight.float()
        if f"{layer}.lora_A.weight" in adapters:
            down, up = (adapters[f"{layer}.lora_{which}.weight"] for which in "AB")
            expected = expected + 3.0 * (up @ down).T
        assert (whole[name] - expected).abs().max() <= 1e-6, name
        assert torch.equal(merged[name], whole[name].to(torch.bfloat16)), name


@pytest.mark.slow
def test_a_slice_of_a_merged_weight_equals_the_slice_of_the_whole(trained_llama):
    weights = exported_weights(newest(trained_llama), None, merge=True)
    key = "model/model.layers.1.mlp.down_proj.weight"
    whole = b"".join(bytes(data) for _, data in weights.read(key))
    for start, stop in ((0, 1), (79, 81), (100, 1000), (3839, 3840)):
        part = b"".join(bytes(data) for _, data in weights.read(key, Span(start, stop)))
        assert part == whole[4 * start : 4 * stop]


@pytest.mark.slow
@pytest.mark.parametrize(("targets", "named"), [
    ("q_proj|mlp", ["down_proj", "gate_proj", "q_proj", "up_proj"]),
    (r"1\.mlp", [f"model.layers.1.mlp.{each}_proj" for each in ("down", "gate", "up")]),
])  # fmt: skip
def test_training_continues_from_a_peft_directory(tmp_path, targets, named):
    """The run starts from the stored adapters, not from random ones."""
    typed = lora_args(tmp_path, 2, f"model.lora.targets={targets}")
    first = run(typed, 2, tmp_path / "first")
    write_peft(newest(tmp_path), tmp_path / "adapters")
    options = json.loads((tmp_path / "adapters" / ADAPTER_CONFIG).read_text())
    assert options["target_modules"] == named
    shutil.rmtree(tmp_path / "run")
    more = [arg for arg in typed if not arg.startswith(("model.lora", "optimizer.lr"))]
    more += [f"model.lora.path={tmp_path / 'adapters'}", "optimizer.lr=0"]
    config = resolved(more)
    assert (config.model.lora.rank, config.model.lora.alpha) == (4, 12.0)
    second = run(more, 2, tmp_path / "second")
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a base model and adapters for it."""
    folder = tmp_path_factory.mktemp("adapters")
    write_adapters(folder, resolved(lora_args(folder, 1)))
    return folder


@pytest.mark.parametrize(("change", "error"), [
    ({"use_dora": True}, "use_dora=True: not supported"),
    ({"bias": "all"}, "bias=all: expected none"),
    ({"peft_type": "IA3"}, "peft_type=IA3: expected LORA"),
    ({"target_modules": ["q_proj"]}, "unexpected model.* that model.lora.targets includes"),
    ({"target_modules": ["nothing"]}, "matches no linear layer"),
    ({"r": 0}, "model.lora.path=.*: model.lora.rank=0: expected"),
    ({"r": "4"}, "adapter_config.json: Expected"),
    ({"r": 2}, "expected shape \\[2, 48\\], got \\[4, 48\\]"),
    ({"tensor": "model.layers.0.self_attn.q_proj.lora_magnitude_vector"}, "DoRA"),
    ({"tensor": "model.embed_tokens.lora_embedding_A"}, "embeddings"),
    ({"tensor": "lm_head.weight"}, "set model.lora.also=lm_head"),
])  # fmt: skip
def test_unsupported_adapters_are_rejected(tmp_path, adapters, change, error):
    typed = lora_args(adapters, 1)
    folder = Path(shutil.copytree(adapters / "adapters", tmp_path / "adapters"))
    options = json.loads((folder / ADAPTER_CONFIG).read_text())
    change = dict(change)
    tensor = change.pop("tensor", None)
    if tensor:
        weights = load_file(folder / ADAPTER_WEIGHTS)
        weights[PREFIX + tensor] = torch.zeros(4)
        save_file(weights, folder / ADAPTER_WEIGHTS)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(options | change))
    more = [arg for arg in typed if not arg.startswith("model.lora")]
    with pytest.raises(UsageError, match=error):
        resolved([*more, f"model.lora.path={folder}"])


def write_adapters(folder: Path, config: Config) -> Path:
    """Write adapters with PEFT."""
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    lora = peft.LoraConfig(r=4, lora_alpha=12, target_modules="all-linear", task_type="CAUSAL_LM")
    peft.get_peft_model(base, lora).save_pretrained(folder / "adapters")
    return folder / "adapters"


def test_the_adapter_replaces_the_rank_of_a_recipe_but_conflicts_with_a_typed_one(adapters):
    path = f"model.lora.path={adapters / 'adapters'}"
    with pytest.raises(UsageError, match="model.lora.rank=8: model.lora.path=.* has 4"):
        resolved(lora_args(adapters, 1, "model.lora.rank=8", path))
    recipe = adapters / "recipe.yaml"
    recipe.write_text("model: hf\nmodel.lora: {rank: 9, alpha: 2, dropout: 0.5, targets: q_proj}\n")
    typed = [arg for arg in lora_args(adapters, 1) if not arg.startswith(("model=", "model.lora"))]
    composed = compose_config([*typed, path], str(recipe))
    lora = composed.config.model.lora
    assert (lora.rank, lora.alpha, lora.dropout) == (4, 12, 0.5)
    assert "up_proj" in str(lora.targets)
    names = ("alpha", "rank", "targets")
    assert sorted(composed.ignored_lines) == [
        f"model.lora.{name} of the recipe ignored: model.lora.path sets it" for name in names
    ]
