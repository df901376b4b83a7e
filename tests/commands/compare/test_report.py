"""Table, JSON and page of made-up variants."""

import base64
import io
import json
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from matplotlib.image import imread

from fsdpctl.commands.compare.order import ordered
from fsdpctl.commands.compare.report import write_report
from fsdpctl.commands.compare.row import Row, columns
from tests.commands.compare.rows import ABOUT, failed, measured, of

ROWS = of(
    measured("full_shard", 1000, 1010, 990),
    measured("no_shard", 1200, 1190, 1215, memory=70),
    failed("hybrid_shard"),
)
ORDERED = ordered(ROWS)
VOID = {"meta", "img", "br", "hr", "link", "input"}


class Page(HTMLParser):
    """What a page has in it; fails where tags are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    write_report(ORDERED, ABOUT, folder)
    return folder


def test_the_page_needs_nothing_from_elsewhere_and_runs_nothing(folder):
    page = Page((folder / "compare.html").read_text())
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "iframe", "object", "base", "form"}
    for tag, attrs in page.tags:
        assert not any(name.startswith("on") for name in attrs)
        if tag == "img":
            assert str(attrs["src"]).startswith("data:image/png;base64,")
            assert attrs["alt"]
    assert "://" not in (folder / "compare.html").read_text()


def test_the_page_begins_with_the_best_variant(folder):
    text = Page((folder / "compare.html").read_text()).text
    wanted = [
        ABOUT.title, "The first variant is recommended", "no_shard", "full_shard", "hybrid_shard",
        "<rank 1> was killed", "all losses are equal", "How the values were measured",
        ABOUT.command, "<some> CPU", "torch 9.9",
    ]  # fmt: skip
    places = [text.find(each) for each in wanted]
    assert -1 not in places
    assert places == sorted(places)


def test_the_picture_is_not_empty(folder):
    (source,) = (
        a["src"] for tag, a in Page((folder / "compare.html").read_text()).tags if tag == "img"
    )
    picture = imread(io.BytesIO(base64.b64decode(str(source).partition(",")[2])))
    assert picture.shape[1] > 1000
    assert picture[..., :3].std() > 0.05


def test_json_has_the_rows(folder):
    rows = json.loads((folder / "compare.json").read_text())
    assert [row["status"] for row in rows] == [row.status for row in ORDERED]
    assert rows[1]["rounds"][2]["run_dir"] == "runs/full_shard/round-3"
    assert {each.name for each in folder.iterdir()} == {"compare.json", "compare.html"}


def test_nothing_is_drawn_without_values(tmp_path):
    write_report([failed("a")], replace(ABOUT, is_complete=False), tmp_path)
    page = (tmp_path / "compare.html").read_text()
    assert "<img" not in page
    assert "Incomplete:" in page


def test_predicted_variants_have_the_same_report(tmp_path):
    predicted = [
        Row({"strategy": name}, name, tokens_per_second=speed, step_seconds=1.0)
        for name, speed in (("a", 10.0), ("b", 20.0))
    ]
    write_report(predicted, replace(ABOUT, what="predicted", where="8 x H100"), tmp_path)
    page = (tmp_path / "compare.html").read_text()
    assert "predicted on 8 x H100" in page
    assert "How the values were predicted" in page


def test_columns_without_values_are_omitted():
    titles = [column.title for column in columns(ROWS)]
    assert "MFU" not in titles
    assert titles[0] == "strategy"
    with_mfu = [replace(row, mfu=0.4321) for row in ROWS]
    assert "43.2%" in next(c for c in columns(with_mfu) if c.title == "MFU").cells


def test_the_first_column_is_the_engine_if_engines_vary():
    rows = [replace(r, varied={"engine": "ddp", **r.varied}, engine="ddp") for r in ROWS]
    assert columns(rows)[0].title == "engine"
