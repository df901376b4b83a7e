"""The progress of a run for Kubeflow Trainer, as `kubectl get trainjob` shows it."""

import math
import os
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException, HTTPSConnection
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from fsdpctl.run.step_metrics import StepMetrics
from fsdpctl.train.callback import Callback, is_joint

if TYPE_CHECKING:
    from fsdpctl.train.trainer import Trainer

_VARIABLES = ("URL", "CA_CERT", "TOKEN")  # after KUBEFLOW_TRAINER_SERVER_
_INTERVAL = 5.0  # seconds; Kubeflow asks for no less
_PATIENCE, _LEAVING = 10.0, 2.0  # seconds for a message, and for the last one


@dataclass(frozen=True, slots=True)
class StatusServer:
    """The server that takes the status of a TrainJob."""

    url: str
    ca_cert: str  # a file
    token: str  # a file whose content changes

    @staticmethod
    def of_this_pod() -> "StatusServer | None":
        """Return the server that the pod's variables name; None unless all are set."""
        found = [os.environ.get(f"KUBEFLOW_TRAINER_SERVER_{name}", "") for name in _VARIABLES]
        return StatusServer(*found) if all(found) else None

    def post(self, status: dict[str, Any]) -> None:
        """Send the status of the trainer, without proxies and redirections.

        Raises:
            OSError, ValueError, HTTPException: If it is not accepted.
        """
        where = urlsplit(self.url)
        if where.scheme != "https" or where.hostname is None:
            raise ValueError(f"expected an https address, got {self.url}")
        headers = {
            "Authorization": f"Bearer {Path(self.token).read_text().strip()}",
            "Content-Type": "application/json",
        }
        context = ssl.create_default_context(cafile=self.ca_cert)
        server = HTTPSConnection(where.hostname, where.port, timeout=_PATIENCE, context=context)
        try:
            server.request("POST", where.path, dumps({"trainerStatus": status}), headers)
            answer = server.getresponse()
            if answer.status // 100 != 2:
                raise OSError(f"HTTP status {answer.status} {answer.reason}")
        finally:
            server.close()


class KubeflowStatus(Callback):
    """A thread of rank 0 that posts the progress every few seconds; training never waits for it.

    Failures are ignored, after one line about the first.
    """

    def __init__(
        self, warn: Callable[[str], None], *, is_on: bool, every: float = _INTERVAL
    ) -> None:
        """Start the thread if this rank `is_on` and the pod's variables name a server."""
        self._server = StatusServer.of_this_pod() if is_on else None
        self._warn, self._every = warn, every
        self._status: dict[str, Any] | None = None
        self._first: tuple[int, float] | None = None  # the first step, and when it was completed
        self._has_ended, self._has_warned = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="kubeflow", daemon=True)
        if self._server is not None:
            self._thread.start()

    def step(self, run: "Trainer", done: StepMetrics) -> None:
        """Have a completed step posted with the next message."""
        now = time.monotonic()
        if self._first is None:
            self._first = done.step, now
        first, began = self._first
        status: dict[str, Any] = {
            "progressPercentage": 100 * done.step // run.total_steps,
            "lastUpdatedTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "metrics": [
                {"name": "step", "value": str(done.step)},
                {"name": "loss", "value": f"{done.figures.loss:.6g}"},
                {"name": "tokens_per_second", "value": f"{done.tokens_per_second:.1f}"},
            ],
        }
        if done.step > first:
            each = (now - began) / (done.step - first)
            status["estimatedRemainingSeconds"] = math.ceil(each * (run.total_steps - done.step))
        self._status = status

    def went_back(self, run: "Trainer", step: int) -> None:
        """Measure the time per step again."""
        self._first = None

    def end(self, run: "Trainer", error: BaseException | None) -> None:
        """Post the last status, and wait a moment for it unless the run failed."""
        self._has_ended.set()
        if self._server is not None and is_joint(error):
            self._thread.join(_LEAVING)

    def _run(self) -> None:
        posted = None
        while not self._has_ended.wait(self._every):
            if self._status is not posted:
                posted = self._status
                self._post(posted)
        if self._status is not posted:
            self._post(self._status)

    def _post(self, status: dict[str, Any] | None) -> None:
        if self._server is None or status is None:
            return
        try:
            self._server.post(status)
        except (OSError, ValueError, HTTPException) as error:
            if not self._has_warned:
                self._has_warned = True
                self._warn(f"status for Kubeflow not posted: {error}; the run continues")
