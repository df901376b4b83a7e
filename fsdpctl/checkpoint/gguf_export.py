"""Export of a checkpoint to a GGUF file for llama.cpp, one attention head or 1 MiB at a time.

Note: why rows of queries and keys are reordered. In Llama's heads, llama.cpp rotates pairs of
adjacent dimensions, as Meta's code does. Hugging Face pairs the first half with the second half.
"""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

from fsdpctl.checkpoint.manifest import PARAMETER, TensorInfo, tensor_key
from fsdpctl.checkpoint.merge import exported_weights, notes_on_merge
from fsdpctl.checkpoint.pretrained import read_attachments
from fsdpctl.checkpoint.publish import ExportResult, check_space
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.tensor_file import FLOATS, ITEMSIZES, cast, fsync
from fsdpctl.checkpoint.tensor_source import TensorSource, read_bytes, weight_bytes
from fsdpctl.config.decoder_config import (
    CONFIG_LOCATION,
    config_dict,
    model_type_of,
    read_hf_config,
)
from fsdpctl.config.model import ModelConfig
from fsdpctl.config.serialize import config_of_checkpoint
from fsdpctl.data.tokenizer import FileTokenizer
from fsdpctl.data.tokenizer_files import NO_MERGES, TOKENIZER_JSON, VOCABULARIES
from fsdpctl.errors import UsageError
from fsdpctl.io.activity import BYTES, Advance, doing
from fsdpctl.io.files import open_atomic, os_errors_as
from fsdpctl.io.gguf_header import GGUF_CONFIG_JSON, GGUF_TOKENIZER
from fsdpctl.io.packages import import_package
from fsdpctl.io.run_files import CONFIG_JSON
from fsdpctl.plan.layout import Span

if TYPE_CHECKING:
    import gguf

