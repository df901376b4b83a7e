"""Runs that add tokens to the tokenizer: embedding rows, files, and exact resuming."""

import json
import re
import shutil
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fsdpctl.checkpoint.initial_weights import initial_weights
from fsdpctl.checkpoint.staging import tensor_from_bytes
from fsdpctl.config.compose import compose_config
from fsdpctl.errors import UsageError
from fsdpctl.estimate.estimator import Estimator
from fsdpctl.models.build_model import build_model
from fsdpctl.resolve.launchers import ESTIMATE_ROLE
from fsdpctl.resolve.prepare import prepare
from fsdpctl.resolve.run_plan import make_run_plan
from tests.commands.run import invoke
from tests.matrix import fast
from tests.training.chats import make_chat_model, make_chats
from tests.training.ranks import resolved
from tests.training.test_lora import losses, newest, run

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
NEW = ["<|im_start|>", "<|im_end|>"]
ROWS, PADDED = 312, 320
LORA = ["model.lora.rank=4", "model.lora.also=embed_tokens,lm_head"]


def make_base(folder: Path, family: str) -> Path:
    """Make a chat model whose tokenizer lacks the tokens NEW of its template; it has ROWS rows."""
    make_chat_model(folder, family)
    file = folder / "tokenizer.json"
    options = json.loads(file.read_text())
    options["added_tokens"] = [x for x in options["added_tokens"] if x["content"] not in NEW]
    vocabulary = options["model"]["vocab"]
    for number, text in enumerate(NEW):
        vocabulary[f"unused{number}"] = vocabulary.pop(text)
    file.write_text(json.dumps(options))
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(ROWS)
    model.save_pretrained(folder)
    return folder


def new_token_args(folder: Path, family: str, *more: str) -> list[str]:
    base = folder / "base"
    if not base.exists():
        make_base(base, family)
        make_chats(folder / "chats.jsonl")
    return [
        "model=hf", f"model.path={base}", "data=chat", f"data.path={folder / 'chats.jsonl'}",
        f"data.new_tokens={json.dumps(NEW)}", "data.val_fraction=0", "train.seq_len=32",
        "train.global_batch_size=4", "train.sample_tokens=0", "optimizer.lr=1e-2",
        "lr_scheduler=constant", "checkpoint.mode=sync", "checkpoint.every=2",
        "launch.nproc_per_node=2", "launch.device=cpu", f"train.run_dir={folder / 'run'}", *more,
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("family", ["llama", "qwen3 tied"])
def test_new_rows_are_the_mean_of_the_others(tmp_path, family):
    config = resolved(new_token_args(tmp_path, family, *LORA))
    assert (config.model.vocab_size, config.model.first_new_token) == (PADDED, ROWS)
    weights = initial_weights(config.model, build_model(config.model), 0)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    for name, old in base.named_parameters():
        if len(old) == ROWS:
            key = f"model/{name}"
            parts = [tensor_from_bytes(x, "F32").clone() for _, x in weights.read(key)]
            new = torch.cat(parts).view(weights.info(key).shape)
            assert torch.equal(new[:ROWS], old)
            assert (new[ROWS:] - old.mean(0)).abs().max() <= 1e-6
            assert len(new) == PADDED


@pytest.mark.slow
@pytest.mark.parametrize("family", fast("qwen3 tied", slow=["llama"]))
@pytest.mark.parametrize("more", fast(LORA, slow=[[]]))
def test_a_stopped_run_resumes_bit_for_bit_and_its_exports_agree(tmp_path, family, more):
    typed = new_token_args(tmp_path, family, *more)
    whole = run([*typed, "train.steps=4"], 2, tmp_path / "whole")
    expected = losses(tmp_path)
    shutil.rmtree(tmp_path / "run")
    run([*typed, "train.steps=2"], 2, tmp_path / "first")
    resumed = run([*typed, "train.steps=4"], 2, tmp_path / "resumed")
    assert losses(tmp_path) == expected
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    estimate = Estimator().estimate(
        make_run_plan(prepare(compose_config([*typed, "train.steps=4"]), ESTIMATE_ROLE).config)
    )
    stored = newest(tmp_path)
    assert sum(stored.info(x).nbytes for x in stored.manifest.tensors) == estimate.checkpoint_bytes
    source, merge = str(tmp_path / "run"), ["--merge"] if more else []
    assert invoke("consolidate-checkpoint", source, str(tmp_path / "hf"), *merge)[0] == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.convert_tokens_to_ids(NEW) == [ROWS, ROWS + 1]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    tokens = torch.arange(PADDED - 20, PADDED).view(1, -1)
    if more:
        to_peft = (str(tmp_path / "p"), "--format", "peft")
        assert invoke("consolidate-checkpoint", source, *to_peft)[0] == 0
        data = [arg for arg in typed if arg.startswith(("data", "train.seq_len"))]
        args = [str(tmp_path / "base"), f"model.lora.path={tmp_path / 'p'}", *data]
        results = [invoke("evaluate", *each)[1] for each in ([source], args)]
        assert len({*map(str, (re.findall("loss .*", each) for each in results))}) == 1, results
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
        base.resize_token_embeddings(PADDED)
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "p")
        assert len(AutoTokenizer.from_pretrained(tmp_path / "p")) == ROWS + len(NEW)
        with torch.no_grad():
            assert (adapted(tokens).logits - merged(tokens).logits).abs().max() <= 1e-5


@pytest.mark.parametrize("saved", fast([], slow=[["embed_tokens"]]))
@pytest.mark.parametrize("has_new", fast(True, slow=[False]))
def test_adapters_use_their_tokenizer_if_it_has_new_tokens(tmp_path, saved, has_new):
    """The base model has spare rows for the new tokens."""
    base, adapters = make_base(tmp_path / "base", "llama"), tmp_path / "adapters"
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(NEW if has_new else [], special_tokens=True)
    tokenizer.save_pretrained(adapters)
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(PADDED)
    model.save_pretrained(base)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=saved)
    peft.get_peft_model(model, lora).save_pretrained(adapters)
    (tmp_path / "text.txt").write_text("Hello, it is. " * 999)
    data = ["data=text", f"data.path={tmp_path / 'text.txt'}", "train.seq_len=32"]
    args = ["model=hf", f"model.path={base}", f"model.lora.path={adapters}", *data]
    config = resolved([*args, "train.steps=1", f"train.run_dir={tmp_path / 'run'}"])
    assert config.data.tokenizer == str(adapters if has_new else base)
    assert (config.model.vocab_size, config.model.first_new_token) == (PADDED, None)


@pytest.mark.parametrize(("more", "error"), [
    (["data.new_tokens=[a,a]"], r"data.new_tokens=\[a,a\]: expected different texts"),
    (["data.new_tokens=[[INST],[/INST]]"], "or as JSON"),
    (["data.tokenizer=bytes", "data=text"], "requires a model's tokenizer"),
    (["data=tokens"], "only valid with data=text or data=chat"),
])  # fmt: skip
def test_new_tokens_that_cannot_be_added_are_refused(tmp_path, more, error):
    typed = dict(arg.split("=", 1) for arg in [*new_token_args(tmp_path, "llama"), *more])
    with pytest.raises(UsageError, match=error):
        resolved([f"{name}={text}" for name, text in typed.items()])
