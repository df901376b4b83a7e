"""Commands of users who come from torchtitan, axolotl, accelerate or plain torch."""

import json
from pathlib import Path

import pytest

from fsdpctl.commands.compare.variants import drop_duplicates, variants_of
from fsdpctl.commands.config_args import completions
from fsdpctl.config.compose import compose_config
from fsdpctl.config.serialize import config_to_yaml
from fsdpctl.errors import did_you_mean
from fsdpctl.resolve.machine import assign_ranks
from fsdpctl.training.learning_rate import lr_factor
from tests.commands.run import TINY, invoke, make_text
from tests.hostile import make_checkpoint
from tests.training.chats import make_chats


def printed(*args: str) -> dict[str, str]:
    """Return the configuration that `train` reads from the arguments."""
    code, out = invoke("train", *args, "--print-config")
    assert code == 0, out
    return dict(line.partition("  #")[0].split(": ", 1) for line in out.splitlines())


def dry_run(*args: str) -> str:
    code, out = invoke("train", "--dry-run", *args)
    assert code == 0, out
    return out


@pytest.fixture
def args(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return [*TINY, f"data.path={make_text(tmp_path)}", "train.steps=10"]


def test_a_file_of_settings_is_a_recipe(tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text("train: {steps: 7}\nmodel.num_layers: 2\n")
    for typed in ([str(file)], ["--recipe", str(file)]):
        result = printed(*typed, "model.num_layers=3")
        assert (result["train.steps"], result["model.num_layers"]) == ("7", "3")


@pytest.mark.parametrize("typed", [
    ["--train.steps=7", "--optimizer.lr=1e-4"], ["--train.steps", "7", "--optimizer.lr", "1e-4"],
    ["train.steps=7", "--optimizer.lr=1e-4"],
])  # fmt: skip
def test_keys_may_have_dashes(typed):
    result = printed(*typed, "--strategy=no_shard", "--model", "gpt2")
    assert (result["train.steps"], result["optimizer.lr"]) == ("7", "0.0001")
    assert (result["strategy"], result["model"]) == ("no_shard", "gpt2")


def test_ranks_are_said_as_in_torchrun():
    assert printed("--nproc-per-node", "3")["launch.nproc_per_node"] == "3"
    code, out = invoke("train", "--nproc-per-node", "3", "launch.nproc_per_node=2")
    assert (code, "set twice" in out) == (2, True)


@pytest.mark.parametrize(("arg", "ours"), [
    ("zero1", "shard_optimizer"), ("ZeRO3", "full_shard"), ("fsdp", "full_shard"),
    ("hsdp", "hybrid_shard"), ("hpz", "hybrid_shard_optimizer"), ("ddp", "no_shard"),
    ("ZeRO++", "hybrid_shard_optimizer"), ("full_shard", "full_shard"),
])  # fmt: skip
def test_strategies_are_known_by_their_other_names(arg, ours):
    assert printed(f"strategy={arg}")["strategy"] == ours


def test_all_unknown_keys_of_a_file_are_named_at_once(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("hf_assets_path: x\nsequence_len: 4\nadapter: lora\noptimizer.lr: 1\n")
    code, out = invoke("train", str(file), "--dry-run")
    assert code == 2
    lines = [each for each in out.splitlines() if "no such key" in each]
    assert [each.partition("mine.yaml: ")[2].partition(" model.lora")[0] for each in lines] == [
        "hf_assets_path: no such key; use model.path",
        "sequence_len: no such key; use train.seq_len", "adapter: no such key; use",
    ]  # fmt: skip


@pytest.mark.parametrize(("args", "mistakes"), [
    (["optimizr=adamw", "train.stpes=3", "train.seed=x"], 3),
    (["steps", "strategy=full_shart", "optimizer.lr=fast", "train.seed=1"], 3),
    (["cluster=12xh100", "--lrr=3", "model.lora.ranks=3", "data.packing=x"], 4),
    (["train.steps=-1"], 1), ([f"a{number}=1" for number in range(30)], 11),
])  # fmt: skip
def test_all_mistakes_of_a_command_are_told_in_a_line_each(args, mistakes):
    code, out = invoke("train", *args)
    assert (code, len(out.splitlines())) == (2, mistakes)
    wrong = [each.partition("=")[0] for each in args if each != "train.seed=1"][:10]
    assert all(name in line for name, line in zip(wrong, out.splitlines(), strict=False))


@pytest.mark.parametrize(("arg", "known", "error"), [
    ("h100_80", ["a100_80", "h100", "h200"], "h100"),
    ("launch.rdzv", ["launch.device", "launch.rdzv_endpoint"], "launch.rdzv_endpoint"),
    ("strat", ["data", "strategy"], "strategy"),
    ("early_stop", ["train.steps", "train.eval_every"], ""),
])  # fmt: skip
def test_the_nearest_spelling_is_near(arg, known, error):
    assert did_you_mean(arg, known) == (f"; did you mean {error}?" if error else "")


@pytest.mark.parametrize("name", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])
def test_one_of_several_processes_is_told_why_it_cannot_be(args, monkeypatch, name):
    monkeypatch.setenv(name, "2")
    code, out = invoke("train", *args)
    assert (code, f"{name}=2" in out, "launch=" in out) == (2, True, True)


@pytest.mark.parametrize("launch", ["local", "slurm", "env"])
def test_a_run_on_several_machines_is_looked_at_from_one(args, launch):
    """A dry run on a login node works, without a launcher's variables."""
    out = dry_run(*args, f"launch={launch}", "launch.nnodes=2", "launch.nproc_per_node=2")
    assert "ranks   4, on each of 2 nodes 2 on cpu" in out


def test_samples_are_as_long_as_the_model_is_used_for():
    lengths = {
        name: assign_ranks(compose_config([f"model={name}"]).config).train.seq_len
        for name in ("llama_tiny", "gpt2", "llama3_70b")
    }
    assert lengths == {"llama_tiny": 128, "gpt2": 1024, "llama3_70b": 4096}
    assert compose_config(["model=gpt2", "train.seq_len=64"]).config.train.seq_len == 64


def test_a_length_that_nobody_asked_for_follows_the_data(args):
    data = ["data=text", "data.path=words.txt"]
    out = dry_run(*data, "model=gpt2", "model.vocab_size=256")
    assert "of 256 tokens (default: limited by the data)" in out
    for more in ([], ["train.steps=2"], ["train.steps=2", "--dry-run"]):
        code, out = invoke("train", *data, "train.seq_len=1024", *more)
        assert (code, "longer than the validation data" in out) == (2, True)


@pytest.mark.slow
def test_a_length_that_fits_is_a_round_one_and_nothing_that_fits_is_helped():
    length = ["model=llama3_8b", "cluster=h100", "train.micro_batch_size=1"]
    content = json.loads(invoke("estimate-memory", *length, "--fit", "seq_len", "--json")[1])["fit"]
    assert (content["value"] % 256, content["estimate"]["verdict"]) == (0, "fits")
    assert content["next"]["verdict"] != "fits"
    assert content["next"]["seq_len"] == content["value"] + 256
    code, out = invoke("estimate-memory", *length, "cluster.memory=40GiB", "--fit", "micro_batch")
    assert (code, "none: train.micro_batch_size=1 does not fit" in out) == (0, True)
    assert "to fit" in out
    assert "activation_checkpointing=selective" in out.split("with ", 1)[1]


def test_what_an_engine_does_not_have_is_said():
    args = ["estimate-memory", "model=gpt2", "cluster=h100", "--all-strategies"]
    assert "engine=ddp does not support" in invoke(*args, "engine=ddp")[1]
    assert "does not support" not in invoke(*args)[1]
    offloaded = invoke(*args, "strategy.offload=states")[1]
    assert "other settings exclude no_shard; strategy=no_shard shows why" in offloaded


def test_the_markup_of_rows_is_not_text(args, tmp_path):
    remaining = [arg for arg in args if not arg.startswith("data.path")]
    row = json.dumps({"text": "a b " * 2000, "url": "u"})
    Path("rows.jsonl").write_text(row)
    out = dry_run(*remaining, "data.path=rows.jsonl")
    assert "data    rows.jsonl, 1 file: 7.84 k tokens" in out
    assert "note    columns ignored: url (1 row)" in out
    make_chats(tmp_path / "chat.jsonl", 1)
    code, out = invoke("train", "--dry-run", *remaining, "data.path=chat.jsonl")
    assert (code, "a conversation; expected `text`, or set data=chat" in out) == (2, True)


def test_another_value_is_said_to_begin_a_new_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = Path("runs/llama_tiny-abcdef")
    (first / "checkpoints").mkdir(parents=True)
    make_checkpoint(first / "checkpoints" / "step-00000001")
    file = make_text(tmp_path)
    args = ["data=text", f"data.path={file}", "train.seq_len=16"]
    resolved = ["data.tokenizer=bytes", "model.vocab_size=256", "optimizer.lr=0.25"]
    (first / "config.yaml").write_text(
        config_to_yaml(assign_ranks(compose_config([*args, *resolved]).config))
    )
    Path("runs/latest").symlink_to("llama_tiny-abcdef")
    out = dry_run(*args, "optimizer.lr=0.5", "precision=fp32")
    assert "to continue from its state, pass --resume runs/llama_tiny-abcdef" in out
    assert "has optimizer.lr 0.25, precision auto" in out
    (first / "config.yaml").write_text("model.of_another_version: 1\n")
    assert "to continue from its state" not in dry_run(*args, "optimizer.lr=0.5")


def test_an_inspection_begins_with_a_summary_and_weights(tmp_path):
    checkpoint = make_checkpoint(tmp_path / "step-00000001")
    out = invoke("inspect-checkpoint", str(checkpoint))[1].splitlines()
    assert "llama_tiny, step 1" in out[0]
    assert "parameters in 20 tensors of F32" in out[1]
    assert out[2] == "optimizer states: none"


@pytest.mark.parametrize(("count", "error"), [
    (1, "1 file skipped: 0.dat (not UTF-8 at byte 1)"),
    (3, "3 files skipped: 0.dat (not UTF-8 at byte 1), 1.dat (not UTF-8 at byte 1) and 1 more"),
])  # fmt: skip
def test_one_file_is_no_files(args, tmp_path, count, error):
    folder = tmp_path / "texts"
    folder.mkdir()
    make_text(folder)
    for number in range(count):
        (folder / f"{number}.dat").write_bytes(b"\xe9")
    remaining = [arg for arg in args if not arg.startswith("data.path")]
    assert error in dry_run(*remaining, f"data.path={folder}")


def test_warm_up_may_be_a_share_of_the_steps():
    by_share = compose_config(["lr_scheduler.warmup_ratio=0.1"]).config.lr_scheduler
    by_steps = compose_config(["lr_scheduler.warmup_steps=20"]).config.lr_scheduler
    assert [lr_factor(by_share, s, 200) for s in range(200)] == [
        lr_factor(by_steps, s, 200) for s in range(200)
    ]


def test_nothing_is_compared_with_itself():
    args = ["strategy=no_shard,full_shard", "prefetch=none,both"]
    result, same = drop_duplicates(variants_of(args, None, simulates=False))
    assert [each.result.label for each in result] == [
        "strategy=no_shard prefetch=none", "strategy=full_shard prefetch=none",
        "strategy=full_shard prefetch=both",
    ]  # fmt: skip
    assert same == [
        "strategy=no_shard prefetch=both: skipped, the same run as strategy=no_shard prefetch=none"
    ]


def test_the_choices_are_there_for_programs():
    sections = json.loads(invoke("list", "--json")[1])
    assert {each["name"]: each["default"] for each in sections}["strategy"] == "full_shard"
    (strategy,) = json.loads(invoke("list", "strategy", "--json")[1])
    assert "hybrid_shard" in strategy["choices"]
    assert "strategy.dp_shard_size" in [key["name"] for key in strategy["keys"]]
    code, out = invoke("list", "stratgy", "--json")
    assert (code, "did you mean strategy?" in out) == (2, True)


@pytest.mark.parametrize(("typed", "offered"), [
    ("strategy=hy", ["strategy=hybrid_shard", "strategy=hybrid_shard_grad_op",
     "strategy=hybrid_shard_optimizer"]),
    ("train.on_", ["train.on_nonfinite="]),
    ("train.compile=", ["train.compile=true", "train.compile=false"]), ("nothing=", []),
])  # fmt: skip
def test_words_are_completed_from_the_schema(typed, offered):
    assert completions(typed) == offered


def test_short_data_and_short_runs_are_told_what_follows(tmp_path):
    file = tmp_path / "small.txt"
    file.write_text("some words of mine\n" * 200)
    args = ["data=text", f"data.path={file}", "--dry-run", "launch.nproc_per_node=1"]
    code, out = invoke("train", *args, "train.steps=20")
    assert (code, "of 32 tokens (default: limited by the data)" in out) == (0, True)
    assert "at step" not in out
    late = invoke("train", *args, "train.steps=20", "lr_scheduler.warmup_steps=50")[1]
    assert "peak learning rate 0.003 (default) at step 50" in late


@pytest.mark.slow
def test_an_estimate_is_of_a_real_length_and_its_advice_names_the_cost():
    code, out = invoke("estimate-memory", "model=llama3_70b", "cluster=h100", "--require-fit")
    out = " ".join(out.split())
    assert (code, "samples of 4096" in out, "does not fit" in out) == (3, True, True)
    assert "activation_checkpointing=full" in out
    assert "every second matrix product" not in out


@pytest.mark.slow
def test_a_run_that_exceeds_a_memory_does_not_start(args):
    wide = [arg for arg in args if not arg.startswith("model.hidden_size")]
    wide += ["model.hidden_size=256", "launch.device=cpu", "strategy.offload=states,gradients"]
    args = [*args, "launch.device=cpu", "cluster.memory=2MiB"]
    dry_run(*wide, "cluster.host_memory=64GiB")
    for typed, shortage in (
        ([*wide, "cluster.host_memory=2MiB"], "node, 2.0 MiB available (cluster.host_memory)"),
        (args, "rank, 2.0 MiB available"),
    ):
        for how in (("--dry-run",), ()):
            code, out = invoke("train", *how, *typed)
            assert (code, f"needed per {shortage}" in out) == (3, True), out
            assert "set train.require_fit=false" in out
    assert not Path("runs").exists()
    needed = out.split(" needed")[0].rpartition(" about ")[2]
    out = " ".join(dry_run(*args, "train.require_fit=false").split())
    assert f"; {needed} with memory outside the allocator, 2.0 MiB available" in out
    assert "sized for this machine's CPU; `fsdpctl estimate-memory … cluster=8xh100`" in out
    assert "it would run" in out
