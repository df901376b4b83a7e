"""A text read in pieces has the tokens of the whole text, with any rule for a text's start."""

import json
import random

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.pre_tokenizers import Metaspace

from fsdpctl.config.data_files import DataFiles
from fsdpctl.data import documents as documents_module
from fsdpctl.data import tokenizer as tokenizer_module
from fsdpctl.data import tokenizing
from fsdpctl.data.documents import SkippedInput, documents
from fsdpctl.data.tokenizer import ByteTokenizer, FileTokenizer
from fsdpctl.data.tokenizing import TokenOutput, tokenize_files
from fsdpctl.errors import UsageError
from tests.data.token_file import encoded

SPECIALS = ["<unk>", "<s>", "</s>", "<call>"]
LETTERS = ["▁", "\n", *"abcdefghijklmnopqrstuvwxyz ABCD,.é日本"]
MERGES = [("a", "b"), ("ab", "ab"), ("▁", "a"), ("▁a", "b"), ("h", "e"), ("▁", "t"), ("\n", "▁")]


def bpe(normalizer=None, pre_tokenizer=None, post=None):
    letters = dict.fromkeys([*SPECIALS, *LETTERS, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    names = [*letters, *(a + b for a, b in MERGES)]
    model = models.BPE({each: n for n, each in enumerate(names)}, MERGES, unk_token="<unk>")
    return make_tokenizer(model, normalizer, pre_tokenizer, post)


def make_tokenizer(model, normalizer=None, pre_tokenizer=None, post=None):
    result = Tokenizer(model)
    result.add_special_tokens(SPECIALS)
    result.normalizer, result.pre_tokenizer = normalizer, pre_tokenizer
    result.post_processor = post or result.post_processor
    return result


def llama_2():
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    post = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return bpe(normalizers.Sequence(steps), post=post)


def unigram():
    names = [*SPECIALS, *LETTERS, "▁a", "▁ab", "he", "▁the"]
    model = models.Unigram([(each, -float(n)) for n, each in enumerate(names)], 0)
    return make_tokenizer(model, normalizers.NFKC(), pre_tokenizers.Metaspace())


def word_piece():
    names = [*SPECIALS, *LETTERS, *(f"##{each}" for each in LETTERS), "the", "##ab"]
    model = models.WordPiece({each: n for n, each in enumerate(names)}, unk_token="<unk>")
    return make_tokenizer(model, normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer())


def runs():
    """Return a tokenizer that merges blanks, line breaks and a letter by twos, up to 16."""
    alphabet = dict.fromkeys([*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    merges = [(each * n, each * n) for each in ("Ġ", "Ċ", "a") for n in (1, 2, 4, 8)]
    names = [*alphabet, *(a + b for a, b in merges)]
    model = models.BPE({each: n for n, each in enumerate(names)}, merges)
    result = make_tokenizer(model, pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False))
    result.decoder = decoders.ByteLevel()
    return result


MAKERS = {
    "metaspace first": lambda: bpe(pre_tokenizer=Metaspace(prepend_scheme="first", split=False)),
    "metaspace always": lambda: bpe(pre_tokenizer=Metaspace(prepend_scheme="always")),
    "llama 2": llama_2,
    "prefix space": lambda: bpe(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "strip": lambda: bpe(normalizers.Strip(), pre_tokenizers.Whitespace()),
    "replaced start": lambda: bpe(normalizers.Prepend("the "), pre_tokenizers.ByteLevel(False)),
    "no pre-tokenizer": bpe,
    "unigram": unigram,
    "word piece": word_piece,
    "runs of blanks": runs,
}


def written(tokenizer):
    options = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    files = {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": json.dumps(options)}
    return FileTokenizer("made", {name: text.encode() for name, text in files.items()})


def lines(count, seed=0):
    draw = random.Random(seed)
    args = ["the", "ab", "abab", "ABCD,", "hé", "日本", "日", "x<call>y", "<s>", ".", "a"]
    texts = (" ".join(draw.choices(args, k=draw.randrange(12))) for _ in range(count))
    return "".join(f"{'  ' * draw.randrange(3)}{each}\n" for each in texts)


TEXTS = {
    "lines": lines(600), "one line": lines(600, 1).replace("\n", " "),
    "no blanks": lines(900, 2).replace("\n", "").replace(" ", ""),
    "one word and line again and again": "the ab\n" * 2000,
    "blank lines": lines(500, 3).replace("\n", "\n\n \n"),
    "blanks at both ends": f" \n {lines(500, 4)} \n\n",
}  # fmt: skip


@pytest.fixture
def _small(monkeypatch):
    """Reduce the size of pieces and of the text around them."""
    monkeypatch.setattr(tokenizing, "PIECE_BYTES", 3000)
    for module in (documents_module, tokenizer_module):
        monkeypatch.setattr(module, "CONTEXT_CHARS", 300)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.usefixtures("_small")
def test_pieces_have_the_tokens_of_the_whole_text(name, tmp_path):
    tokenizer = written(MAKERS[name]())
    for number, (kind, text) in enumerate(TEXTS.items()):
        (tmp_path / f"{number}.txt").write_text(text)
        output = TokenOutput(tmp_path / f"{number}.bin")
        tokenize_files(str(tmp_path / f"{number}.txt"), output, tokenizer)
        expected = encoded(tokenizer, text)
        assert output.path.read_bytes() == expected.tobytes(), kind
        assert expected.tolist()[:-1] == tokenizer.hf(text)["input_ids"], kind


def in_pieces(text, tokenizer, file):
    """Return the tokens of a text that is read in pieces; None if the tokenizer refuses it."""
    file.write_text(text)
    pieces = [*documents(DataFiles("text", (file,)), "SRC", SkippedInput(), max_bytes=3000)]
    assert len(pieces) > 2
    try:
        return tokenizer.encode_pieces(pieces).tolist()
    except UsageError as error:
        if "depend on text that is far away" not in str(error):
            raise
        return None


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.usefixtures("_small")
def test_a_cut_in_a_run_loses_nothing_or_is_refused(name, tmp_path):
    tokenizer, read = written(MAKERS[name]()), 0
    for run in (" ", "\n", "a", "\u0301", "é", "ab", "\n ", "日", "<call>"):
        for more in range(2):
            text = f"{'harbor ' * 150}{run * (3600 + more)}{' seven' * 300}"
            if (pieces := in_pieces(text, tokenizer, tmp_path / "a.txt")) is not None:
                assert pieces == encoded(tokenizer, text).tolist(), (run, more)
                read += 1
    assert 0 < read < 18


@pytest.mark.usefixtures("_small")
def test_a_run_of_blanks_is_read_if_a_token_of_the_whole_begins_at_the_cut(tmp_path):
    tokenizer, read = written(runs()), 0
    for shift in range(16):  # at one shift, a token of 16 blanks begins at the cut
        text = f"{'x' * (500 + shift)}{' ' * 3600}{' seven' * 400}"
        if (pieces := in_pieces(text, tokenizer, tmp_path / "a.txt")) is not None:
            assert pieces == encoded(tokenizer, text).tolist()
            assert tokenizer.decode(pieces[:-1]) == text
            read += 1
    assert read == 1


@pytest.mark.usefixtures("_small")
def test_a_run_after_words_is_read_whatever_its_length(tmp_path):
    tokenizer = written(runs())
    for lengths, count in ((250, 5000), (301, 2777), (380, 3601)):
        for run in (" ", "\n", "\n  "):
            text = f"{'harbor ' * lengths}{run * count}{' seven' * 400}"
            text = text[: 2 * 3000 - 600] + " seven" * 200  # one cut is in the run
            pieces = in_pieces(text, tokenizer, tmp_path / "a.txt")
            assert pieces == encoded(tokenizer, text).tolist(), (lengths, run)


@pytest.mark.usefixtures("_small")
def test_bytes_are_cut_without_a_trace(tmp_path):
    for text in TEXTS.values():
        (tmp_path / "a.txt").write_text(text)
        passed = SkippedInput()
        files = DataFiles("text", (tmp_path / "a.txt",))
        pieces = [*documents(files, "SRC", passed, max_bytes=3000)]
        assert len(pieces) > 2
        assert bytes(ByteTokenizer().encode_pieces(pieces)) == text.encode()
        assert sum(each.size for each in pieces) == len(text.encode())
        assert [each.begins for each in pieces] == [True, *[False] * (len(pieces) - 1)]


@pytest.mark.usefixtures("_small")
def test_a_text_whose_tokens_depend_on_its_start_is_refused(tmp_path):
    model = models.WordLevel({"a": 0, "</s>": 1, "<unk>": 2}, unk_token="<unk>")
    tokenizer = written(make_tokenizer(model))
    (tmp_path / "a.txt").write_text("b" * 9000)
    with pytest.raises(UsageError, match="depend on text that is far away; split the file"):
        tokenize_files(str(tmp_path / "a.txt"), TokenOutput(tmp_path / "a.bin"), tokenizer)
