"""Settings, checkpoints and runs of other users: fsdpctl opens nothing outside of them."""

import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from fsdpctl.checkpoint.run_checkpoints import remove_interrupted_saves
from fsdpctl.commands import app, printing
from fsdpctl.commands.training_data import samples_of_step
from fsdpctl.config.compose import compose_config
from fsdpctl.config.serialize import config_to_yaml
from fsdpctl.errors import UsageError
from fsdpctl.io.run_files import METRICS, RUN_CONFIG
from fsdpctl.io.terminal import LenientConsole
from fsdpctl.io.texts import printable
from tests.commands.run import invoke, make_text
from tests.hostile import TINY_MODEL, make_checkpoint, reseal
from tests.run.runs import REJECTED, make_run, write_lines

YAML = "base_model: NousResearch/Meta-Llama-3.1-8B\nadapter: lora\nlora_r: 8\nsequence_len: 512\n"


def put(content: dict[str, Any], name: str, value: object) -> None:
    content[name] = value


def configure(content: dict[str, Any], settings: dict[str, str]) -> None:
    content["config"].update(settings)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def requests():
    """The URL of a server, and after it the paths of its requests."""
    urls = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:  # the name that the library calls
            urls.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET  # noqa: N815

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}", urls
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "url", ["http://{}/t.bin", "HTTP://{}/t.bin", "simplecache::http://{}/t.bin",
            "reference://::http://{}/refs.json"],
)  # fmt: skip
def test_no_setting_of_a_manifest_or_recipe_connects(here, requests, url):
    host, urls = requests
    url = url.format(host)
    make_checkpoint(here / "ck")
    reseal(here / "ck", lambda content: content["config"].update(data="tokens"))
    args = ("train", "--recipe", "./r.yaml", "--dry-run")
    for name in ("data.path", "data.val_path"):
        reseal(here / "ck", partial(configure, settings={name: url}))
        code, out = invoke("evaluate", "ck")
        assert (code, "not supported" in out) == (2, True), out
        (here / "r.yaml").write_text(f"data: tokens\n{name}: {url}\n")
        code, out = invoke(*args)
        assert code == 2, out
    for name in ("checkpoint.remote", "train.run_dir"):
        (here / "r.yaml").write_text(f"{name}: {url}\n")
        assert invoke(*args)[0] == 2
    assert invoke("train", "--resume", url, "--dry-run")[0] == 2
    for command in (("inspect-checkpoint", url), ("tokenize", url, "o.bin"), ("sample", url)):
        assert invoke(*command)[0] == 2
    assert not urls


@pytest.mark.parametrize("length", [1, 2, 3])
def test_bases_of_one_another_are_refused_in_one_line(here, length):
    for number in range(length):
        base = {"path": f"c{(number + 1) % length}", "xxh3": "0", "sampled": "0"}
        make_checkpoint(here / f"c{number}")
        reseal(here / f"c{number}", partial(put, name="base", value=base))
    for args in (
        ("verify-checkpoint", "c0"), ("consolidate-checkpoint", "c0", "out"),
        ("sample", "c0", "--tokens", "2"), ("evaluate", "c0"),
        ("train", "model=hf", "model.path=c0", "data=text", f"data.path={make_text(here)}",
         "--dry-run"),
    ):  # fmt: skip
        code, out = invoke(*args)
        assert code in (2, 4), out
        assert "name one another" in out


@pytest.mark.parametrize("config", [[], {"data": 1}, {"data.path": ["x"]}, {"data.path": None}])
def test_settings_of_a_manifest_that_are_no_text_are_refused(here, config):
    make_checkpoint(here / "ck")
    reseal(here / "ck", partial(put, name="config", value=config))
    code, out = invoke("evaluate", "ck")
    assert (code, "manifest.json" in out) == (4, True), out


