"""Models in GGUF files of fsdpctl and of other programs compute what transformers computes."""

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers as hf
from gguf import GGMLQuantizationType, GGUFWriter, quants

from fsdpctl.checkpoint.gguf_export import write_gguf
from fsdpctl.config.gguf_model import notes_on_gguf
from fsdpctl.data.tokenizer import open_tokenizer
from tests.checkpoint.test_gguf import LLAMAS, NAMES, sharded, tokenizer
from tests.commands.run import invoke, make_text
from tests.models import decoders
from tests.models.decoders import compose
from tests.models.families import tokens

_SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256
}  # fmt: skip
MODELS = {
    "llama": hf.LlamaConfig(**_SIZES), "qwen2": hf.Qwen2Config(**_SIZES, tie_word_embeddings=True),
    "qwen3": hf.Qwen3Config(**_SIZES, head_dim=128),
    "gemma3": hf.Gemma3TextConfig(**_SIZES, head_dim=64, sliding_window=9),
    "phi3": hf.Phi3Config(**_SIZES, pad_token_id=0),
    "qwen3moe": hf.Qwen3MoeConfig(**_SIZES, **_EXPERTS),
}  # fmt: skip
_K_BLOCKS = {"Q4_K": slice(0, 4), "Q5_K": slice(0, 4), "Q6_K": slice(208, 210)}  # bytes of scales


def byte_level(writer: GGUFWriter) -> None:
    options = tokenizer(NAMES["qwen2"], size=300)["model"]
    vocabulary: dict[str, int] = options["vocab"]
    texts = [*sorted(vocabulary, key=vocabulary.__getitem__), "<|begin|>", "<|end|>", "<think>"]
    count = 320 - len(texts)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(texts + [f"[PAD{number}]" for number in range(count)])
    writer.add_token_types([1] * len(vocabulary) + [3, 3, 4] + [5] * count)
    writer.add_token_merges([" ".join(each) for each in options["merges"]])
    writer.add_bos_token_id(len(vocabulary))
    writer.add_eos_token_id(len(vocabulary) + 1)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}<|end|>{% endfor %}")


