"""What a person gets for a mistake: one line, exit code 2, and nothing overwritten."""

import json
from pathlib import Path

import pytest

from fsdpctl.cli.app import main
from tests.cli.run import TINY, fsdpctl, invoke, make_text
from tests.train.chats import make_chat_model, make_chats


@pytest.fixture
def words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return [*TINY, f"data.path={make_text(tmp_path)}", "train.steps=10"]


@pytest.mark.parametrize(
    ("mistake", "parts"),
    [
        ("model.num_heads=5", ["model.num_kv_heads=2", "must divide"]),
        ("model.num_kv_heads=3", ["model.num_kv_heads=3", "must divide"]),
        ("model.head_dim=3", ["even"]),
        ("model.vocab_size=100", ["model.vocab_size=100", "256"]),
        ("train.seq_len=100000", ["train.seq_len=100000", "max_seq_len"]),
        ("model.max_seq_len=8", ["train.seq_len=16"]),
        ("launch.nnodes=2", ["launch.nnodes=2", "on each node", "node_rank=0 to 1"]),
        ("launch.node_rank=1", ["launch.nnodes"]),
        ("launch.device=cuda", ["launch.device=cuda", "no CUDA device"]),
        ("strategy.owner_map=balanced", ["only valid with strategy=shard_optimizer"]),
        ("strategy.dp_shard_size=2", ["only valid with hybrid strategies"]),
        ("train.global_batch_size=1", ["train.global_batch_size=1", "at least 2"]),
        ("train.micro_batch_size=9", ["train.micro_batch_size=9"]),
        ("accumulation.steps=3", ["accumulation.steps=3"]),
        ("data.val_fraction=0.0005", ["validation data"]),
        ("data.path=/no/such/file", ["data.path=/no/such/file", "not found"]),
        ("data.tokenizer=/no/where", ["tokenizer /no/where"]),
        ("train.run_dir=/proc/none/x", ["train.run_dir=/proc/none/x"]),
    ],
)
def test_an_impossible_run_is_refused_before_it_starts(words, mistake, parts, tmp_path):
    name = mistake.split("=")[0]
    kept = [word for word in words if word.split("=")[0] != name]
    code, said = invoke("train", *kept, mistake)
    assert code == 2
    for part in parts:
        assert part in said
    assert "\n" not in said.strip()
    assert [each.name for each in tmp_path.iterdir()] == ["words.txt"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["model.architecture=gpt2"], "model.rope_scaling=yarn: gpt2 has no rotary embeddings"),
        (["model.rope_theta=1"], "model.rope_theta=1: yarn needs a base above 1"),
    ],
    ids=["gpt2", "theta"],
)
def test_rotary_scaling_without_effect_is_refused(words, more, said):
    kept = [word for word in words if not word.startswith("model.num_kv_heads")]
    found = invoke("train", *kept, "model.num_kv_heads=4", "model.rope_scaling=yarn", *more)
    assert (found[0], said in found[1]) == (2, True), found


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("a.jsonl", "only valid with data=chat, data=text or data=tokens"),
        ("a.txt", "only valid with data=text, data=chat or data=tokens"),
    ],
)
def test_a_path_without_a_kind_of_data_names_the_kinds(path, said):
    code, found = invoke("train", "data=python_stdlib", f"data.path={path}")
    assert (code, said in found) == (2, True), found


def test_a_sequence_longer_than_the_data_is_refused(words):
    kept = [word for word in words if not word.startswith("train.seq_len")]
    code, said = invoke("train", *kept, "model.max_seq_len=1e6", "train.seq_len=30000")
    assert (code, "longer than the data" in said) == (2, True)


@pytest.mark.parametrize(
    ("count", "fraction", "said"),
    [
        (533, 0, "1,599 tokens are too few to train on; expected"),
        (534, 0.02, "1,570 tokens are too few to train on (data.val_fraction=0.02 keeps 32 more"),
    ],
    ids=["whole", "shared"],
)
def test_too_little_data_is_refused_unless_the_length_is_set(
    words, tmp_path, count, fraction, said
):
    (tmp_path / "words.txt").write_text("abc" * count)
    kept = [word for word in words if not word.startswith(("train.seq_len", "data.val_fraction"))]
    little = [*kept, f"data.val_fraction={fraction}", "--dry-run"]
    code, text = invoke("train", *little)
    assert (code, said in text, "set train.seq_len" in text, "\n" in text.strip()) == (
        2, True, True, False,
    ), text  # fmt: skip
    code, text = invoke("train", *little, "train.seq_len=2")
    assert code == 0, text


def test_too_few_chats_are_refused_unless_the_length_is_set(tmp_path):
    chats, model = make_chats(tmp_path / "chats.jsonl", 1), make_chat_model(tmp_path, "llama")
    few = ["model=hf", f"model.path={model}", "data=chat", f"data.path={chats}", "--dry-run"]
    code, text = invoke("train", *few)
    assert (code, "tokens are too few to train on" in text) == (2, True), text
    code, text = invoke("train", *few, "train.seq_len=64")
    assert code == 0, text


