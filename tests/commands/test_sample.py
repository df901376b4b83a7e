"""`fsdpctl sample`: text from a checkpoint, and errors."""

import random
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from tokenizers import Tokenizer as JsonTokenizer
from tokenizers.decoders import Metaspace
from tokenizers.models import WordLevel

from fsdpctl.commands import sample
from fsdpctl.commands.sample import sample_text
from fsdpctl.data.tokenizer import ByteTokenizer, FileTokenizer
from fsdpctl.engine import blocks
from fsdpctl.errors import FsdpctlError, UsageError
from fsdpctl.training.callbacks.generation import Sampling, sample_token
from tests.checkpoint.test_gguf import sharded
from tests.commands.run import invoke
from tests.hostile import make_checkpoint, make_hugging_face


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a run with compiled blocks."""
    folder = tmp_path_factory.mktemp("sample")
    sharded("llama", folder, ["train.compile=true", "data.tokenizer=bytes", "train.seq_len=32"])
    return folder / "sharded"


def test_nothing_is_compiled_for_it(checkpoint, monkeypatch):
    def refuse(block: object) -> NoReturn:
        raise AssertionError(block)

    monkeypatch.setattr(blocks, "compile_block", refuse)
    text = "".join(sample_text(checkpoint, "some ", 4, Sampling(0)))
    assert text.startswith("some ")
    assert text == "".join(sample_text(checkpoint, "some ", 4, Sampling(0)))


def test_a_prompt_that_is_no_text_is_refused(checkpoint):
    with pytest.raises(UsageError, match="--prompt: not UTF-8"):
        next(sample_text(checkpoint, "caf\udce9", 4, Sampling(0)))


def allocate_too_much() -> None:
    torch.empty(1 << 60)


def run_out_of_device_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def fail_otherwise() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize(("fail", "error", "message"), [
    (allocate_too_much, FsdpctlError, "sharded: does not fit into memory on "),
    (run_out_of_device_memory, FsdpctlError, "sharded: does not fit into memory on "),
    (fail_otherwise, RuntimeError, "illegal memory access"),
])  # fmt: skip
def test_want_of_memory_is_said_in_one_line(checkpoint, monkeypatch, fail, error, message):
    monkeypatch.setattr(sample, "generate", lambda *args, **kwargs: fail())
    with pytest.raises(error, match=message):
        list(sample_text(checkpoint, "some ", 4, Sampling(0)))


def test_tokens_are_drawn_as_asked():
    logits = torch.tensor([1.0, 3.0, 2.0, -4.0])
    generator = torch.Generator().manual_seed(0)

    def drawn(**kwargs: Any) -> set[int]:
        return {sample_token(logits, Sampling(0, **kwargs), generator) for _ in range(300)}

    assert drawn(temperature=0.0) == {1}
    assert drawn(temperature=1.0, top_p=0.6) == {1}  # its probability is two thirds
    assert drawn(temperature=1.0, top_p=0.7) == {1, 2}
    assert drawn(temperature=1.0) >= {0, 1, 2}
    assert drawn(temperature=50.0) == {0, 1, 2, 3}


def test_the_command_takes_them(checkpoint):
    args = ("sample", str(checkpoint), "--tokens", "6", "--greedy", "--seed")
    out = [invoke(*args, seed) for seed in ("1", "2")]
    assert (out[0], out[0][0]) == (out[1], 0)
    assert invoke("sample", str(checkpoint), "--top-p", "0")[0] == 2


def test_an_export_says_the_same(tmp_path):
    checkpoint = make_checkpoint(tmp_path / "step-00000001")
    folder = make_hugging_face(checkpoint, tmp_path / "hf")
    args = ["--prompt", "line", "--tokens", "8", "--greedy"]
    out = [invoke("sample", str(each), *args) for each in (checkpoint, folder)]
    assert (out[0], out[0][0]) == (out[1], 0)


@pytest.mark.parametrize("seed", range(4))
def test_text_arrives_in_pieces_of_whole_characters(seed):
    generator = random.Random(seed)
    text = "".join(generator.choice("aé€😀 \n") for _ in range(40)).encode()
    cut = [byte for byte in text if generator.random() < 0.9]  # some characters lack a byte
    for tokens in (list(text), cut):
        for tokenizer in (ByteTokenizer(), FileTokenizer("bytes", ByteTokenizer().files())):
            pieces = [*tokenizer.decode_stream(tokens, [ord("x")])]
            assert "".join(pieces) == tokenizer.decode(tokens)
            assert len([*filter(None, pieces)]) > 20


@pytest.mark.parametrize("before", [[1, 2], []])
def test_spaces_between_pieces_are_kept(before):
    word_level = JsonTokenizer(WordLevel({f"▁w{n}": n for n in range(6)}, unk_token="▁w0"))
    word_level.decoder = Metaspace()
    tokenizer = FileTokenizer("words", {"tokenizer.json": word_level.to_str().encode()})
    text = "".join(tokenizer.decode_stream([3, 4, 5], before))
    assert text == (" w3 w4 w5" if before else "w3 w4 w5")