@pytest.mark.parametrize("args", [
    ("train", "data=tokens", "data.path=ftp://user:S3CR3T@127.0.0.1:9/t.bin"),
    ("train", "data.vla_path=s3://user:S3CR3T@bucket/t.bin"),
    ("train", "--resume", "s3://user:S3CR3T@bucket/x"), ("train", "--reume=https://h/x?sig=S3CR3T"),
    ("estimate-memory", "checkpoint.remote=https://h/x?token=S3CR3T"),
    ("tokenize", "https://:S3CR3T@host/t", "t.bin"),
    ("inspect-checkpoint", "s3://b/x?X-Amz-Credential=S3CR3T"), ("s3://user:S3CR3T@bucket", "x"),
])  # fmt: skip
def test_a_secret_on_the_command_line_is_neither_printed_nor_saved(here, monkeypatch, capfd, args):
    monkeypatch.setattr(sys, "argv", ["fsdpctl", *args])
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    with pytest.raises(SystemExit, match="2"):
        app.main()
    out, err = capfd.readouterr()
    assert "S3CR3T" not in out + err
    assert "password, token or signature" in err
    assert not [*here.iterdir()]


def test_a_prompt_may_have_any_url(monkeypatch, capfd):
    args = ["sample", "nothing", "--prompt", "https://me:you@host/x?token=1"]
    monkeypatch.setattr(sys, "argv", ["fsdpctl", *args])
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    with pytest.raises(SystemExit):
        app.main()
    assert "nothing: directory not found" in capfd.readouterr().err


def test_a_secret_in_a_recipe_or_manifest_is_not_printed(here):
    for url in ("s3://u:S3CR3T@b/x:1,y:2", "gs://b/x?X-Goog-Signature=S3CR3T"):
        (here / "r.yaml").write_text(f"data: tokens\ndata.path: {url}\n")
        code, out = invoke("train", "--recipe", "./r.yaml", "--print-config")
        assert (code, "S3CR3T" in printable(out)) == (2, False)
    make_checkpoint(here / "ck")
    path = {"data.path": "s3://u:S3CR3T@b/x"}
    reseal(here / "ck", lambda content: content["config"].update(path))
    code, out = invoke("train", "model=hf", "model.path=ck", "--dry-run")
    assert "S3CR3T" not in out


@pytest.mark.parametrize(
    "name", ["a\ntrain.steps: 7\n#.yaml", "a\rtrain.steps: 7.yaml", "a\u2028train.steps: 7.yaml",
             "\x9b31m\x85train.steps: 7.yaml"],
)  # fmt: skip
def test_the_name_of_a_converted_file_stays_in_its_comment(here, name):
    (here / name).write_text(YAML + "micro_batch_size: 1\n")
    code, out = invoke("convert", name, "--out", "o.yaml")
    assert code == 0, out
    written = (here / "o.yaml").read_text()
    assert "train.steps" not in yaml.safe_load(written)
    assert written.replace("\n", "").isprintable()


def test_values_of_a_converted_file_are_printed_in_escapes(here):
    for value in ('"\\x9b31mRED"', '"a\\u2028b"', '"\\u202Ex"', '"\\e]0;TITLE\\a"'):
        (here / "x.yaml").write_text(YAML.replace("NousResearch/Meta-Llama-3.1-8B", value))
        code, out = invoke("convert", "x.yaml")
        assert (code, out.replace("\n", "").isprintable()) == (0, True), out
        assert invoke("convert", "x.yaml", "--out", "o.yaml")[0] == 0
        assert yaml.safe_load((here / "o.yaml").read_text())["model.path"] == yaml.safe_load(value)
        (here / "o.yaml").unlink()


@pytest.mark.parametrize(
    "arg", ["nonsense", "modle=x", "launch.nnodes=x", "train.context_parallel=0",
             "train.context_parallel=x", "strategy=full_shrad", "train.steps=1.5",
             "optimizer.lr=many", "+x=1", "model.lora=1", "train=3"],
)  # fmt: skip
def test_words_of_convert_are_those_of_train(here, arg):
    (here / "x.yaml").write_text(YAML)
    for args in (("convert", "x.yaml", arg), ("train", "--from", "x.yaml", arg)):
        code, out = invoke(*args)
        assert ((code, "\n" in out), arg.partition("=")[0] in out) == ((2, False), True), out
    code, out = invoke("convert", "x.yaml", "train.steps=1", "train.steps=2")
    assert (code, "set twice" in out) == (2, True)


