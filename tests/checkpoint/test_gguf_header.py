"""GGUF headers are read as the format and llama.cpp define them; errors name contradictions."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFValueType, GGUFWriter

from fsdpctl.checkpoint.gguf_export import write_gguf
from fsdpctl.config.gguf_model import config_of_gguf, notes_on_gguf
from fsdpctl.data.tokenizer import ByteTokenizer, open_tokenizer
from fsdpctl.errors import UsageError
from fsdpctl.io.gguf_header import read_header
from tests.checkpoint.test_gguf import sharded
from tests.checkpoint.test_gguf_weights import write_other
from tests.commands.run import invoke

KINDS = {
    int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING,
    bool: GGUFValueType.BOOL, list: GGUFValueType.ARRAY,
}  # fmt: skip
TOKENS = "tokenizer.ggml.tokens"
SIZES = {
    "context_length": 64, "block_count": 1, "embedding_length": 64, "feed_forward_length": 96,
    "attention.head_count": 4, "attention.layer_norm_rms_epsilon": 1e-3, TOKENS: ["a", "b", "c"],
}  # fmt: skip


def write(path: Path, kind: str, keys: dict[str, Any], shape: Any = (100, 64)) -> Path:
    """Write a file with few tensors and these keys; None leaves a key out."""
    keys = {**SIZES, **keys}
    writer = GGUFWriter(path, kind)
    writer.data_alignment = keys.get("general.alignment") or 32
    for name, value in keys.items():
        if value is not None:
            key = name if name.startswith(("general", "tokenizer", "split")) else f"{kind}.{name}"
            writer.add_key_value(key, value, KINDS[type(value)])
    writer.add_tensor("token_embd.weight", np.zeros(shape, np.float32))
    for number in range(keys["block_count"] if type(keys["block_count"]) is int else 1):
        writer.add_tensor(f"blk.{number}.ffn_up.weight", np.zeros((96, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(("key", "values", "expected"), [
    ("block_count", ["2", True, 1.0, [1], ["a"], -1.5, 0], "a whole number above 0"),
    ("attention.head_count", [[4, 4], "4", 0], "a whole number above 0"),
    ("attention.sliding_window", [["a"], 1.5, True], "a whole number"),
    ("attention.layer_norm_rms_epsilon", ["1", True, 0.0, float("nan")], "a number above 0"),
    ("rope.freq_base", [float("inf"), [1.0], -1.0], "a number above 0"),
    ("tokenizer.ggml.model", [1, ["gpt2"]], "a text"),
    ("tokenizer.chat_template", [True, ["a"]], "a text"),
    (TOKENS, [3, "abc", [1, 2, 3]], "a list of texts"),
    ("tokenizer.ggml.scores", [3, ["a"], [True]], "a list of numbers"),
    ("tokenizer.ggml.scores", [[1.0, 2.0]], "3 numbers, got 2"),
    ("tokenizer.ggml.add_bos_token", [1, "true"], "true or false"),
    ("tokenizer.ggml.eos_token_id", [3, 4_294_967_295], "a number below 3"),
])  # fmt: skip
def test_a_value_of_another_type_is_named(tmp_path, key, values, expected):
    for value in values:
        file = write(tmp_path / "m.gguf", "llama", {key: value})
        with pytest.raises(UsageError, match=rf"{file}: .*{key}.*: expected {expected}"):
            read_header(file)


@pytest.mark.parametrize(("keys", "problem"), [
    ({"context_length": None}, "llama.context_length: not found"),
    ({"attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon: not found"),
    ({"feed_forward_length": None}, "feed_forward_length: not found"),
    ({"expert_count": 1 << 31}, "expert_count=2147483648: larger than any tensor"),
    ({"attention.value_length": 8}, "value_length: expected 16"),
    ({"attention.scale": 0.5}, "attention.scale=0.5: not supported"),
    ({"rope.dimension_count": 32, "attention.key_length": 16}, "expected at most 16"),
    ({"vocab_size": 99}, "token_embd.weight has 100 rows, for 3 tokens and vocab_size=99"),
    ({TOKENS: ["a"] * 101}, "token_embd.weight has 100 rows, for 101 tokens"),
])  # fmt: skip
def test_sizes_that_contradict_one_another_are_named(tmp_path, keys, problem):
    with pytest.raises(UsageError, match=problem):
        config_of_gguf(write(tmp_path / "m.gguf", "llama", keys))


@pytest.mark.parametrize("shape", [(100,), (0, 64), (1, 100, 64), (100, 64, 1)])
def test_an_embedding_of_other_dimensions_is_named(tmp_path, shape):
    with pytest.raises(UsageError, match="token_embd.weight"):
        config_of_gguf(write(tmp_path / "m.gguf", "qwen2", {}, shape))


@pytest.mark.parametrize("alignment", [8, 24, 32, 64, 4096])
def test_every_alignment_of_the_format_opens(tmp_path, alignment):
    file = write(tmp_path / "m.gguf", "llama", {"general.alignment": alignment})
    assert read_header(file).tensors["token_embd.weight"].start % alignment == 0
    assert config_of_gguf(file)["hidden_size"] == 64


@pytest.mark.parametrize(
    ("alignment", "problem"), [(12, "a multiple of 8"), (0, "a multiple"), (1 << 31, "exceeds")]
)
def test_another_alignment_is_named(tmp_path, alignment, problem):
    file = write(tmp_path / "m.gguf", "llama", {"general.alignment": 32})
    old = b"general.alignment" + (4).to_bytes(4, "little")
    new = old + alignment.to_bytes(4, "little")
    file.write_bytes(file.read_bytes().replace(old + (32).to_bytes(4, "little"), new))
    with pytest.raises(UsageError, match=problem):
        read_header(file)


def of_experts(count: int) -> Any:
    return lambda writer: writer.add_expert_count(count)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_as_many_experts_as_the_file_says_are_in_its_tensors(tmp_path, count):
    file = write_other(tmp_path / "m.gguf", "qwen3moe", "F16", of_experts(count))
    args = ("model=hf", f"model.path={file}")
    for line in (
        invoke("sample", str(file), "--tokens", "2"),
        invoke("estimate-memory", *args, "cluster=h100"),
        invoke("shard-checkpoint", str(file), str(tmp_path / "out")),
    ):
        assert line[0] == 2, line
        assert f"expected shape [{count}, 256, 256], got [4, 256, 256]" in line[1]


@pytest.mark.parametrize(("kind", "keys", "expected"), [
    ("gemma2", {"block_count": 46}, {"query_pre_attn_scalar": 16}),
    ("gemma3", {"block_count": 62}, {"query_pre_attn_scalar": 16}),
    ("gemma3", {"attention.scale": 0.125}, {"query_pre_attn_scalar": 64}),
    ("gemma2", {"final_logit_softcapping": 7.0}, {"final_logit_softcapping": 7.0}),
    ("gemma3", {"rope.freq_base_swa": 5e3}, {"rope_local_base_freq": 5e3}),
    ("phi3", {"attention.sliding_window": 0}, {"sliding_window": None}),
    ("phi3", {"attention.sliding_window": 47}, {"sliding_window": 47}),
    ("phi3", {"rope.dimension_count": 12}, {"partial_rotary_factor": 0.75}),
    ("stablelm", {"rope.dimension_count": 4}, {"partial_rotary_factor": 0.25}),
    ("starcoder2", {"rope.freq_base": 1e5}, {"rope_theta": 1e5}),
    ("nemotron", {"attention.layer_norm_epsilon": 0.25}, {"norm_eps": 0.25}),
    ("qwen3moe", {"attention.key_length": 32}, {"head_dim": 32}),
    ("qwen3", {}, {"head_dim": 16, "num_key_value_heads": 4}),
    ("qwen2", {"attention.head_count_kv": 2}, {"num_key_value_heads": 2}),
    ("llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
     {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
])  # fmt: skip
def test_values_of_a_file_and_of_llama_cpp_are_in_the_configuration(tmp_path, kind, keys, expected):
    result = config_of_gguf(write(tmp_path / "m.gguf", kind, keys))
    assert {name: result[name] for name in expected} == expected


@pytest.mark.parametrize(("kind", "keys", "note"), [
    ("gemma2", {"attention.key_length": 64}, "the file has no attention scale; fsdpctl uses 256"),
    ("starcoder2", {}, "the file has no attention window; set model.overrides.sliding_window"),
    ("llama", {"logit_scale": 2.0, "residual_scale": 0.5}, "logit_scale, residual_scale: ignored"),
    ("qwen3", {"rope.dimension_count": 8}, "rope.dimension_count: ignored"),
    ("llama", {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}, "as gpt-2"),
])  # fmt: skip
def test_what_is_not_read_has_a_note(tmp_path, kind, keys, note):
    (line,) = notes_on_gguf(str(write(tmp_path / "m.gguf", kind, keys)))
    assert note in line


def test_heads_in_another_order_are_refused(tmp_path):
    file = write(tmp_path / "m.gguf", "falcon", {"attention.head_count_kv": 2})
    with pytest.raises(UsageError, match="falcon with several key heads: not supported"):
        config_of_gguf(file)


@pytest.mark.parametrize("text", ["plain", "é\n\t 😀 <|x|>"])
def test_a_byte_tokenizer_comes_back(tmp_path, text):
    exported = write_gguf(sharded("qwen2", tmp_path), tmp_path / "m", dtype="F32", overwrite=False)
    tokenizer = open_tokenizer(str(exported.path))
    assert tokenizer.encode_prompt(text) == ByteTokenizer().encode_prompt(text)
    assert tokenizer.decode(tokenizer.encode_prompt(text)) == text