_ARCHITECTURES = {"llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}
_FILE_TYPES = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16"}
_REORDERED = ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")
_SILU = ("silu", "swish")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_ROPE_KEYS = (
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings",
    "low_freq_factor", "high_freq_factor",
)  # fmt: skip
_ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class _ExportedTensor:
    name: str  # in GGUF
    key: str
    info: TensorInfo
    dtype: str
    head_rows: int  # rows that are reordered together; 1: none

    @property
    def nbytes(self) -> int:
        return self.info.numel * ITEMSIZES[self.dtype]


def write_gguf(
    reader: CheckpointReader, destination: Path, *, dtype: str, overwrite: bool, merge: bool = False
) -> ExportResult:
    """Write the file `destination`, or model.gguf in that directory, complete or not at all.

    `dtype` is F32, F16 or BF16 for matrices; vectors are F32. Adapters are merged in float32.
    """
    if destination.suffix != ".gguf":
        destination = destination / "model.gguf"
    if destination.is_dir() or (destination.exists() and not overwrite):
        raise UsageError(f"{destination}: already exists; pass --overwrite to replace a file")
    model = config_of_checkpoint(reader.manifest.config, str(reader)).model
    import_package("gguf", "--format gguf")  # UsageError if it is not installed
    _check_supported(model, reader)
    weights = exported_weights(reader, dtype, merge=merge)
    tensors = _tensors(weights, model, dtype)
    check_space(destination, sum(each.nbytes for each in tensors))
    with os_errors_as(destination):
        destination.parent.mkdir(parents=True, exist_ok=True)
        with (
            open_atomic(destination, durable=True) as file,
            doing("exporting", BYTES, weight_bytes(weights)) as advance,
        ):
            chunks = partial(_chunks, weights, advance)
            note = _write(Path(file.name), reader, model, tensors, chunks)
        fsync(destination.parent)
        size = destination.stat().st_size
    notes = [*([note] if note else []), *notes_on_merge(reader, merge=merge)]
    if window := _sliding_window(_transformers_config(model)):
        notes.append(
            f"context length {window}: llama.cpp does not support the model's "
            "sliding window, so its results differ beyond this length"
        )
    return ExportResult(destination, size, len(tensors), tuple(notes))


def _check_supported(model: ModelConfig, reader: CheckpointReader) -> None:
    problem = ""
    if "model" not in reader.manifest.config:
        problem = f"{reader} does not name its model"
    elif (model_type := model_type_of(model)) not in _ARCHITECTURES:
        problem = f"{model_type} models: not supported; expected {', '.join(_ARCHITECTURES)}"
    else:
        config = _transformers_config(model)
        rope, rope_type = config.rope_parameters, config.rope_parameters["rope_type"]
        others = [name for name, value in rope.items() if name not in _ROPE_KEYS and value]
        if config.hidden_act not in _SILU:
            problem = f"activation {config.hidden_act} not supported by llama.cpp; expected silu"
        elif rope_type not in _ROPE_TYPES:
            problem = f"rope_type {rope_type} not supported; expected {', '.join(_ROPE_TYPES)}"
        elif others:
            problem = f"{others[0]} of rotary embeddings: not supported"
    if problem:
        raise UsageError(f"--format gguf: {problem}")


def _tensors(weights: TensorSource, model: ModelConfig, dtype: str) -> list[_ExportedTensor]:
    import gguf

    architecture = getattr(gguf.MODEL_ARCH, _ARCHITECTURES[model_type_of(model)])
    names = gguf.get_tensor_name_map(architecture, model.num_layers)
    reorders = model_type_of(model) in ("llama", "mistral")
    tensors = []
    for name in weights.names(PARAMETER):
        key = tensor_key(PARAMETER, name)
        info = weights.info(key)
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if gguf_name is None or info.dtype not in FLOATS:
            raise UsageError(f"--format gguf: tensor {name} ({info.dtype}) not supported")
        head_rows = model.used_head_dim if reorders and name.endswith(_REORDERED) else 1
        tensor_dtype = dtype if len(info.shape) > 1 else "F32"
        tensors.append(_ExportedTensor(gguf_name, key, info, tensor_dtype, head_rows))
    return tensors


def _transformers_config(model: ModelConfig) -> Any:
    return read_hf_config(config_dict(model), CONFIG_LOCATION)


def _write(
    path: Path,
    reader: CheckpointReader,
    model: ModelConfig,
    tensors: list[_ExportedTensor],
    chunks: Callable[[_ExportedTensor], Iterator[memoryview]],
) -> str:
    """Write the file; return a note on its tokenizer, or an empty string."""
    import gguf

    architecture = getattr(gguf.MODEL_ARCH, _ARCHITECTURES[model_type_of(model)])
    writer = gguf.GGUFWriter(None, gguf.MODEL_ARCH_NAMES[architecture])
    (matrix_dtype,) = {each.dtype for each in tensors if len(each.info.shape) > 1}
    _write_parameters(writer, model, reader.manifest.config["model"], matrix_dtype)
    note = write_tokenizer(writer, read_attachments(reader), int(model.vocab_size or 0))
    factors = _rope_factors(model)
    writer.add_string(GGUF_CONFIG_JSON, str(model.config_json))
    if factors is not None:
        writer.add_tensor_info(_ROPE_FACTORS, factors.shape, factors.dtype, factors.nbytes)
    ignored = np.dtype(np.float16)  # `kind` decides
    for each in tensors:
        kind = gguf.GGMLQuantizationType[each.dtype]
        writer.add_tensor_info(each.name, each.info.shape, ignored, each.nbytes, kind)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    (file,) = writer.fout
    writer.write_padding(file, file.tell())
    if factors is not None:
        file.write(factors.tobytes())
        writer.write_padding(file, factors.nbytes)
    for each in tensors:
        for data in chunks(each):
            file.write(data)
        writer.write_padding(file, each.nbytes)
    writer.close()
    return note


def _write_parameters(
    writer: "gguf.GGUFWriter", model: ModelConfig, name: str, matrix_dtype: str
) -> None:
    import gguf

    head_dim, config = model.used_head_dim, _transformers_config(model)
    rope, window = config.rope_parameters, _sliding_window(config)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    writer.add_block_count(model.num_layers)
    writer.add_context_length(min(model.max_seq_len, window or model.max_seq_len))
    writer.add_embedding_length(model.hidden_size)
    writer.add_feed_forward_length(model.intermediate_size)
    writer.add_head_count(model.num_heads)
    writer.add_head_count_kv(model.num_kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(int(model.vocab_size or 0))
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[matrix_dtype]])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _sliding_window(config: Any) -> int | None:
    layer_types = getattr(config, "layer_types", None)  # None: all layers have the window
    window: int | None = getattr(config, "sliding_window", None)
    return window if not layer_types or "sliding_attention" in layer_types else None


