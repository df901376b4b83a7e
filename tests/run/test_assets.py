"""The files of the model and tokenizer that a run stores."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from fsdpctl.config.compose import compose_config
from fsdpctl.data.data_set import DataSet
from fsdpctl.data.streams import TokenStream
from fsdpctl.data.tokenizer import FileTokenizer, open_tokenizer
from fsdpctl.errors import UsageError
from fsdpctl.run.assets import collect_assets, end_tokens, read_run_assets, write_assets
from tests.data.layouts import SPECIALS, Layout, write_layout


def _collected(folder: Path, **kwargs: Any) -> dict[str, bytes]:
    config = compose_config(["model=llama_tiny", f"data.tokenizer={folder}"]).config
    tokenizer = open_tokenizer(str(folder))
    stream = TokenStream(np.arange(9, dtype=np.uint16), None)
    data = DataSet(stream, None, tokenizer, tokenizer.vocab_size, "", **kwargs)
    return collect_assets(config, data)


@pytest.mark.parametrize("options", [
    {"config": {"eos_token": "</s>"}},
    {"config": None, "model": {"model_type": "gpt2"}},
    {"kind": "metaspace", "config": {}},
    {"kind": "unigram", "config": None},
    {"config": {"tokenizer_class": "GPT2Tokenizer"}, "slow": True},
    {"added": {"<call>": 0}},
], ids=str)  # fmt: skip
def test_an_export_gives_the_tokens_of_the_run(tmp_path, options):
    folder = write_layout(tmp_path / "mine", Layout("mine", **options))
    mine = open_tokenizer(str(folder))
    assert isinstance(mine, FileTokenizer)
    write_assets(tmp_path, _collected(folder))
    exported = tmp_path / "assets"
    (exported / "config.json").write_text('{"model_type": "llama"}')
    theirs = AutoTokenizer.from_pretrained(exported)
    text = "The ab the <call> 日本</s>"
    assert (theirs(text)["input_ids"], theirs.eos_token_id) == (
        mine.encode_prompt(text),
        mine.eos_id,
    )


def test_additional_templates_are_kept_and_one_given_template_replaces_all(tmp_path):
    folder = write_layout(tmp_path / "mine", Layout("mine"))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (folder / "chat_template.jinja").write_text("default")
    write_assets(tmp_path, _collected(folder))
    assert read_run_assets(tmp_path)["additional_chat_templates/tool_use.jinja"] == b"tools"
    saved = _collected(folder, template="given")
    assert [name for name in saved if name.endswith("jinja")] == ["chat_template.jinja"]
    assert saved["chat_template.jinja"] == b"given"


def test_a_linked_folder_of_assets_is_not_written(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "assets").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="got a link"):
        write_assets(tmp_path, {"a.json": b"{}"})
    assert not any((tmp_path / "elsewhere").iterdir())


def test_end_tokens_are_found_in_every_place(tmp_path):
    files = {
        "config.json": {"eos_token_id": 7, "text_config": {"eos_token_id": [8, 7], "decoder": {}}},
        "generation_config.json": {"eos_token_id": [9]},
    }
    content = {name: json.dumps(each).encode() for name, each in files.items()}
    assert end_tokens(content, "here") == (9, 7, 8)
    folder = write_layout(tmp_path / "mine", Layout("mine", config={"eos_token": "</s>"}))
    saved = json.loads(_collected(folder, end_tokens=(3,))["generation_config.json"])
    assert saved == {"eos_token_id": [3, SPECIALS.index("</s>")]}
