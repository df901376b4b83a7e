"""The outcomes of a launch: how its ranks exited, and which failure caused the other failures."""

import contextlib
import re
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdpctl.errors import STOP_SIGNALS, ExitCode, shorten_list
from fsdpctl.io.resources import CGROUP_ROOT, PROC_CGROUP, cgroup_files

# Failures that follow the first one within this time may have the same cause. torchrun's agent
# kills the other workers half a minute after SIGTERM, so it is not the cause of an earlier kill.
_SAME_CAUSE_SECONDS = 5
# Errors of collectives and stores whose peers have exited or are unreachable.
_BROKEN_CONNECTION = re.compile(
    "Connection (closed|reset|refused|was)|Broken pipe|NCCL|gloo|TCPStore|DistStore|"
    "a rank has ended while|unreachable|No route to host",
    re.IGNORECASE,
)
_ENDED_BY_SIGNAL = re.compile(r"Signal \d+ \(\w+\) received by PID \d+")  # the agent's message
_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
_MACHINE_COUNTERS = Path("/proc/vmstat")
_COMPILER_ERROR = re.compile("_inductor|'inductor'|_dynamo|DYNAMO|Inductor|Dynamo|CppCompileError")
# Lines of compiler output that state the error, and those that only repeat that there was one.
_NAMES_ERROR = re.compile("error|exception|cannot|killed|undefined|no space", re.IGNORECASE)
_UNSPECIFIC = re.compile("^collect2:|raised:$")
COMPILE_FAILED = "torch.compile failed"


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of one worker."""

    rank: int
    host: str
    exit_code: int  # negative: the signal that killed it
    message: str  # empty if the worker reported no error
    timestamp: int  # when the error or the exit was noticed; seconds since the epoch
    oom_killed: bool = False  # killed by the kernel's out-of-memory killer

    @property
    def was_killed(self) -> bool:
        """Whether a signal killed the worker before it could report an error."""
        return self.exit_code < 0 and not self.message

    @property
    def timed_out_waiting(self) -> bool:
        """Whether the worker timed out waiting for other ranks, and so may not be the cause."""
        return not self.was_killed and _TIMED_OUT.search(self.message) is not None

    @property
    def description(self) -> str:
        if self.was_killed:
            if self.oom_killed:
                return "killed by the kernel: this machine or its memory limit is out of memory"
            name = signal.Signals(-self.exit_code).name
            return f"killed by signal {-self.exit_code} ({name})"
        if _COMPILER_ERROR.search(self.message):
            return f"{COMPILE_FAILED}: {_innermost_error(self.message)[:300]}"
        return " ".join(self.message.split())


def _innermost_error(message: str) -> str:
    """Return the line of torch.compile's message that names the error.

    The other lines are commands, source code, and advice to developers. If a C++ compiler ran, the
    line is from its output.
    """
    text = re.split(r"\n\s*(?:Set TORCH|from user code)", message)[0]
    output = re.split(r"Output:\n|Traceback \(most recent call last\):\n", text)[-1]
    lines = (output if output.strip() else text).strip("\n").splitlines()
    specific = [line for line in lines if line[:1].strip() and not _UNSPECIFIC.search(line)]
    return next(filter(_NAMES_ERROR.search, specific), (*specific, *lines, "no message")[0])


@dataclass(frozen=True, slots=True)
class NodeOutcome:
    """The exit of one launcher's workers, as reported to the other launchers."""

    failures: tuple[Failure, ...] = ()
    stop_signal: int | None = None  # received by the launcher
    stopped_early: bool = False  # before workers were started
    hang: str = ""  # the hung ranks, in one line
    failed_at: float | None = None  # when the first worker failed; seconds since the epoch
    killed_for_other_node: bool = False  # workers were killed only because another node failed

    @property
    def stops_others(self) -> bool:
        """Whether other nodes must stop: not if workers only saved after a stop request."""
        return self.stopped_early or any(x.exit_code != ExitCode.STOPPED for x in self.failures)


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """The end of a round; without a failure or an early stop, all workers finished."""

    failures: tuple[Failure, ...]
    stop_signal: int | None  # received by this launcher
    stop_requested: bool = False  # whether any launcher received a stop signal
    stopped_early: bool = False  # before workers were started
    unreachable_nodes: Mapping[int, str] = field(default_factory=dict)  # their hosts, by node
    hang: str = ""  # the hung ranks, in one line
    failed_at: float | None = None  # according to this launcher's clock
    killed_for_other_node: bool = False  # this launcher's workers

    @classmethod
    def combine(
        cls,
        outcomes: Mapping[int, NodeOutcome],
        node: int,
        unreachable: Mapping[int, str] | None = None,
    ) -> "RoundOutcome":
        """Combine the outcomes of the launchers of all nodes; `node` is this launcher's."""
        local, all_outcomes = outcomes[node], outcomes.values()
        return cls(
            tuple(failure for index in sorted(outcomes) for failure in outcomes[index].failures),
            local.stop_signal,
            stop_requested=any(each.stop_signal is not None for each in all_outcomes),
            stopped_early=any(each.stopped_early for each in all_outcomes),
            unreachable_nodes=unreachable or {},
            hang=next((each.hang for each in all_outcomes if each.hang), ""),
            failed_at=local.failed_at,
            killed_for_other_node=local.killed_for_other_node,
        )

    @property
    def has_failed(self) -> bool:
        """Whether a rank failed, hung, or exited at a stop request."""
        return bool(self.failures or self.hang or self.killed_for_other_node)

    @property
    def reason(self) -> str:
        if self.unreachable_text or self.hang or self.cause is None:
            return self.unreachable_text or self.hang or "another node has failed"
        return f"rank {self.cause.rank} on {self.cause.host}: {self.cause.description}"

    @property
    def unreachable_text(self) -> str:
        """The nodes that are unreachable, unless a rank of another node failed by itself."""
        cause = None if self.hang else self.cause
        if not self.unreachable_nodes:
            return ""
        if cause and not (cause.timed_out_waiting or _BROKEN_CONNECTION.search(cause.message)):
            return ""
        nodes = self.unreachable_nodes.items()
        text = ", ".join(f"{node} on {host}" if host else str(node) for node, host in nodes)
        return f"node {text} is unreachable" if len(nodes) == 1 else f"nodes {text} are unreachable"

    @property
    def exited_ranks_text(self) -> str:
        ranks = [str(each.rank) for each in self.failures]
        named = f"rank{'s' * (len(ranks) > 1)} {shorten_list(ranks)}"
        return f"{named if ranks else 'the ranks of this node'} stopped"

    @property
    def was_stopped_at_start(self) -> bool:
        """Whether a stop was requested before the ranks had anything to save."""
        killed_by_stop = any(
            each.was_killed and -each.exit_code in STOP_SIGNALS for each in self.failures
        )
        saved = any(each.exit_code == ExitCode.STOPPED for each in self.failures)
        return self.stopped_early or (self.stop_requested and killed_by_stop and not saved)

    @property
    def cause(self) -> Failure | None:
        """The failure that caused the other failures.

        Of the failures that come soon after the first of their host, prefers a killed worker, then
        a message other than a broken connection. SIGTERM comes from the agent and does not count.
        """
        limits = dict[str, int]()  # separate by host, because the clocks of hosts may differ
        for each in self.failures:
            limit = each.timestamp + _SAME_CAUSE_SECONDS
            limits[each.host] = min(limit, limits.get(each.host, limit))
        early = [x for x in self.failures if x.timestamp <= limits[x.host]]
        candidates = [each for each in early if each.message or each.exit_code != -signal.SIGTERM]
        killed = [each for each in candidates if each.was_killed]
        with_message = [each for each in candidates if not _BROKEN_CONNECTION.search(each.message)]
        return next(iter([*killed, *with_message, *candidates, *early]), None)


