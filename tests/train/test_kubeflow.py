"""The status for Kubeflow Trainer: what a server with a certificate of its own gets."""

import json
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jsonschema
import pytest

from fsdpctl.run.step_metrics import StepMetrics
from fsdpctl.train.callbacks import kubeflow
from fsdpctl.train.callbacks.kubeflow import KubeflowStatus
from fsdpctl.train.trainer import Trainer
from tests.cli.run import TINY, fsdpctl, make_text
from tests.examples.test_examples import schema_of

RUN = cast(Trainer, SimpleNamespace(total_steps=40))
_EVERY = 0.2
_PREFIX = "KUBEFLOW_TRAINER_SERVER_"


def done(step: int, loss: float = 2.5) -> StepMetrics:
    figures = SimpleNamespace(loss=loss)
    return cast(StepMetrics, SimpleNamespace(step=step, figures=figures, tokens_per_second=12.0))


class Server:
    """What it has got: when, from whom, and what; `answer` acts on each request."""

    def __init__(self) -> None:
        self.got: list[tuple[float, str, dict[str, Any]]] = []
        self.paths: set[str] = set()
        self.answer: Callable[[], int] = lambda: 200

    @property
    def statuses(self) -> list[dict[str, Any]]:
        return [body["trainerStatus"] for _, _, body in self.got]

    def wait_for(self, count: int) -> None:
        until = time.monotonic() + 20
        while len(self.got) < count:
            assert time.monotonic() < until, self.got
            time.sleep(0.01)


def _certificate(folder: Path) -> Path:
    """A file with the key and the certificate of 127.0.0.1."""
    if not shutil.which("openssl"):
        pytest.skip("certificates are made by openssl")
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=t"
    subprocess.run(
        ["openssl", *words.split(), "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", str(folder / "key.pem"), "-out", str(folder / "ca.crt")],
        check=True, capture_output=True, timeout=20,
    )  # fmt: skip
    return folder / "ca.crt"


@contextmanager
def _serving(certificate: Path, server: Server) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers["Content-Length"]))
            server.paths.add(self.path)
            server.got.append((time.monotonic(), self.headers["Authorization"], json.loads(text)))
            self.send_response(server.answer())
            self.end_headers()

        def log_message(self, *about: object) -> None:
            pass

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads, http.block_on_close = True, False
        http.socket = context.wrap_socket(http.socket, server_side=True)
        threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield f"https://127.0.0.1:{http.server_address[1]}/trainjobs/my-run/status"
        finally:
            http.shutdown()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server, and the variables that name it."""
    found, certificate = Server(), _certificate(tmp_path)
    (tmp_path / "token").write_text("first\n")
    with _serving(certificate, found) as url:
        values = {"URL": url, "CA_CERT": str(certificate), "TOKEN": str(tmp_path / "token")}
        for name, value in values.items():
            monkeypatch.setenv(_PREFIX + name, value)
        yield found


def test_the_progress_is_posted(server: Server, tmp_path: Path) -> None:
    said: list[str] = []
    status = KubeflowStatus(said.append, is_on=True, every=_EVERY)
    status.step(RUN, done(10))
    server.wait_for(1)
    (tmp_path / "token").write_text("second\n")
    for step in range(11, 21):  # more often than messages
        status.step(RUN, done(step))
        time.sleep(_EVERY / 8)
    server.wait_for(2)
    status.step(RUN, done(40, loss=float("nan")))
    status.end(RUN, None)
    assert said == []
    for *_, body in server.got:
        jsonschema.validate(body, schema_of("kubeflow-trainer-api-updatetrainjobstatusrequest"))
    assert [token for _, token, _ in server.got] == [
        "Bearer first", *["Bearer second"] * (len(server.got) - 1)
    ]  # fmt: skip
    times = [when for when, *_ in server.got][:-1]  # the last one does not wait
    assert all(b - a > 0.9 * _EVERY for a, b in zip(times, times[1:], strict=False))
    first, second, *_, last = server.statuses
    assert first["progressPercentage"] == 25
    assert "estimatedRemainingSeconds" not in first
    assert 0 < second["estimatedRemainingSeconds"] < 60
    assert last["progressPercentage"] == 100
    assert last["estimatedRemainingSeconds"] == 0
    assert {"name": "loss", "value": "nan"} in last["metrics"]
    assert server.paths == {"/trainjobs/my-run/status"}


def test_a_failing_server_is_reported_once(server: Server) -> None:
    said: list[str] = []
    server.answer = lambda: 403
    status = KubeflowStatus(said.append, is_on=True, every=0.02)
    for step in (1, 2, 3):
        status.step(RUN, done(step))
        server.wait_for(step)
    status.end(RUN, None)
    assert said == ["status for Kubeflow not posted: HTTP status 403 Forbidden; the run continues"]


def test_training_does_not_wait_for_a_hanging_server(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubeflow, "_LEAVING", 0.1)
    go_on = threading.Event()
    server.answer = lambda: 200 if go_on.wait(20) else 500
    status = KubeflowStatus(pytest.fail, is_on=True, every=0.02)
    status.step(RUN, done(1))
    server.wait_for(1)
    began = time.monotonic()
    for step in range(2, 40):
        status.step(RUN, done(step))
    status.end(RUN, None)
    assert time.monotonic() - began < 1
    assert len(server.got) == 1
    go_on.set()
    status._thread.join(20)


@pytest.mark.parametrize("broken", ["TOKEN", "CA_CERT", "URL"])
def test_nothing_is_posted_without_certificate_token_and_tls(
    broken: str, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    other = tmp_path / "other"
    other.mkdir()
    values = {"TOKEN": str(other), "CA_CERT": str(_certificate(other)), "URL": "http://127.0.0.1/"}
    monkeypatch.setenv(_PREFIX + broken, values[broken])
    status = KubeflowStatus(said.append, is_on=True, every=0.02)
    status.step(RUN, done(1))
    status.end(RUN, None)
    (line,) = said
    reasons = {"TOKEN": "Is a directory", "CA_CERT": "CERTIFICATE_VERIFY_FAILED", "URL": "https"}
    assert reasons[broken] in line
    assert server.got == []


@pytest.mark.parametrize("missing", ["TOKEN", "CA_CERT", "URL", "rank 0"])
def test_nothing_starts_without_the_variables_or_on_other_ranks(
    missing: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(_PREFIX + missing, raising=False)
    status = KubeflowStatus(pytest.fail, is_on=missing != "rank 0", every=0.02)
    status.step(RUN, done(1))
    assert not status._thread.is_alive()
    status.end(RUN, None)


@pytest.mark.slow
def test_a_run_posts_from_one_rank(server: Server, tmp_path: Path) -> None:
    words = [*TINY, f"data.path={make_text(tmp_path)}", f"train.run_dir={tmp_path / 'run'}"]
    ended = fsdpctl("train", *words, "train.steps=40", "launch.nproc_per_node=2", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    percent = [status["progressPercentage"] for status in server.statuses]
    assert percent == sorted(set(percent))  # two ranks would post each twice
    assert percent[-1] == 100
    assert "Kubeflow" not in ended.stdout
