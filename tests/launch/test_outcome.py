"""The failure that caused the failures of other ranks."""

import signal
from collections.abc import Callable

import pytest
from torch._dynamo.exc import BackendCompilerFailed, InternalTorchDynamoError
from torch._inductor.exc import CppCompileError, InductorError, InvalidCxxCompiler
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from fsdpctl.launch.outcome import Failure, NodeOutcome, RoundOutcome, to_failure


def failure(rank: int, code: int, message: str = "", at: int = 100) -> Failure:
    return Failure(rank, "h", code, message, at)


TIMED_OUT = "[gloo] Timed out waiting 10000ms for recv operation to complete"
SPOKEN = failure(1, 2, "token 7 is 99, above its vocabulary of 9")


@pytest.mark.parametrize(("others", "cause"), [
    # Rank 0 timed out; the agent killed rank 1 half a minute later.
    ([failure(1, -signal.SIGKILL, at=130)], failure(0, 1, TIMED_OUT)),
    ([failure(0, 1, "Connection closed by peer [127.0.0.1]:1")], failure(1, -signal.SIGKILL)),
    ([failure(0, 1, "Connection reset by peer")], SPOKEN),
    ([failure(0, 1, "a rank has ended while this one waited for gradients of rank 1")], SPOKEN),
    # Peers give up first if the process group of the failed rank cannot end.
    ([failure(rank, -signal.SIGABRT, at=700) for rank in range(3)],
     failure(3, -signal.SIGKILL, "CUDA out of memory")),
    # Clocks of hosts differ.
    ([Failure(0, "early", 1, "Connection closed by peer", 92)],
     Failure(2, "late", -signal.SIGKILL, "", 100)),
    ([Failure(0, "early", 1, "Connection closed by peer", 92)],
     Failure(2, "late", 2, "data.path=x: damaged", 100)),
])  # fmt: skip
def test_the_failure_that_the_others_follow_from(others, cause):
    assert RoundOutcome((*others, cause), None).cause == cause
    assert cause.timed_out_waiting == (cause.message == TIMED_OUT)
    assert cause.description == (cause.message or "killed by signal 9 (SIGKILL)")
    assert not any(each.timed_out_waiting for each in others)


def test_messages_of_the_agent_are_not_the_ranks_own():
    killed = ProcessFailure(0, 1234, -signal.SIGKILL, "/no/such/file")
    assert to_failure(0, killed).message == ""
    assert to_failure(0, killed).description == "killed by signal 9 (SIGKILL)"


ADVICE = "\n\nSet TORCHDYNAMO_VERBOSE=1 for the internal stack trace (please do this …)"
OUTPUT = """In file included from /tmp/prefix.h:1,
                 from /tmp/c.cpp:2:
/tmp/c.cpp:5:10: fatal error: omp.h: No such file or directory
    5 | #include <omp.h>  // or an error
compilation terminated."""
LINKED = "/usr/bin/ld: cannot find -lgomp\ncollect2: error: ld returned 1 exit status"
SUBPROCESS = """An exception occurred in a subprocess:

Traceback (most recent call last):
  File "worker.py", line 1, in error
    raise
ModuleNotFoundError: No module named 'error'
"""


def backend(name: str) -> Callable[[], None]:
    def broken_backend() -> None: ...

    broken_backend.__name__ = name
    return broken_backend


@pytest.mark.parametrize(("error", "named"), [
    (CppCompileError(["c++", "-o", "error.so"], OUTPUT), "fatal error: omp.h: No such file"),
    (CppCompileError(["c++"], "c++: fatal error: Killed signal terminated program"), "Killed"),
    (CppCompileError(["c++"], LINKED), "/usr/bin/ld: cannot find -lgomp"),
    (CppCompileError(["c++"], ""), "C++ compile error"),
    (InvalidCxxCompiler(), "No working C++ compiler found"),
    (OSError(28, "No space left on device", "/tmp/x"), "No space left on device: '/tmp/x'"),
    (RuntimeError(SUBPROCESS), "ModuleNotFoundError: No module named 'error'"),
    (AssertionError("negative stride\n  target: aten.view"), "negative stride"),
])  # fmt: skip
@pytest.mark.parametrize("wrapped", ["inductor", "backend", "dynamo"])
def test_a_failed_compilation_names_the_innermost_error_in_one_line(error, named, wrapped):
    makers: dict[str, Callable[[], Exception]] = {
        "inductor": lambda: InductorError(error, None),
        "backend": lambda: BackendCompilerFailed(backend("inductor"), error, None),
        "dynamo": lambda: InternalTorchDynamoError(f"{type(error).__name__}: {error}"),
    }
    result = makers[wrapped]()
    message = {"message": f"{type(result).__name__}: {result}{ADVICE}", "extraInfo": {}}
    process_failure = ProcessFailure(0, 1234, 1, "/no/such/file")
    vars(process_failure)["message"] = message  # as torch reads it from the file
    cause = to_failure(0, process_failure).description
    assert cause.startswith("torch.compile failed: ")
    assert named in cause
    assert "\n" not in cause
    assert not any(arg in cause for arg in ("TORCHDYNAMO", "collect2", "In file", "line 1"))


@pytest.mark.parametrize(
    "message", ["runs/dynamo: could not be written", "model.path=inductor: not found"]
)
def test_other_errors_are_not_taken_for_those_of_a_compiler(message):
    assert failure(0, 1, message).description == message


GLOO = "[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:1. GLHF!"


@pytest.mark.parametrize(("ended", "silent", "named"), [
    (NodeOutcome((failure(0, 1, GLOO),)), {1: "b"}, "node 1 on b is unreachable; rank 0 stopped"),
    (NodeOutcome((failure(0, 1, "[gloo] Timed out waiting 10000ms"), failure(1, 1, GLOO))), {1: ""},
     "node 1 is unreachable; ranks 0, 1 stopped"),
    (NodeOutcome(tuple(failure(rank, -9) for rank in range(8)), hang="no progress: rank 8"),
     {1: "b"}, "node 1 on b is unreachable; ranks 0, 1, 2, 3, 4 and 3 more stopped"),
    (NodeOutcome(killed_for_other_node=True), {1: "b", 2: "c"},
     "nodes 1 on b, 2 on c are unreachable; the ranks of this node stopped"),
    (NodeOutcome((failure(0, 1, "data.path=x: damaged"),)), {1: "b"}, "rank 0 on h: data.path=x:"),
    (NodeOutcome((failure(0, 1, GLOO), failure(1, -9))), {1: "b"},
     "rank 1 on h: killed by signal 9"),
    (NodeOutcome((failure(0, 1, GLOO),)), {}, "rank 0 on h: [/gloo"),
])  # fmt: skip
def test_a_lost_node_is_named_unless_a_rank_failed_by_itself(ended, silent, named):
    outcome = RoundOutcome.combine({0: ended}, 0, silent)
    title = (
        f"{outcome.unreachable_text}; {outcome.exited_ranks_text}"
        if outcome.unreachable_text
        else outcome.reason
    )
    assert title.startswith(named)
    assert outcome.reason.startswith(named.partition(";")[0])


def test_a_node_stopped_before_its_ranks_started_stops_the_others():
    assert NodeOutcome(stopped_early=True).stops_others
    assert not NodeOutcome().stops_others
