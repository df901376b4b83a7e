"""Small directories of tokenizers, in the layouts that transformers and its users write."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

SPECIALS = ("<unk>", "<s>", "</s>", "<|endoftext|>", "[CLS]", "[SEP]", "<pad>", "[UNK]")
WORDS = ("▁the", "the", "the</w>", "ab", "▁ab", "##ab", "Ġab", "ca", "▁", " ")
TEXTS = (
    "", " ", "ab", " ab the", "the ab  the\n\n", "abab</s>ab", "<|endoftext|>", "ab <call> the",
    "ab<call>the <call>", "ab <CALL> é", "日本 ab", "the\tab\r\n", "<s>ab", "x<call>y",
    "The AB THE", "ab </s>", "don't 123 4567!", "a" * 40, "\u0000\ufeffab", "ﬁ Å e\u0301 <pad>",
)  # fmt: skip
CALL = {"content": "<call>", "special": True, "lstrip": False, "rstrip": False,
        "normalized": False, "single_word": False}  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """The files of a tokenizer; None: the file is missing."""

    name: str
    kind: str = "byte_level"
    config: dict[str, Any] | None = field(default_factory=dict)  # tokenizer_config.json
    model: dict[str, Any] | None = None  # config.json
    special_map: dict[str, Any] | None = None
    added: dict[str, int] | None = None
    in_json: tuple[dict[str, Any], ...] = ()  # more added_tokens of the tokenizer.json
    post: Any = None
    slow: bool = False  # vocab.json and merges.txt instead of tokenizer.json


def _vocabulary() -> dict[str, int]:
    letters = [chr(code) for code in range(0x21, 0x7F)]
    pieces = [*SPECIALS, *WORDS, *letters, *(f"##{each}" for each in letters)]
    pieces += (f"{each}</w>" for each in letters)
    pieces += (each for each in sorted(pre_tokenizers.ByteLevel.alphabet()) if each not in letters)
    return {each: number for number, each in enumerate(dict.fromkeys(pieces))}


def _tokenizer(kind: str) -> Tokenizer:
    vocabulary = _vocabulary()
    merges = [("a", "b"), ("t", "h"), ("th", "e")]
    for one, other in merges:
        vocabulary.setdefault(one + other, len(vocabulary))
    if kind == "byte_level":
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    elif kind == "prefix_space":
        tokenizer = _tokenizer("byte_level")
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif kind == "metaspace":
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>"))
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(steps)
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    elif kind == "word_piece":
        tokenizer = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="<unk>"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
    else:
        tokenizer = Tokenizer(models.Unigram([(x, -float(n)) for x, n in vocabulary.items()], 0))
        tokenizer.normalizer = normalizers.NFKC()
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer


def write_layout(folder: Path, layout: Layout) -> Path:
    """Write the files of a layout to a directory."""
    folder.mkdir(parents=True)
    tokenizer = _tokenizer(layout.kind)
    if layout.post is not None:
        tokenizer.post_processor = layout.post
    content = json.loads(tokenizer.to_str())
    size = tokenizer.get_vocab_size()
    content["added_tokens"] += ({"id": size + n, **e} for n, e in enumerate(layout.in_json))
    if layout.slow:
        merges = [" ".join(each) for each in content["model"]["merges"]]
        (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    files = {
        "vocab.json" if layout.slow else "tokenizer.json":
            content["model"]["vocab"] if layout.slow else content,
        "tokenizer_config.json": layout.config, "config.json": layout.model,
        "special_tokens_map.json": layout.special_map,
        "added_tokens.json":
            None if layout.added is None else {k: size + n for k, n in layout.added.items()},
    }  # fmt: skip
    for name, each in files.items():
        if each is not None:
            (folder / name).write_text(json.dumps(each).replace('"NEXT"', f'"{size}"'))
    return folder


def _around(before: str, after: str) -> Any:
    ids = [(each, SPECIALS.index(each)) for each in SPECIALS]
    return processors.TemplateProcessing(single=f"{before} $A {after}".strip(), special_tokens=ids)


POSTS = {"begin": _around("<s>", ""), "end": _around("", "</s>"), "both": _around("<s>", "</s>"),
         "bert": _around("[CLS]", "[SEP]"), "after end": _around("", "</s> <pad>")}  # fmt: skip
PLACES: dict[str, dict[str, Any]] = {
    "config": {"config": {"eos_token": "</s>"}},
    "config as a dict": {"config": {"eos_token": {**CALL, "content": "</s>"}}},
    "map": {"special_map": {"eos_token": "</s>"}},
    "map over config": {"config": {"eos_token": "<s>"}, "special_map": {"eos_token": "</s>"}},
    "a new token": {"config": {"eos_token": "<new>"}}, "nowhere": {}, "no config": {"config": None},
}  # fmt: skip
ADDED: dict[str, dict[str, Any]] = {
    "decoder": {"config": {"added_tokens_decoder": {"NEXT": CALL}}},
    "additional": {"config": {"additional_special_tokens": ["<call>"]}},
    "extra list": {"config": {"extra_special_tokens": ["<call>"]}},
    "extra dict": {"config": {"extra_special_tokens": {"call_token": "<call>"}}},
    "own key": {"config": {"call_token": "<call>"}},
    "map": {"special_map": {"additional_special_tokens": ["<call>"]}},
    "file": {"added": {"<call>": 0}}, "json": {"in_json": (CALL,)},
}  # fmt: skip
CLASSES = ("GPT2", "GPTNeoX", "Qwen2", "Llama", "Gemma", "T5", "Bert", "Roberta", "CodeLlama")
MODELS = ("gpt2", "gpt_neox", "qwen2", "llama", "gemma", "mistral", "phi3", "bert", "nobody")


def layouts() -> Iterator[Layout]:
    """Yield all layouts."""
    kinds = ("byte_level", "metaspace", "word_piece", "unigram", "prefix_space")
    for kind in kinds:
        for name, post in {**POSTS, "nothing": None}.items():
            yield Layout(f"{kind} adds {name}", kind, {"eos_token": "</s>"}, post=post)
    for name, options in PLACES.items():
        yield Layout(f"end in {name}", **options)
        yield Layout(f"end in {name}, added too", **options, post=POSTS["both"])
    for name, options in ADDED.items():
        yield Layout(f"token in {name}", **options)
        yield replace(Layout(f"metaspace, token in {name}", **options), kind="metaspace")
    for flag in ("lstrip", "rstrip", "normalized", "single_word"):
        token = {**CALL, flag: True}
        yield Layout(f"{flag} in json", in_json=(token,))
        yield Layout(f"{flag} in config", "word_piece", {"added_tokens_decoder": {"NEXT": token}})
    for name in CLASSES:
        kind = {"T5": "unigram", "Bert": "word_piece"}.get(name, "byte_level")
        yield Layout(f"class {name}", kind, {"tokenizer_class": f"{name}Tokenizer"})
        options = {"tokenizer_class": f"{name}TokenizerFast", "add_prefix_space": True}
        yield Layout(f"class {name}, prefix space", kind, options)
    for name in MODELS:
        kind = "word_piece" if name == "bert" else "byte_level"
        yield Layout(f"model {name}", kind, None, {"model_type": name, "vocab_size": 9})
        yield Layout(f"model {name}, named end", kind, {"eos_token": "</s>"}, {"model_type": name})
    for name in ("GPT2", "Roberta", "Qwen2", "CTRL", "ByT5"):
        config = {"tokenizer_class": f"{name}Tokenizer"}
        yield Layout(f"vocab.json of {name}", config=config, slow=True)
    yield Layout("begin and end by flags", "metaspace", {
        "tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": True,
        "bos_token": "<s>", "eos_token": "</s>"})  # fmt: skip
    yield Layout("split special tokens", config={"split_special_tokens": True})
