"""Environments of tests: settings reach the command, and those not permitted are named."""

import os
import sys
from collections import Counter

import pytest

from tests import environments
from tests.environments import ENVIRONMENTS, main


def test_each_setting_is_in_at_least_two_of_ten_environments():
    counts = Counter(each for settings in ENVIRONMENTS.values() for each in settings)
    assert set(environments.VARIABLES) < set(counts)
    assert (len(ENVIRONMENTS), min(counts.values())) == (10, 2)


@pytest.mark.parametrize("name, expression, expected", [
    ("scalar", "os.environ['ATEN_CPU_CAPABILITY'], len(os.sched_getaffinity(0)) in (1, 64)",
     "default True"),
    ("mkl-onednn", "os.cpu_count(), len(os.sched_getaffinity(0))", "64 64"),
    ("one-cpu", "os.getcwdb()[-15:], os.path.expanduser('~')", r"b'ein \xc3\xbc/checkout' /sys"),
])  # fmt: skip
def test_a_command_in_an_environment_returns_its_exit_code(capfdbinary, name, expression, expected):
    before = os.sched_getaffinity(0)
    code = f"import os, sys; print({expression}); sys.exit(3)"
    assert (main([name, "--", sys.executable, "-c", code]), os.sched_getaffinity(0)) == (3, before)
    assert expected in capfdbinary.readouterr().out.decode().splitlines()


def test_a_setting_that_is_not_permitted_is_named_and_left_out(monkeypatch, capfd):
    monkeypatch.setattr(environments, "_USER", ["unshare", "--no-such-option"])
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert main(["zone", "--", sys.executable, "-c", "print('ran')"]) == 0
    message, _, ran = capfd.readouterr().out.splitlines()
    assert (message.partition(":")[0], ran) == ("user", "ran")


@pytest.mark.parametrize("args", [[], ["avx3", "--", "true"], ["avx2"], ["avx2", "--"]], ids=str)
def test_other_words_are_refused(capsys, args):
    assert main(args) == 2
    assert capsys.readouterr().out.startswith("expected --of-today, --all or one of usual, ")
