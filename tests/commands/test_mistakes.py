"""Mistakes of users: one line names each, the exit code fits, and nothing is written.

The first text of a row is typed in the directory `world`; its other texts are in the answer.
"""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from fsdpctl.commands.app import COMMANDS, main
from tests.commands.run import TINY, invoke, make_text
from tests.hostile import make_checkpoint, make_tokens
from tests.run.runs import make_run
from tests.training.chats import make_chat_model, make_chats

TEXT = ["train", "--dry-run", "data.path=words.txt", *TINY]
# What the first argument of a row stands for; a key of the row replaces the same key here.
BEGINNINGS = {
    "text": TEXT, "run": ["train", *TEXT[2:]],
    "nodes": [*TEXT, "launch.nnodes=2", "launch.node_rank=0"],
    "hf": ["train", "--dry-run", "model=hf", "model.path=model"],
}  # fmt: skip
TABLE = [
    # commands and options
    ("trian", "trian", "Did you mean 'train'?"),
    ("export run out", "export: no such command; use fsdpctl consolidate-checkpoint"),
    ("train --dryrun", "--dryrun: no such option", "did you mean --dry-run?"),
    ("sample model --temprature 1", "--temprature", "--temperature"),
    ("sample model --tokens 0", "--tokens", "greater than or equal to 1"),
    ("consolidate-checkpoint ckpt", "Missing argument 'DST'"),
    ("consolidate-checkpoint ckpt out --dtype float3", "--dtype float3", "did you mean float32?"),
    ("consolidate-checkpoint ckpt out --format ggfu", "--format ggfu", "did you mean gguf?"),
    ("consolidate-checkpoint ckpt out --max-file-size five", "--max-file-size five", "5GB"),
    ("consolidate-checkpoint ckpt o.gguf --max-file-size 5GB", "only valid with --format hf"),
    ("estimate-memory --fit batch", "--fit batch", "did you mean micro_batch?"),
    ("compare strategy=full_shard,no_shard --steps 0", "--steps=0: expected a whole number from 4"),
    ("estimate-memory cluster=h100 --recipe nothing", "--recipe nothing"),
    # keys and values
    ("train train.stepz=3", "train.stepz: no such key; did you mean train.steps?"),
    ("train --train.stepz 7", "train.stepz: no such key; did you mean train.steps?"),
    ("train --learning-rate 7", "use optimizer.lr"),
    ("train train.steps=ten", "train.steps=ten: expected a whole number of at least 1"),
    ("train train.steps=3 train.steps=4", "train.steps: set twice, as 3 and as 4"),
    ("train train.steps=3 train.epochs=1", "train.steps and train.epochs: conflict"),
    ("train optimizer=adam", "optimizer=adam: no such option; did you mean adamw? (adamw, muon"),
    ("train precision=fp16", "precision=fp16: no such option", "set precision=bf16"),
    ("train per_device_train_batch_size=4", "use train.micro_batch_size"),
    ("train tensor_parallel_degree=2", "does not support tensor parallelism"),
    ("train data.train_on=asistant", "data.train_on=asistant", "did you mean assistant?"),
    ("estimate-memory clutser=h100", "did you mean cluster?"),
    ("estimate-memory cluster.memory=0", "cluster.memory=0"),
    ("estimate-memory cluster.memory=80QB", "a size such as 80GB"),
    ("estimate-memory cluster.memory=GiB", "cluster.memory=GiB"),
    ("estimate-memory cluster=h1000", "did you mean h100?"),
    ("estimate-memory cluster=8xh100,a10", "no such option; `fsdpctl compare --simulate` takes"),
    ("train launch.allocator=cuda", "expandable, native"),
    ("train checkpoint.mode=later", "async, sync"),
    ("train model.weights=x", "use model=hf and model.path"),
    ("train checkpoint.after_save=./x", "loop over RUN/checkpoints/latest, as docs/watching.md"),
    ("train launch.timeout=0", "launch.timeout=0: expected a number from"),
    ("train log.trackers=wand", "log.trackers=wand: expected none, or a list of tensorb"),
    ("train log.wandb=true", "log.wandb: no such key; use log.trackers=wandb"),
    ("train log.tensorboard=true", "log.tensorboard: no such key; use log.trackers=tensorboard"),
    ("train log.wandb_project=x", "log.wandb_project: no such key; use log.project"),
    ("train log=wandb", "a section, not a key"),
    ("train words.txt", "words.txt: expected KEY=VALUE", "data=text data.path=words.txt"),
    ("train quick", "to use the recipe, pass --recipe quick"),
    ("train gpt2", "did you mean model=gpt2?"),
    ("compare --print-config", "--print-config: not an option", "`fsdpctl train` has this option"),
    ("convert run.yml --dry-run", "--dry-run: not an option", "`fsdpctl train` has this option"),
    ("sample --print-config", "No such option: --print-config; `fsdpctl train` has this option"),
    ("status --resume x", "No such option: --resume; `fsdpctl train` has this option"),
    ("list modle", "did you mean model?"),
    ("list data.packng", "did you mean data.packing?"),
    # files and directories
    ("train --recipe shakespear", "--recipe shakespear", "did you mean shakespeare?"),
    ("train --recipe shakespeare", "data.path=shakespeare.txt: not found", "curl -o shakespeare."),
    ("train rcp.yaml", "rcp.yaml: no such file; did you mean recipe.yaml?"),
    ("train recipe.yaml --recipe quick", "recipe.yaml: conflicts with the recipe quick"),
    ("train axolotl.yml", "axolotl.yml: a file of axolotl; pass it as --from axolotl.yml"),
    ("train --from words.txt", "words.txt: not supported; expected the YAML file of axolotl"),
    ("convert unknown.yml", "unknown.yml: unknown format; expected the YAML file of axolotl"),
    ("convert axolotl.yml --out words.txt", "--out words.txt: already exists"),
    ("text data.path=wrds.txt", "data.path=wrds.txt: not found; did you mean words.txt?"),
    ("text data.val_path=mine/x", "data.val_path=mine/x: not found; expected a file"),
    ("text data.path=fifo", "data.path=fifo: not a regular file"),
    ("text data.path=/proc/self/mem", "/proc/self/mem: Input/output error"),
    ("text data.path=empty.txt", "data.path=empty.txt: no text found"),
    ("text data.path=latin.txt", "not UTF-8 at byte 4; convert it, for example with iconv"),
    ("text data.path=x.pdf", "data.path=x.pdf: a PDF; convert it, for example with pdftotext"),
    ("text data.path=x.zip", "data.path=x.zip: compressed; unpack it"),
    ("text data.path=x.png", "data.path=x.png: an image"),
    ("text data.path=x.safetensors", "model weights", "model=hf model.path=DIR"),
    ("text data.path=t.bin", "data.path=t.bin: binary", "set data=tokens"),
    ("train data=tokens data.path=words.txt", "the header words.json is missing"),
    ("train data=tokens data.path=v.bin", "data.path=v.bin: not found; did you mean t.bin?"),
    ("train data=python_stdlib data.path=a.txt", "only valid with data=text, data=chat or data=t"),
    ("text data.tokenizer=modle", "data.tokenizer=modle: not found; did you mean model?"),
    ("text train.run_dir=words.txt", "train.run_dir=words.txt: expected a directory, got a f"),
    ("text train.run_dir=words.txt/x", "train.run_dir=words.txt/x: words.txt is a file"),
    ("run train.run_dir=/proc/none/x", "train.run_dir=/proc/none/x: "),
    ("text train.run_dir=mine", "train.run_dir=mine: not empty, and not a run of fsdpctl"),
    ("text train.run_dir=damaged", "damaged/config.yaml: corrupted"),
    ("text --resume cpkt", "--resume cpkt: not found; did you mean ckpt?"),
    ("text --resume mine", "mine: no complete checkpoint found"),
    ("text model.num_layers=3 --resume ckpt", "checkpoint of another model (model.num_layers 2"),
    ("verify-checkpoint cpkt", "cpkt: directory not found; did you mean ckpt?"),
    ("inspect-checkpoint mine", "mine: no complete checkpoint found"),
    ("sample words.txt", "words.txt: expected a directory, got a file"),
    ("sample untold --prompt hi", "untold: contains no tokenizer"),
    ("sample adapted", "only PEFT adapters, without the model"),
    ("consolidate-checkpoint ckpt mine", "mine: already exists; pass --overwrite"),
    ("tokenize words.txt words.tok", "words.tok: expected a name that ends in .bin"),
    ("tokenize words.txt t.bin", "t.bin: already exists; pass --overwrite"),
    # models and conversations
    ("shard-checkpoint org/name y", "hf download org/name"),
    ("estimate-memory model=org/name", "hf download org/name"),
    ("train model=hf model.path=modle", "model.path=modle: no such directory; did you mean mod"),
    ("train model=hf model.path=words.txt", "model.path=words.txt: expected a directory or a .gg"),
    ("train model.path=model", "model.path=model: only valid with model=hf"),
    ("hf data.path=words.txt data=chat", "words.txt, line 1: not JSON", ".jsonl"),
    ("hf data.path=empty.jsonl", "empty.jsonl: empty; expected at least one row"),
    ("hf data.path=qa.jsonl", "keys answer, question", "; rename answer to output"),
    ("hf data.path=pr.jsonl", "keys prompt, response", "; rename prompt to instruction"),
    ("hf data.path=typo.jsonl", "keys mesages", "did you mean messages?"),
    ("train --dry-run model=hf model.path=untold data.path=chats.jsonl", "data.tokenizer=DIR"),
    ("text model.lora.rank=4 model.lora.targets=q_porj", "did you mean q_proj?"),
    ("text model.trainable=[layers.11]", "layers.11 matches no parameter name"),
    ("text model.router_aux_loss=global", "model.router_aux_loss=global: only valid with a"),
    ("text model.num_heads=5", "model=llama_tiny", "not a multiple of the number of attention"),
    ("text model.vocab_size=100", "model.vocab_size=100: smaller", "256"),
    ("text model.head_dim=3", "model.head_dim=3: rotary embeddings need an even width"),
    # ranks and batches
    ("estimate-memory cluster=h100 strategy=hybrid_shard strategy.dp_shard_size=3", "divide the 8"),
    ("estimate-memory cluster=h100 engine=ddp", "expected no_shard"),
    ("estimate-memory cluster=h100 engine=fsdp2 strategy=no_shard", "full_shard"),
    ("text launch.nproc_per_node=2 train.context_parallel=3", "expected a divisor of the 2"),
    ("text launch.nproc_per_node=2 train.global_batch_size=1", "size=1: expected at least 2"),
    ("text train.micro_batch_size=9", "train.micro_batch_size=9"),
    ("text launch.nproc_per_node=2 accumulation.steps=3", "accumulation.steps=3"),
    ("text launch.device=cuda launch.nproc_per_node=99", "no CUDA device"),
    ("text train.seq_len=100000", "train.seq_len=100000: above model.max_seq_len"),
    ("text model.max_seq_len=1e6 train.seq_len=30000", "longer than the data"),
    ("text data.val_fraction=0.0005", "longer than the validation data"),
    ("text strategy.owner_map=balanced", "only valid with strategy=shard_optimizer"),
    ("text strategy.dp_shard_size=2", "only valid with hybrid strategies"),
    ("text optimizer.momentum=0.5", "optimizer.momentum=0.5: only valid with optimizer=sgd or"),
    ("nodes launch.rdzv_endpoint=node0", "launch.rdzv_endpoint=node0: expected HOST:PORT"),
    ("nodes launch.rdzv_endpoint=node0:99999", "node0:99999: expected HOST:PORT"),
    ("nodes launch.node_rank=2", "launch.node_rank=2: expected 0 to 1"),
    ("text launch.node_rank=1", "require several nodes; set launch.nnodes"),
    ("train launch.nnodes=2", "launch.nnodes=2: run the command on each node", "node_rank=0 to 1"),
]  # fmt: skip
CONFIG_JSON = [
    ({"dtype": "float7"}, "dtype float7: expected bfloat16, float16"),
    ({"torch_dtype": "bf16"}, "did you mean bfloat16?"),
    ({"use_cache": "x"}, "use_cache x: expected true, false"),
    ({"pad_token_id": 320}, "config.json", "Padding_idx must be within num_embeddings"),
    ({"num_hidden_layers": "3"}, "num_hidden_layers 3: expected a whole number"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings yes: expected true or false"),
    ({"rms_norm_eps": None}, "rms_norm_eps None: expected a number"),
    ({"num_attention_heads": 5}, "The hidden size (48) is not a multiple of"),
    ({"hidden_act": "sillu"}, "hidden_act 'sillu': not known; did you mean silu?"),
    ({"rope_parameters": {"rope_type": "foo", "rope_theta": 1e4}}, "rope_type 'foo': not known"),
    ({"model_type": "lama"}, "model_type lama", "did you mean llama?"),
]  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A directory with the files that the mistakes are about."""
    folder = tmp_path_factory.mktemp("world")
    make_text(folder)
    make_chats(folder / "chats.jsonl")
    make_chat_model(folder / "model", "llama")
    make_chat_model(folder / "untold", "llama")
    for file in (folder / "untold").glob("tokenizer*"):
        file.unlink()
    make_checkpoint(folder / "ckpt" / "step-00000001")
    cut = shutil.copytree(folder / "ckpt" / "step-00000001", folder / "cut")
    (cut / "manifest.json").write_text("{")
    make_tokens(folder / "t.bin")
    make_run(folder / "one", done=1)
    make_run(folder / "two", done=2)
    os.mkfifo(folder / "fifo")
    rows = {"qa": ("question", "answer"), "pr": ("prompt", "response"), "typo": ("mesages",)}
    contents = {f"{each}.jsonl": json.dumps(dict.fromkeys(rows[each], "a")) for each in rows}
    contents |= {
        "empty.txt": "", "empty.jsonl": "", "x.pdf": "%PDF", "x.zip": "PK", "x.png": "PNG",
        "x.safetensors": "x", "mine/thesis.txt": "years of work", "damaged/config.yaml": "a: [",
        "adapted/adapter_config.json": "{}",
        "recipe.yaml": "train.steps: 7\n", "unknown.yml": "a: 1\n",
        "axolotl.yml": "base_model: x\nlearning_rate: 1e-4\ndatasets: [{path: x, type: alpaca}]\n",
    }  # fmt: skip
    (folder / "latin.txt").write_bytes(b"abc\xff")
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    return folder


@pytest.fixture
def answer(world, monkeypatch, capsys):
    """Run arguments in `world`; return the exit code and the only line on standard error."""
    monkeypatch.chdir(world)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv("FSDPCTL_QUIET", "1")  # slow commands print no activity

    def typed(args: list[str]) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["fsdpctl", *args])
        before = sorted(world.rglob("*"))
        with pytest.raises(SystemExit) as ended:
            main()
        assert sorted(world.rglob("*")) == before
        (line,) = capsys.readouterr().err.splitlines()
        return int(str(ended.value.code)), line.removeprefix("fsdpctl: ")

    return typed


@pytest.mark.parametrize(("typed", "parts"), [(typed, parts) for typed, *parts in TABLE])
def test_a_mistake_has_an_answer_of_one_line(answer, typed, parts):
    first, *rest = typed.split()
    names = {arg.partition("=")[0] for arg in rest}
    before = [arg for arg in BEGINNINGS.get(first, [first]) if arg.partition("=")[0] not in names]
    code, line = answer([*before, *rest])
    assert (code, [part for part in parts if part not in line]) == (2, []), line


@pytest.mark.parametrize(("change", "parts"), [(change, parts) for change, *parts in CONFIG_JSON])
def test_an_odd_value_of_config_json_is_named(answer, world, tmp_path, change, parts):
    folder = shutil.copytree(world / "model", tmp_path / "odd")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | change))
    code, line = answer(["train", "--dry-run", "model=hf", f"model.path={folder}"])
    parts = [str(folder), "config.json", *parts]
    assert (code, [part for part in parts if part not in line]) == (2, []), line


def test_what_has_no_effect_is_printed(world, monkeypatch):
    monkeypatch.chdir(world)
    args = [*TEXT, "launch.device=cpu", "strategy=fsdp"]
    code, out = invoke(*args)
    assert (code, "strategy=fsdp: runs as full_shard" in out) == (0, True)
    code, out = invoke(*args, "cluster=2xh100")
    assert (code, out.partition(" CPU")[0]) == (2, "cluster=2xh100: this machine is a")


def test_heads_of_gpt2_are_set_by_one_key(world, monkeypatch):
    monkeypatch.chdir(world)
    args = ["model=gpt2", "model.num_heads=4", "model.num_layers=1", "data.path=words.txt"]
    code, out = invoke("train", "--dry-run", *args)
    assert code == 0, out


@pytest.mark.parametrize(("code", "args", "error"), [
    (1, ["compare-runs", "one", "two", "--assert-equal"], "differ"),
    (2, ["train", "train.stepz=3"], "train.stepz: no such key; did you mean"),
    (2, ["train", "--recipe", "quick", "--recipe=quick"], "--recipe: given 2 times; pass it once"),
    (3, [*BEGINNINGS["run"], "launch.device=cpu", "cluster.memory=2MiB"], "2.0 MiB available"),
    (4, ["verify-checkpoint", "cut"], "cut"),
])  # fmt: skip
def test_a_command_ends_with_its_exit_code(answer, code, args, error):
    """test_run.py and test_requests.py test the codes 0, 75, 76 and 130, test_self_check 77."""
    result, line = answer([*args, "-q"])
    assert (result, error in line) == (code, True), line


@pytest.mark.parametrize(("typed", "expected", "is_quiet"), [
    ("train -q a=1", "train a=1", True), ("--quiet train", "train", True),
    ("train", "train", False), ("sample m --prompt -q", "sample m --prompt -q", False),
])  # fmt: skip
def test_quiet_may_have_any_place_and_is_no_prompt(monkeypatch, typed, expected, is_quiet):
    seen: list[list[str]] = []
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr("fsdpctl.commands.app.app", lambda args, **_: seen.append(args))
    monkeypatch.setenv("FSDPCTL_QUIET", "")
    monkeypatch.setattr("sys.argv", ["fsdpctl", *typed.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, seen) == (0, [expected.split()])
    assert bool(os.environ["FSDPCTL_QUIET"]) == is_quiet


@pytest.fixture
def args(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return [*TINY, f"data.path={make_text(tmp_path)}", "train.steps=10"]


@pytest.mark.parametrize(("count", "fraction", "error"), [
    (533, 0, "1,599 tokens are too few to train on; expected"),
    (534, 0.02, "1,570 tokens are too few to train on (data.val_fraction=0.02 keeps 32 more"),
], ids=["whole", "shared"])  # fmt: skip
def test_too_little_data_is_refused_unless_a_length_is_set(args, tmp_path, count, fraction, error):
    (tmp_path / "words.txt").write_text("abc" * count)
    remaining = [arg for arg in args if not arg.startswith(("train.seq_len", "data.val_fraction"))]
    little = [*remaining, f"data.val_fraction={fraction}", "--dry-run"]
    code, text = invoke("train", *little)
    assert (code, error in text, "set train.seq_len" in text, "\n" in text.strip()) == (
        2, True, True, False,
    ), text  # fmt: skip
    code, text = invoke("train", *little, "train.seq_len=2")
    assert code == 0, text


def test_too_few_chats_train_with_a_warning(tmp_path):
    chats, model = make_chats(tmp_path / "chats.jsonl", 1), make_chat_model(tmp_path, "llama")
    few = ["model=hf", f"model.path={model}", "data=chat", f"data.path={chats}", "--dry-run"]
    code, text = invoke("train", *few)
    assert (code, "; only 1: set train.epochs or a smaller" in text) == (0, True), text
    assert "of 64 tokens (default)" in text


def test_dry_run_shows_the_plan_and_writes_nothing(args, tmp_path):
    code, out = invoke("train", "--dry-run", *args)
    assert code == 0
    for part in ("per rank, estimated", "it would run", r"cpu \(default\), \d+ threads? each on "):
        assert re.search(part, out)
    assert [each.name for each in tmp_path.iterdir()] == ["words.txt"]


@pytest.mark.slow
def test_dry_run_of_a_large_model_needs_no_memory(args):
    code, out = invoke("train", "--dry-run", "model=llama3_405b", "launch.nproc_per_node=8",
                     "data=text", f"data.path={Path('args.txt').resolve()}",
                     "train.require_fit=false")  # fmt: skip
    assert (code, "405.8" in out) == (0, True)


def test_print_config_is_a_recipe(args, tmp_path):
    code, printed = invoke("train", "--print-config", *args)
    assert code == 0
    (tmp_path / "mine.yaml").write_text(printed)
    code, again = invoke("train", "--print-config", "--recipe", "mine.yaml")
    assert {"typed", "derived"} == set(re.findall("  # ([a-z]+)\n", printed))
    assert {"recipe"} == set(re.findall("  # ([a-z]+)\n", again))
    assert re.sub("  # .*", "", again) == re.sub("  # .*", "", printed)


def test_list_shows_choices_and_keys():
    code, out = invoke("list")
    assert (code, "quick" in out, "full_shard" in out) == (0, True, True)
    for group in ("model", "strategy", "train", "data", "checkpoint"):
        code, out = invoke("list", group)
        assert (code, f"{group}." in out) == (0, True)


@pytest.mark.parametrize("name", ["data.packing", "checkpoint.every", "model.lora"])
def test_list_shows_a_key_or_the_keys_of_a_subsection(name):
    code, out = invoke("list", name)
    assert (code, f"{name}" in out, "data.path" in out) == (0, True, False)
    code, out = invoke("list", name, "--json")
    assert all(each["name"].startswith(name) for each in json.loads(out)[0]["keys"])


def test_every_command_has_a_help_text():
    for name in COMMANDS:
        code, out = invoke(name, "--help")
        assert (code, "Usage" in out, "--help" in out) == (0, True, True)
    assert "Hugging Face directory" in " ".join(invoke("sample", "--help")[1].split())


def test_tokenize_makes_what_data_tokens_takes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_text(tmp_path)
    assert invoke("tokenize", "words.txt", "words.bin")[0] == 0
    header = json.loads(Path("words.json").read_text())
    assert (header["dtype"], header["tokenizer"]) == ("uint16", "bytes")
    tiny = [arg for arg in TINY if arg != "data=text"]
    code, out = invoke("train", "--dry-run", *tiny, "data=tokens", "data.path=words.bin")
    assert (code, "(bytes)" in out) == (0, True)