def _rope_factors(model: ModelConfig) -> NDArray[np.float32] | None:
    """Return the factor that stretches the wavelength of each pair (Llama 3.1)."""
    config = _transformers_config(model)
    if config.rope_parameters["rope_type"] != "llama3":
        return None
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    pairs = np.arange(0, model.used_head_dim, 2, dtype=np.float64) / model.used_head_dim
    plain = config.rope_parameters["rope_theta"] ** -pairs
    factors: NDArray[np.float32] = (plain / scaled.double().numpy()).astype(np.float32)
    return factors


def _chunks(
    weights: TensorSource, advance: Advance, tensor: _ExportedTensor
) -> Iterator[memoryview]:
    info = tensor.info
    if tensor.head_rows == 1:
        for _, data in weights.read(tensor.key):
            yield cast(data, info.dtype, tensor.dtype, tensor.name)
            advance(len(data))
        return
    width = info.numel // info.shape[0]
    head_numel = tensor.head_rows * width
    for start in range(0, info.numel, head_numel):
        head = read_bytes(weights, tensor.key, Span(start, start + head_numel))
        rows = np.frombuffer(head, np.uint8).reshape(2, -1, width * ITEMSIZES[info.dtype])
        # From (halves, pairs) to (pairs, halves).
        reordered = np.ascontiguousarray(rows.swapaxes(0, 1)).reshape(-1)
        yield cast(reordered.data, info.dtype, tensor.dtype, tensor.name)
        advance(len(head))


# llama.cpp's names of pre-tokenizers, in order of preference, and the regular expressions that
# split a text, one after the other. An empty list: the expressions are in transformers.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPLITS: Mapping[str, Sequence[str]] = {
    "gpt-2": [_GPT2],
    "smollm": [r"\p{N}", _GPT2],
    **dict.fromkeys(("llama-bpe", "dbrx", "qwen2", "tekken", "gpt-4o", "qwen35"), ()),
}
_IGNORE_MERGES = ("llama-bpe", "tekken")  # a piece that is in the vocabulary becomes one token
_SAMPLE_TEXTS = (
    "Hello, world! isn't it? WE'LL see; they'Re y'all's 'tis -- don't.",
    "1 12 123 1234 12345 1234567 3.14 1,000 x2 2x a1b22c ٣٤ ²½",
    "  two   three\t\ttabs \n\n\n new\r\n\r\n lines \n  end.\n\n  \n",
    "CamelCase snake_case HTTPServer2 été ÉCOLE naïve Straße Привет, мир Ελληνικά",
    "日本語のテスト。 中文，字符！ 한국어 ไทย नमस्ते שָׁלוֹם عَرَبِيّ",
    "if (x<=y) { a[i] += *p; } // ok?! ... --- == => $5 #1 @me a/b\\c `q`  ",
    "→ ✓ a→b 😀👍🏽 \u200b\u00a0\u3000x «q» “q” ‘q’ — … € ™ ﬁ Ａ１",
)


def write_tokenizer(writer: "gguf.GGUFWriter", files: Mapping[str, bytes], vocab_size: int) -> str:
    """Add the byte-level BPE tokenizer in `files` to a GGUF file.

    Rows of the embedding without a token get placeholder tokens. Return a note if the GGUF file
    gets no tokenizer or one whose tokens may differ, or "".
    """
    problem, saved, name = "the run's tokenizer is unknown", dict[str, bytes](), ""
    tokenizer_json: dict[str, Any] = {}
    if files.keys() & set(VOCABULARIES):
        saved = FileTokenizer("of the checkpoint", files).files_as_saved()  # with all tokens
        tokenizer_json = json.loads(saved.get(TOKENIZER_JSON, b"{}"))
        is_byte_level = '"ByteLevel"' in json.dumps(tokenizer_json.get("pre_tokenizer"))
        problem = "the run's tokenizer is not a byte-level BPE"
        if tokenizer_json.get("model", {}).get("type") == "BPE" and is_byte_level:
            problem = "llama.cpp does not have the pre-tokenizer of the run's tokenizer"
            name = _find_pre_tokenizer(tokenizer_json)
    if not name:
        writer.add_tokenizer_model("none")
        return f"no tokenizer: {problem}"
    if CONFIG_JSON in files:
        saved[CONFIG_JSON] = files[CONFIG_JSON]
    try:
        writer.add_tokenizer_pre(name)
        _add_tokenizer(writer, tokenizer_json, saved, vocab_size)
        writer.add_string(GGUF_TOKENIZER, saved[TOKENIZER_JSON].decode())
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise UsageError(f"{TOKENIZER_JSON}: unexpected contents: {error!r:.200}") from None
    note = f"tokens of non-ASCII words may differ: llama.cpp approximates the pre-tokenizer {name}"
    return note if name in ("tekken", "gpt-4o") else ""