def test_a_folder_of_something_else_is_left_alone(words, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    code, said = invoke("train", *words, "train.run_dir=mine")
    assert code == 2
    assert "not a run of fsdpctl" in said
    assert [each.name for each in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_a_source_to_resume_from_must_exist(words):
    code, said = invoke("train", *words, "--resume=maybe")
    assert (code, "--resume maybe: not found; expected auto, never, or a run" in said) == (2, True)


def test_a_damaged_configuration_is_named_once(words, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("a: [")
    code, said = invoke("train", *words, "train.run_dir=run")
    assert (code, said.count("config.yaml"), "corrupted" in said) == (2, 1, True), said


@pytest.mark.parametrize("name", ["train", "check-nodes"])
def test_a_file_is_no_run_directory(words, name):
    code, said = invoke(name, *words, "train.run_dir=words.txt")
    assert (code, "expected a directory, got a file" in said) == (2, True), said


def test_dry_run_shows_units_and_writes_nothing(words, tmp_path):
    code, said = invoke("train", "--dry-run", *words)
    assert code == 0
    for part in ("model.layers.0-1 (2 x)", "root", "it would run", "2 (auto) on cpu (auto)"):
        assert part in said
    assert [each.name for each in tmp_path.iterdir()] == ["words.txt"]


def test_dry_run_of_a_large_model_needs_no_memory(words):
    code, said = invoke("train", "--dry-run", "model=llama3_405b", "launch.nproc_per_node=8",
                     "data=text", f"data.path={Path('words.txt').resolve()}",
                     "train.require_fit=false")  # fmt: skip
    assert code == 0
    assert "405.8" in said
    assert "model.layers.0-125 (126 x)" in said


def test_print_config_is_a_recipe(words, tmp_path):
    code, printed = invoke("train", "--print-config", *words)
    assert code == 0
    (tmp_path / "mine.yaml").write_text(printed)
    assert invoke("train", "--print-config", "--recipe", "mine.yaml") == (0, printed)


@pytest.mark.parametrize("group", ["", "model", "strategy", "train", "data", "checkpoint"])
def test_list_shows_choices_and_keys(group):
    code, said = invoke("list", *([group] if group else []))
    assert code == 0
    if group:
        assert f"{group}." in said
    else:
        assert "quick" in said
        assert "full_shard" in said


def test_list_of_an_unknown_group_names_the_nearest():
    code, said = invoke("list", "modle")
    assert (code, "did you mean model?" in said) == (2, True)
    code, said = invoke("list", "data.packng")
    assert (code, "did you mean data.packing?" in said) == (2, True)


@pytest.mark.parametrize("name", ["data.packing", "checkpoint.every", "model.lora"])
def test_list_shows_a_key_or_the_keys_of_a_subsection(name):
    code, said = invoke("list", name)
    assert (code, f"{name}" in said, "data.path" in said) == (0, True, False)
    code, said = invoke("list", name, "--json")
    assert all(each["name"].startswith(name) for each in json.loads(said)[0]["keys"])


@pytest.mark.parametrize(
    "name",
    ["consolidate-checkpoint", "inspect-checkpoint", "verify-checkpoint", "sample", "tokenize",
     "train", "list"],
)  # fmt: skip
def test_every_command_has_a_help_text(name):
    code, said = invoke(name, "--help")
    assert code == 0
    assert "Usage" in said
    assert "--help" in said


@pytest.mark.parametrize("name", ["inspect-checkpoint", "verify-checkpoint", "sample"])
def test_a_source_without_a_checkpoint_is_a_usage_error(name, tmp_path):
    assert invoke(name, str(tmp_path / "none"))[0] == 2
    code, said = invoke(name, str(tmp_path))
    assert (code, "no complete checkpoint" in said) == (2, True)


def test_adapters_alone_are_named(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    code, said = invoke("sample", str(tmp_path))
    assert (code, "only PEFT adapters, without the model" in said) == (2, True)


def test_sample_lists_what_it_takes():
    assert "a Hugging Face directory" in " ".join(invoke("sample", "--help")[1].split())


def test_a_consolidation_with_nonsense_is_refused(tmp_path):
    assert invoke("consolidate-checkpoint", "x", "y", "--dtype", "float3")[0] == 2
    code, said = invoke("consolidate-checkpoint", "x", "y", "--max-file-size", "five")
    assert (code, "5GB" in said) == (2, True)


def test_an_error_is_one_line_on_standard_error(tmp_path):
    result = fsdpctl("train", "train.stepz=3", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == "fsdpctl: train.stepz: no such key; did you mean train.steps?\n"


def test_tokenize_makes_what_data_tokens_takes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_text(tmp_path)
    assert invoke("tokenize", "words.txt", "words.bin")[0] == 0
    header = json.loads(Path("words.json").read_text())
    assert (header["dtype"], header["tokenizer"]) == ("uint16", "bytes")
    assert invoke("tokenize", "words.txt", "words.bin")[0] == 2
    assert invoke("tokenize", "words.txt", "words.tok")[0] == 2
    tiny = [word for word in TINY if word != "data=text"]
    code, said = invoke("train", "--dry-run", *tiny, "data=tokens", "data.path=words.bin")
    assert code == 0
    assert "(bytes)" in said


def test_main_is_the_entry_point():
    assert callable(main)