STEP: dict[str, Any] = {"step": 2, "samples": 8, "loss": 1.0, "grad_norm": 1.0}
LINES: dict[str, dict[str, Any]] = {
    "no keys": {"rejected_step": {"x": 1}},
    "a rank that is text": {"rejected_step": {**REJECTED, "rank": "x"}},
    "a rank below 0": {"rejected_step": {**REJECTED, "rank": -1}},
    "a sample above all": {"rejected_step": {**REJECTED, "samples": [10**9]}},
    "a sample of 31 digits": {"rejected_step": {**REJECTED, "samples": [10**30]}},
    "a sample below 0": {"rejected_step": {**REJECTED, "samples": [-1]}},
    "samples that are objects": {"rejected_step": {**REJECTED, "samples": [{}]}},
    "samples that are a number": {"rejected_step": {**REJECTED, "rank_samples": 5}},
    "a threshold that is text": {"rejected_step": {**REJECTED, "threshold": "1"}},
    "fewer samples than a step has": {"samples": 1},
}


@pytest.fixture
def run(here):
    run_dir = make_run(here / "run")
    args = [*TINY_MODEL, "data=text", f"data.path={make_text(here)}", "train.seq_len=16",
             "train.global_batch_size=4", "launch.nproc_per_node=1"]  # fmt: skip
    (run_dir / RUN_CONFIG).write_text(config_to_yaml(compose_config(args).config))
    return run_dir


@pytest.mark.parametrize("case", LINES)
def test_records_of_other_types_are_corrupted_in_one_line(run, case):
    (run / METRICS).write_text(json.dumps({**STEP, **LINES[case]}) + "\n")
    with pytest.raises(UsageError, match=r"metrics\.jsonl.*: corrupted") as caught:
        samples_of_step(run, 2)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "setting", ["train.context_parallel=9007199254740992", "train.micro_batch_size=9",
                "train.global_batch_size=1e300", "data.path=http://127.0.0.1:9/x"],
)  # fmt: skip
def test_settings_of_a_run_that_cannot_be_are_refused_in_one_line(run, setting):
    write_lines(run, STEP)
    name, _, text = setting.partition("=")
    content = yaml.safe_load((run / RUN_CONFIG).read_text()) | {name: text}
    (run / RUN_CONFIG).write_text(yaml.safe_dump(content))
    with pytest.raises(UsageError, match=name) as caught:
        samples_of_step(run, 2)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["auto", "none"])
def test_the_number_of_steps_of_a_run_may_be_open(run, text):
    (run / RUN_CONFIG).write_text(f"train.steps: {text}\n")
    code, out = invoke("status", "run")
    assert code == 0, out


def test_a_rejected_step_is_shown(run):
    (run / METRICS).write_text(json.dumps({**STEP, "rejected_step": REJECTED}) + "\n")
    samples, rejected = samples_of_step(run, 2)
    assert [each.ranks for each in samples] == [(0,)]
    assert rejected == "x, on rank 0; skip; loss 1.0, gradient norm 1.0"


@pytest.fixture
def deep(here):
    """A directory whose directories are nested deeper than Python's recursion limit."""
    (here / "deep").mkdir()
    os.chdir(here / "deep")
    for _ in range(1100):
        os.mkdir("a")
        os.chdir("a")
    os.chdir(here)
    yield "deep"
    subprocess.run(["rm", "-rf", here / "deep"], check=True)  # shutil is recursive