def to_failure(rank: int, process_failure: Any, *, oom_killed: bool = False) -> Failure:
    """Convert torch's ProcessFailure.

    If `oom_killed`, the kernel's out-of-memory killer killed a process during the round.
    """
    message = process_failure.message
    if isinstance(message, dict):
        message = message.get("message", "")
    # torch prefixes the exception's class.
    text = re.sub(r"^\w+(Error|Exception): ", "", str(message))
    code, timestamp = process_failure.exitcode, int(process_failure.timestamp)
    if _ENDED_BY_SIGNAL.fullmatch(text):
        text = ""
    if text.startswith("To enable traceback"):  # the worker wrote no error file
        text = f"exit code {code}, without an error message"
    is_oom = oom_killed and code == -signal.SIGKILL
    return Failure(rank, socket.gethostname(), code, text, timestamp, is_oom)


def count_oom_kills(root: Path = CGROUP_ROOT, cgroup: Path = PROC_CGROUP) -> int:
    """Return how many processes the kernel has killed for lack of memory.

    Counts the processes in this process's control group, or on the machine if it has no counter.
    """
    files = [*cgroup_files("memory.events", "memory.oom_control", root, cgroup), _MACHINE_COUNTERS]
    return next((count for file in files if (count := _count_in(file)) is not None), 0)


def _count_in(file: Path) -> int | None:
    with contextlib.suppress(OSError):
        for line in file.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill" and count.strip().isdecimal():
                return int(count)
    return None
