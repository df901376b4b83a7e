"""Exports for llama.cpp, read field by field with the library that defines the format."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from fsdpctl.checkpoint import manifest, tensor_file
from fsdpctl.checkpoint.consolidate import write_sharded_weights
from fsdpctl.checkpoint.gguf_export import _SAMPLE_TEXTS, _find_pre_tokenizer, write_gguf
from fsdpctl.checkpoint.pretrained import open_weights, read_model_assets
from fsdpctl.checkpoint.publish import CheckpointMetadata
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.config.compose import compose_config
from fsdpctl.config.serialize import to_settings
from fsdpctl.data.tokenizer import ByteTokenizer
from fsdpctl.errors import UsageError
from tests.models.families import FAMILIES, save_model

_NOT_WRITTEN = ("gpt2", "llama gelu", "gemma", "phi3")
LLAMAS = [name for name in FAMILIES if not name.startswith(_NOT_WRITTEN)]
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def sharded(
    family: str, folder: Path, args: Sequence[str] = (), tokenizer: dict[str, bytes] | None = None
) -> CheckpointReader:
    save_model(family, folder / "in")
    config = compose_config(["model=hf", f"model.path={folder / 'in'}", *args]).config
    options = CheckpointMetadata(
        config=to_settings(config),
        attachments=read_model_assets(folder / "in") | (tokenizer or ByteTokenizer().files()),
    )
    weights = open_weights(config.model)
    write_sharded_weights(weights, folder / "sharded", num_files=3, metadata=options)
    return CheckpointReader(folder / "sharded")


def values_of(tensor: gguf.ReaderTensor, shape: tuple[int, ...]) -> torch.Tensor:
    raw = torch.from_numpy(np.ascontiguousarray(tensor.data).view(np.uint8).reshape(-1).copy())
    return raw.view(FLOATS[tensor.tensor_type.name]).view(shape)


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_matrices_are_cast_and_vectors_are_not(dtype, tmp_path):
    write_gguf(sharded("qwen2", tmp_path), tmp_path / "out", dtype=dtype, overwrite=False)
    saved = load_file(tmp_path / "in" / "model.safetensors")
    written = {each.name: each for each in GGUFReader(tmp_path / "out" / "model.gguf").tensors}
    kinds = {each.tensor_type.name: len(each.shape) for each in written.values()}
    assert kinds == {dtype: 2, "F32": 1}
    expected = saved["model.layers.1.mlp.up_proj.weight"].to(FLOATS[dtype])
    assert torch.equal(values_of(written["blk.1.ffn_up.weight"], tuple(expected.shape)), expected)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_head_that_crosses_a_chunk_of_its_file_is_exported_whole(family, tmp_path, monkeypatch):
    """llama.cpp reorders the rows of each query and key head, which are read together."""
    contents = []
    for size in (tensor_file.CHUNK_BYTES, 256):
        for module in (manifest, tensor_file):
            monkeypatch.setattr(module, "CHUNK_BYTES", size)
        folder = tmp_path / str(size)
        write_gguf(sharded(family, folder), folder / "out", dtype="F32", overwrite=False)
        tensors = GGUFReader(folder / "out" / "model.gguf").tensors
        contents.append({each.name: np.array(each.data).tobytes() for each in tensors})
    assert contents[0] == contents[1]


def test_the_fields_describe_the_model(tmp_path):
    reader = sharded("llama 3.1", tmp_path)
    exported = write_gguf(reader, tmp_path / "m.gguf", dtype="F32", overwrite=False)
    file = GGUFReader(exported.path)
    fields = {name: field.contents() for name, field in file.fields.items()}
    assert (exported.notes, exported.num_bytes) == ((), exported.path.stat().st_size)
    for name, value in {
        "general.architecture": "llama", "general.file_type": 0, "llama.block_count": 3,
        "llama.context_length": 64, "llama.embedding_length": 48,
        "llama.feed_forward_length": 80, "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2, "llama.attention.key_length": 12,
        "llama.attention.value_length": 12, "llama.rope.dimension_count": 12,
        "llama.rope.freq_base": 500.0, "llama.vocab_size": 320,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.add_bos_token": False,
    }.items():  # fmt: skip
        assert fields[name] == value
    assert fields["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)
    tokens = fields["tokenizer.ggml.tokens"]
    alphabet = json.loads(ByteTokenizer().files()["tokenizer.json"])["model"]["vocab"]
    assert {text: tokens.index(text) for text in alphabet} == alphabet
    assert tokens[256:] == [f"[PAD{number}]" for number in range(256, 320)]
    assert fields["tokenizer.ggml.token_type"] == [1] * 256 + [5] * 64
    factors = values_of(next(t for t in file.tensors if "rope" in t.name), (6,))
    theirs = FAMILIES["llama 3.1"].rope_parameters
    plain = 1 / 500.0 ** (torch.arange(0, 12, 2) / 12)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    stretched, _ = ROPE_INIT_FUNCTIONS[theirs["rope_type"]](FAMILIES["llama 3.1"], None)
    assert torch.allclose(plain / factors, stretched, rtol=1e-5)


def test_a_tokenizer_file_without_a_type_is_supported(tmp_path):
    files = ByteTokenizer().files()
    options = json.loads(files["tokenizer.json"])
    del options["model"]["type"]
    for name, tokenizer in (
        ("new", files),
        ("old", {"tokenizer.json": json.dumps(options).encode()}),
    ):
        reader = sharded("llama", tmp_path / name, tokenizer=files | tokenizer)
        exported = write_gguf(reader, tmp_path / f"{name}.gguf", dtype="F32", overwrite=False)
        assert exported.notes == ()
    assert (tmp_path / "old.gguf").read_bytes() == (tmp_path / "new.gguf").read_bytes()


def test_features_that_llama_cpp_lacks_are_reported(tmp_path):
    reader = sharded("mistral window", tmp_path)
    exported = write_gguf(reader, tmp_path / "m.gguf", dtype="F32", overwrite=False)
    assert "context length 9" in exported.notes[0]
    assert GGUFReader(exported.path).fields["llama.context_length"].contents() == 9
    with pytest.raises(UsageError, match="already exists"):
        write_gguf(reader, tmp_path / "m.gguf", dtype="F32", overwrite=False)
    before = exported.path.read_bytes()
    write_gguf(reader, tmp_path / "m.gguf", dtype="F32", overwrite=True)
    assert exported.path.read_bytes() == before


def splitting(*steps: str | Any, **byte_level: bool) -> Any:
    """Return a sequence of expressions and pre-tokenizers that ends with ByteLevel."""
    parts = [pre_tokenizers.Split(Regex(x), "isolated") if isinstance(x, str) else x for x in steps]
    last = pre_tokenizers.ByteLevel(**{"add_prefix_space": False, "use_regex": False} | byte_level)
    return pre_tokenizers.Sequence([*parts, last])


def tokenizer(pre_tokenizer: Any, normalizer: Any = None, size: int = 700) -> dict[str, Any]:
    """Train a tokenizer on the sample texts that determine the name."""
    result = Tokenizer(models.BPE())
    result.pre_tokenizer, result.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalizer is not None:
        result.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    result.train_from_iterator([*_SAMPLE_TEXTS, "isn't it 1234 of 99 in 2024?\n\n"] * 9, trainer)
    content: dict[str, Any] = json.loads(result.to_str())
    return content


DIGITS = pre_tokenizers.Digits(individual_digits=True)
NAMES = {
    "gpt-2": splitting(use_regex=True), "smollm": splitting(DIGITS, use_regex=True),
    "llama-bpe": splitting(GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"]),
    "qwen2": splitting(GGUF_PRE_TOKENIZER_SPLITS["qwen2"]),
    "qwen35": splitting(GGUF_PRE_TOKENIZER_SPLITS["qwen35"]),
    "tekken": splitting(GGUF_PRE_TOKENIZER_SPLITS["tekken"]),
    "gpt-4o": splitting(GGUF_PRE_TOKENIZER_SPLITS["gpt-4o"]),
}  # fmt: skip
UNKNOWN = {
    "deepseek without Chinese": splitting(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DIGITS),
    "numbers": splitting(pre_tokenizers.Digits(), use_regex=True),
    "prefix": splitting(use_regex=True, add_prefix_space=True),
    "punctuation": splitting(pre_tokenizers.Punctuation(), use_regex=True),
    "llama and digits": splitting(DIGITS, GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"]),
    "falcon": splitting(pre_tokenizers.Punctuation("contiguous"), pre_tokenizers.Digits()),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_splitter_that_gives_the_same_tokens_is_found(name):
    assert _find_pre_tokenizer(tokenizer(NAMES[name])) == name
    assert _find_pre_tokenizer(tokenizer(NAMES[name], normalizers.NFC())) == name


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_splitter_that_gives_other_tokens_has_no_name(name):
    assert _find_pre_tokenizer(tokenizer(UNKNOWN[name])) == ""


def test_a_splitter_that_llama_cpp_approximates_has_a_note(tmp_path):
    files = {"tokenizer.json": json.dumps(tokenizer(NAMES["tekken"], size=300)).encode()}
    reader = sharded("llama", tmp_path, tokenizer=files)
    exported = write_gguf(reader, tmp_path / "m", dtype="F32", overwrite=False)
    note = "tokens of non-ASCII words may differ: llama.cpp approximates the pre-tokenizer tekken"
    assert exported.notes == (note,)
    assert GGUFReader(exported.path).fields["tokenizer.ggml.pre"].contents() == "tekken"


def test_what_changes_texts_before_they_are_split_has_no_name():
    for each in (normalizers.NFKC(), normalizers.Lowercase(), normalizers.Prepend(" ")):
        assert _find_pre_tokenizer(tokenizer(NAMES["gpt-2"], each)) == ""


def test_a_file_without_a_known_splitter_has_no_tokenizer_and_says_so(tmp_path):
    files = {"tokenizer.json": json.dumps(tokenizer(UNKNOWN["punctuation"], size=300)).encode()}
    reader = sharded("llama", tmp_path, tokenizer=files)
    exported = write_gguf(reader, tmp_path / "m", dtype="F32", overwrite=False)
    note = "no tokenizer: llama.cpp does not have the pre-tokenizer of the run's tokenizer"
    assert exported.notes == (note,)
    assert GGUFReader(exported.path).fields["tokenizer.ggml.model"].contents() == "none"


@pytest.mark.parametrize("family", ["gpt2", "llama gelu"])
def test_other_models_are_rejected(family, tmp_path):
    with pytest.raises(UsageError, match="--format gguf"):
        write_gguf(sharded(family, tmp_path), tmp_path / "m", dtype="F32", overwrite=False)
    assert not (tmp_path / "m").exists()