def sentence_pieces(writer: GGUFWriter) -> None:
    pieces = [*"▁helowrdisnta,!'?1234", "he", "ll", "llo", "hello", "▁w", "or", "▁wor", "▁world"]
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), *pieces]
    count = 320 - len(texts)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(texts + [f"[PAD{number}]" for number in range(count)])
    writer.add_token_scores([-float(number) for number in range(320)])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * len(pieces), *[5] * count])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def converted(name: str, values: np.ndarray, kind: str, config: Any) -> np.ndarray:
    """Return a tensor as llama.cpp's conversion writes it."""
    if kind == "llama" and re.search(r"attn_[qk]\.", name):
        heads = config.num_attention_heads if "attn_q" in name else config.num_key_value_heads
        return values.reshape(heads, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
    return values + 1 if kind == "gemma3" and name.endswith("norm.weight") else values


def write_other(path: Path, kind: str, dtype: str = "F16", args: Any = byte_level) -> Path:
    """Write a model with drawn weights as another program would."""
    config = MODELS[kind]
    torch.manual_seed(0)
    model: Any = hf.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(path.parent / "hf")
    writer = GGUFWriter(path, kind)
    for key, value in {
        "block_count": 2, "context_length": 64, "embedding_length": 256,
        "feed_forward_length": 512, "attention.head_count": 4, "attention.head_count_kv": 2,
        "attention.key_length": getattr(config, "head_dim", None) or 64, "rope.dimension_count": 64,
    }.items():  # fmt: skip
        writer.add_uint32(f"{kind}.{key}", value)
    writer.add_pad_token_id(0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if kind == "gemma3":
        writer.add_sliding_window(9)
    if kind == "qwen3moe":
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(256)
    args(writer)
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names, results = gguf.get_tensor_name_map(architecture, 2), dict[str, list[np.ndarray]]()
    for file in (path.parent / "hf").glob("*.safetensors"):
        stored = hf.modeling_utils.load_state_dict(str(file), map_location="cpu")
        for name in sorted(stored):
            theirs = names.get_name(re.sub(r"experts\.\d", "experts", name), (".weight", ".bias"))
            assert theirs is not None
            results.setdefault(theirs, []).append(stored[name].numpy())
    for name, parts in results.items():
        whole = np.stack(parts) if "_exps" in name else parts[0]
        add(writer, name, converted(name, whole, kind, config), dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: GGUFWriter, name: str, values: np.ndarray, dtype: str) -> None:
    if values.ndim == 1:
        writer.add_tensor(name, values)
    elif dtype in _K_BLOCKS:  # the library cannot write these: draw bytes, with a small scale
        block, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[dtype]]
        generator = np.random.default_rng(len(name))
        drawn = generator.integers(0, 256, (*values.shape[:-1], values.shape[-1] // block, size))
        blocks = drawn.astype(np.uint8)
        blocks[..., _K_BLOCKS[dtype]].view(np.float16)[...] = 0.0007
        flat = blocks.reshape(*values.shape[:-1], -1)
        writer.add_tensor(name, flat, raw_dtype=GGMLQuantizationType[dtype])
    elif dtype == "F16":
        writer.add_tensor(name, values.astype(np.float16))
    else:
        kind = GGMLQuantizationType[dtype]
        writer.add_tensor(name, quants.quantize(values, kind), raw_dtype=kind)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    output = model(tokens())
    result: torch.Tensor = getattr(output, "logits", output)
    return result


@pytest.mark.parametrize("family", LLAMAS)
def test_an_export_comes_back_with_the_same_logits_and_tokens(family, tmp_path):
    name = "smollm" if family == "llama" else "llama-bpe"  # transformers does not read smollm's
    files = {"tokenizer.json": json.dumps(tokenizer(NAMES[name], size=300)).encode()}
    reader = sharded(family, tmp_path, tokenizer=files)
    exported = write_gguf(reader, tmp_path / "m.gguf", dtype="F32", overwrite=False)
    before, after = (decoders.load(compose(path)) for path in (tmp_path / "in", exported.path))
    assert torch.equal(logits(before), logits(after))
    (tmp_path / "in" / "tokenizer.json").write_bytes(files["tokenizer.json"])
    one, other = (open_tokenizer(str(path)) for path in (tmp_path / "in", exported.path))
    assert one.encode_prompt("it 1234 isn't") == other.encode_prompt("it 1234 isn't")


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("dtype", ["BF16", "Q8_0", "Q5_0", "Q4_K", "Q5_K", "Q6_K"])
def test_the_file_of_another_program_gives_the_logits_of_transformers(kind, dtype, tmp_path):
    file = write_other(tmp_path / "m.gguf", kind, dtype)
    ours = logits(decoders.load(compose(file)))
    if kind == "qwen3moe":  # transformers does not read the size of its experts
        assert ours.isfinite().all()
        return
    load: Any = hf.AutoModelForCausalLM.from_pretrained
    theirs = logits(load(tmp_path, gguf_file=file.name, dtype=torch.float32).eval())
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "phi3"])
@pytest.mark.parametrize("args", [byte_level, sentence_pieces])
def test_its_tokenizer_gives_the_tokens_of_transformers_that_the_model_has(kind, args, tmp_path):
    file = write_other(tmp_path / "m.gguf", kind, "F16", args)
    theirs = hf.AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    ours: Any = open_tokenizer(str(file))
    for text in ("Hello world, it isn't 1234?  x\n\n é", "<|begin|>a<think>b<|end|>", " "):
        assert ours.hf(text)["input_ids"] == theirs(text)["input_ids"]
    assert (ours.vocab_size, ours.eos_id) == (320, theirs.eos_token_id)
    assert ours.hf.chat_template == theirs.chat_template


def of_three(writer: GGUFWriter) -> None:
    writer.add_uint16("split.count", 3)


def with_more(writer: GGUFWriter) -> None:
    byte_level(writer)
    writer.add_tensor("rope_freqs.weight", np.ones(32, np.float32))  # left unread, with a note
    writer.add_tensor("blk.0.attn_q.bias", np.ones(256, np.float32))


@pytest.mark.parametrize(("args", "change", "problem"), [
    (byte_level, lambda data: data[:-100], "not a complete GGUF file: .* exceeds the file"),
    (byte_level, lambda data: data[:2000], "not a complete GGUF file"),
    (byte_level, lambda data: data.replace(b"GGUF", b"GGML", 1), "not a complete GGUF file"),
    (byte_level, lambda data: data.replace(b"1.ffn_up", b"1.ffn_xx"), "blk.1.ffn_up.weight: not"),
    (byte_level, lambda data: data.replace(b"llama", b"mamba", 1), "architecture mamba: not s"),
    (of_three, lambda data: data, "one of 3 files of a model; merge them with `llama-gguf-spl"),
    (with_more, lambda data: data, "blk.0.attn_q.bias: not in transformers' model of llama"),
])  # fmt: skip
def test_a_file_that_cannot_be_read_is_an_error_of_one_line(args, change, problem, tmp_path):
    file = write_other(tmp_path / "m.gguf", "llama", "Q8_0", args)
    file.write_bytes(change(file.read_bytes()))
    model = ("model=hf", f"model.path={file}")
    text = ("data=text", f"data.path={make_text(tmp_path)}", f"train.run_dir={tmp_path / 'run'}")
    for code, line in (
        invoke("train", "--dry-run", *model, *text),
        invoke("sample", str(file), "--tokens", "2"),
        invoke("shard-checkpoint", str(file), str(tmp_path / "out")),
    ):
        assert (code, line.count("\n")) == (2, 0), line
        assert re.search(rf"{file}: {problem}", line), line
    assert {each.name for each in tmp_path.iterdir()} == {"m.gguf", "hf", "words.txt"}


def test_scaling_that_transformers_does_not_read_has_a_note(tmp_path):
    def scaled(writer: GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)

    file = write_other(tmp_path / "m.gguf", "llama", "F16", scaled)
    assert notes_on_gguf(str(file)) == (
        f"{file}: RoPE scaling: ignored, as by transformers; set model.overrides.rope_scaling",
    )
