"""Which failure the others follow from."""

import signal
from collections.abc import Callable

import pytest
from torch._dynamo.exc import BackendCompilerFailed, InternalTorchDynamoError
from torch._inductor.exc import CppCompileError, InductorError, InvalidCxxCompiler
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from fsdpctl.launch.outcome import Ended, Failure, Outcome, failure_of


def failure(rank: int, code: int, message: str = "", at: int = 100) -> Failure:
    return Failure(rank, "h", code, message, at)


def test_a_rank_that_timed_out_is_not_the_cause():
    waited = failure(0, 1, "[gloo] Timed out waiting 10000ms for recv operation to complete")
    stopped = failure(1, -signal.SIGKILL, at=130)  # by the agent, half a minute later
    outcome = Outcome((waited, stopped), None)
    assert outcome.cause is waited
    assert waited.waited_in_vain
    assert not stopped.waited_in_vain


def test_a_killed_rank_is_the_cause_of_broken_connections():
    killed = failure(1, -signal.SIGKILL)
    outcome = Outcome((failure(0, 1, "Connection closed by peer [127.0.0.1]:1"), killed), None)
    assert outcome.cause is killed


@pytest.mark.parametrize(
    "broken",
    ["Connection reset by peer", "a rank has ended while this one waited for gradients of rank 1"],
)
def test_a_reported_error_comes_before_broken_connections(broken):
    spoken = failure(1, 2, "token 7 is 99, above its vocabulary of 9")
    outcome = Outcome((failure(0, 1, broken), spoken), None)
    assert outcome.cause is spoken
    assert not spoken.waited_in_vain


def test_a_reported_error_counts_if_the_rank_was_killed_later():
    """As where the process group of a failed rank cannot end before its peers give up."""
    spoken = failure(3, -signal.SIGKILL, "CUDA out of memory")
    others = [failure(rank, -signal.SIGABRT, at=700) for rank in range(3)]
    assert Outcome((*others, spoken), None).cause is spoken
    assert spoken.cause == "CUDA out of memory"


def test_messages_of_the_agent_are_not_the_ranks_own():
    killed = ProcessFailure(0, 1234, -signal.SIGKILL, "/no/such/file")
    assert failure_of(0, killed).message == ""
    assert failure_of(0, killed).cause == "killed by signal 9 (SIGKILL)"


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
    def made() -> None: ...

    made.__name__ = name
    return made


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (CppCompileError(["c++", "-o", "error.so"], OUTPUT), "fatal error: omp.h: No such file"),
        (CppCompileError(["c++"], "c++: fatal error: Killed signal terminated program"), "Killed"),
        (CppCompileError(["c++"], LINKED), "/usr/bin/ld: cannot find -lgomp"),
        (CppCompileError(["c++"], ""), "C++ compile error"),
        (InvalidCxxCompiler(), "No working C++ compiler found"),
        (OSError(28, "No space left on device", "/tmp/x"), "No space left on device: '/tmp/x'"),
        (RuntimeError(SUBPROCESS), "ModuleNotFoundError: No module named 'error'"),
        (AssertionError("negative stride\n  target: aten.view"), "negative stride"),
    ],
)
@pytest.mark.parametrize("wrapped", ["inductor", "backend", "dynamo"])
def test_a_failed_compilation_names_the_innermost_error_in_one_line(error, named, wrapped):
    makers: dict[str, Callable[[], Exception]] = {
        "inductor": lambda: InductorError(error, None),
        "backend": lambda: BackendCompilerFailed(backend("inductor"), error, None),
        "dynamo": lambda: InternalTorchDynamoError(f"{type(error).__name__}: {error}"),
    }
    found = makers[wrapped]()
    message = {"message": f"{type(found).__name__}: {found}{ADVICE}", "extraInfo": {}}
    told = ProcessFailure(0, 1234, 1, "/no/such/file")
    vars(told)["message"] = message  # as torch reads it from the file
    cause = failure_of(0, told).cause
    assert cause.startswith("torch.compile failed: ")
    assert named in cause
    assert "\n" not in cause
    assert not any(word in cause for word in ("TORCHDYNAMO", "collect2", "In file", "line 1"))


@pytest.mark.parametrize(
    "message", ["runs/dynamo: could not be written", "model.path=inductor: not found"]
)
def test_other_errors_are_not_taken_for_those_of_a_compiler(message):
    assert failure(0, 1, message).cause == message


def test_clocks_of_hosts_may_differ():
    broken = Failure(0, "early", 1, "Connection closed by peer", 92)
    killed = Failure(2, "late", -signal.SIGKILL, "", 100)
    refused = Failure(2, "late", 2, "data.path=x: damaged", 100)
    assert Outcome((broken, killed), None).cause == killed
    assert Outcome((broken, refused), None).cause == refused


GLOO = "[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:1. GLHF!"


@pytest.mark.parametrize(
    ("ended", "silent", "named"),
    [
        (Ended((failure(0, 1, GLOO),)), {1: "b"}, "node 1 on b is unreachable; rank 0 stopped"),
        (Ended((failure(0, 1, "[gloo] Timed out waiting 10000ms"), failure(1, 1, GLOO))), {1: ""},
         "node 1 is unreachable; ranks 0, 1 stopped"),
        (Ended(tuple(failure(rank, -9) for rank in range(8)), hang="no progress: rank 8"),
         {1: "b"}, "node 1 on b is unreachable; ranks 0, 1, 2, 3, 4 and 3 more stopped"),
        (Ended(were_ended=True), {1: "b", 2: "c"},
         "nodes 1 on b, 2 on c are unreachable; the ranks of this node stopped"),
        (Ended((failure(0, 1, "data.path=x: damaged"),)), {1: "b"}, "rank 0 on h: data.path=x:"),
        (Ended((failure(0, 1, GLOO), failure(1, -9))), {1: "b"}, "rank 1 on h: killed by signal 9"),
        (Ended((failure(0, 1, GLOO),)), {}, "rank 0 on h: [/gloo"),
    ],
)  # fmt: skip
def test_a_lost_node_is_named_unless_a_rank_failed_by_itself(ended, silent, named):
    outcome = Outcome.of({0: ended}, 0, silent)
    title = f"{outcome.lost}; {outcome.stopped}" if outcome.lost else outcome.reason
    assert title.startswith(named)
    assert outcome.reason.startswith(named.partition(";")[0])


def test_a_node_stopped_before_its_ranks_started_stops_the_others():
    assert Ended(stopped_early=True).has_failed
    assert not Ended().has_failed