def _add_tokenizer(
    writer: Any, tokenizer_json: Mapping[str, Any], files: Mapping[str, bytes], size: int
) -> None:
    import gguf

    tokens, types = _tokens(tokenizer_json, size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    with tempfile.TemporaryDirectory() as folder:  # the library reads files
        for name, content in files.items():
            (Path(folder) / name).parent.mkdir(exist_ok=True)
            (Path(folder) / name).write_bytes(content)
        special = gguf.SpecialVocab(folder, load_merges=True, n_vocab=size)
    special.merges = special.merges or NO_MERGES
    special.add_special_token.setdefault("bos", False)
    special.add_to_gguf(writer, quiet=True)


def _find_pre_tokenizer(tokenizer_json: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of a pre-tokenizer with the same tokens for sample texts, or ""."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    plain = {**tokenizer_json, "post_processor": None, "truncation": None, "padding": None}
    original = Tokenizer.from_str(json.dumps(plain))
    candidate = Tokenizer.from_str(json.dumps({**plain, "normalizer": None}))
    decoded = (decoders.ByteLevel().decode([each]) for each in tokenizer_json["model"]["vocab"])
    whole = [each for each in decoded if "\ufffd" not in each]  # tokens of whole characters
    # llama.cpp does not apply NFC, so the texts are in NFC already.
    texts = [normalizers.NFC().normalize_str(f"{x} {x}{x}\n{x}9{x}'{x}") for x in whole]
    candidates: dict[str, Any] = {}
    for name, splits in _SPLITS.items():
        steps = splits or [GGUF_PRE_TOKENIZER_SPLITS[name]]
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        candidates[name] = pre_tokenizers.Sequence(
            [*(pre_tokenizers.Split(Regex(each), "isolated") for each in steps), last]
        )
    pieces = _pieces(original.pre_tokenizer)
    # First try those that split the sample texts as the original does.
    for name in sorted(candidates, key=lambda each: _pieces(candidates[each]) != pieces):
        candidate.pre_tokenizer = candidates[name]
        candidate.model.ignore_merges = name in _IGNORE_MERGES
        if all(_ids(candidate, each) == _ids(original, each) for each in (_SAMPLE_TEXTS, texts)):
            return name
    return ""


def _pieces(pre_tokenizer: Any) -> list[str]:
    return [piece for text in _SAMPLE_TEXTS for piece, _ in pre_tokenizer.pre_tokenize_str(text)]


def _ids(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    return [each.ids for each in tokenizer.encode_batch(list(texts))]


def _tokens(tokenizer_json: Mapping[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    import gguf

    tokens = [f"[PAD{token_id}]" for token_id in range(vocab_size)]
    types = [int(gguf.TokenType.UNUSED)] * vocab_size
    vocabulary: Mapping[str, int] = tokenizer_json["model"]["vocab"]
    by_id = {token_id: (text, gguf.TokenType.NORMAL) for text, token_id in vocabulary.items()}
    for each in tokenizer_json.get("added_tokens", ()):
        kind = gguf.TokenType.CONTROL if each.get("special") else gguf.TokenType.USER_DEFINED
        by_id[each["id"]] = (each["content"], kind)
    for token_id in by_id.keys() & range(vocab_size):
        text, kind = by_id[token_id]
        tokens[token_id], types[token_id] = text, int(kind)
    return tokens, types