def test_deep_directories_in_other_places_are_one_line(deep, run, monkeypatch, capfd):
    monkeypatch.setenv("FSDPCTL_QUIET", "1")
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    os.rename(deep, "run/checkpoints/step-00000001.tmp-1")
    remove_interrupted_saves(run / "checkpoints")
    os.rename("run/checkpoints/step-00000001.tmp-1", path := "run/logs/deep")
    for args in (
        ("status", "run"),
        ("estimate-memory", "--from", path),
        ("sample", path),
        ("tokenize", path, "t.bin"),
    ):
        monkeypatch.setattr(sys, "argv", ["fsdpctl", *args])
        with pytest.raises(SystemExit, match="2"):
            app.main()
        assert capfd.readouterr().err.count("\n") == 1
    os.rename(path, deep)


@pytest.mark.parametrize(
    "name", ["step-00000009.tmp-x", "step-00000009", "step-00000009.tmp-removed"]
)
@pytest.mark.parametrize("kind", ["pipe", "socket", "file"])
def test_what_has_the_name_of_a_checkpoint_is_a_directory(run, here, name, kind):
    path = run / "checkpoints" / name
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        os.chdir(path.parent)
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(name)
        os.chdir(here)
    else:
        path.write_text("")
    for args in (
        ("status", "run"),
        ("train", "train.run_dir=run", "--dry-run"),
        ("sample", "run"),
    ):
        code, out = invoke(*args)
        assert (code, f"{name}: expected a directory" in out) == (2, True), out


def test_many_tensors_are_printed_as_few_are(here, monkeypatch):
    make_checkpoint(here / "ck")
    few = invoke("inspect-checkpoint", "ck")
    monkeypatch.setattr(LenientConsole, "is_terminal", True)
    monkeypatch.setattr(printing.out, "_width", 1000)
    monkeypatch.setattr(printing, "_MANY_ROWS", 1)
    assert invoke("inspect-checkpoint", "ck") == few
    assert few[1].count("model/") > 3


def test_json_of_a_manifest_has_no_control_characters(here):
    make_checkpoint(here / "ck")
    config = {"model": "a\x9b31m\u202e\nb"}
    reseal(here / "ck", lambda content: content["config"].update(config))
    code, out = invoke("inspect-checkpoint", "ck", "--json")
    assert (code, out.replace("\n", "").isprintable()) == (0, True)
    assert json.loads(out)["config"]["model"] == config["model"]
    out = invoke("inspect-checkpoint", "ck")[1]
    assert out.replace("\n", "").isprintable()
    assert not any(line.startswith("b") for line in out.splitlines())


def test_links_of_a_data_directory_stay_inside(here):
    outside, data = here / "secret.txt", here / "data"
    outside.write_text("secret " * 200)
    (data / "inner").mkdir(parents=True)
    (data / "inner" / "a.txt").write_text("text " * 200)
    (data / "b.txt").symlink_to("inner/a.txt")
    args = ("train", *TINY_MODEL, "data=text", "train.seq_len=16", "--dry-run")
    assert invoke(*args, "data.path=data")[0] == 0
    (data / "inner" / "c.txt").symlink_to(outside)
    code, out = invoke(*args, "data.path=data")
    problem = f"inner/c.txt links to {outside}, outside the directory"
    assert (code, problem in out) == (2, True), out
    assert invoke(*args, "data.path=data/inner/*")[0] == 0


def test_attached_templates_in_their_directory_are_known_to_status(here):
    import xxhash

    checkpoint = make_checkpoint(make_run(here / "run") / "checkpoints" / "step-00000001")
    (checkpoint / "additional_chat_templates").mkdir()
    for name in ("a", "b"):
        (checkpoint / f"additional_chat_templates/{name}.jinja").write_text("xy")
        known = {"size": 2, "xxh3": xxhash.xxh3_128_hexdigest(b"xy")}
        name = f"additional_chat_templates/{name}.jinja"
        reseal(checkpoint, lambda content: content["attachments"].update({name: known}))  # noqa: B023
    assert "missing" not in invoke("status", "run")[1]
    (checkpoint / "additional_chat_templates/b.jinja").write_text("x")
    assert "b.jinja: missing or of the wrong size" in invoke("status", "run")[1]
    Path(checkpoint / "additional_chat_templates/b.jinja").unlink()
    assert "b.jinja: missing or of the wrong size" in invoke("status", "run")[1]
