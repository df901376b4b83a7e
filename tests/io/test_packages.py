"""Packages that are missing or too old."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from fsdpctl.errors import UsageError
from fsdpctl.io.packages import import_package, install_hint
from fsdpctl.io.stores import open_store
from tests.commands.run import environment

NAMES = {"requires": ["hydra-core>=1.3.2", "gguf; extra == 'dev'", "gguf>=0.17; extra == 'gguf'"]}


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    """A directory that is first on sys.path; `fsdpctl` has the requirements NAMES."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(metadata, "requires", lambda name: NAMES["requires"])
    return tmp_path


def plant(folder: Path, module: str, source: str, version: str = "") -> None:
    (folder / f"{module}.py").write_text(source)
    sys.modules.pop(module, None)
    if version:
        options = folder / f"{module}-{version}.dist-info"
        options.mkdir()
        (options / "METADATA").write_text(f"Name: {module}\nVersion: {version}\n")


@pytest.mark.parametrize("module, error", [
    ("gguf", "gguf>=0.17 not installed; run `pip install 'fsdpctl[gguf]'`"),
    ("hydra", "hydra-core>=1.3.2 not installed; run `pip install 'hydra-core>=1.3.2'`"),
    ("sentencepiece_", "sentencepiece_ not installed; run `pip install 'sentencepiece_'`"),
])  # fmt: skip
def test_a_missing_package_names_its_versions_and_the_line_that_installs_it(fakes, module, error):
    assert install_hint(module) == error


@pytest.mark.parametrize("source, reason", [
    ("import absent_of_gguf", "No module named 'absent_of_gguf'"),
    ("from os import absent", "cannot import name 'absent' from 'os'"),
])  # fmt: skip
def test_a_package_that_fails_to_import_is_not_called_missing(fakes, monkeypatch, source, reason):
    monkeypatch.delitem(sys.modules, "gguf", raising=False)
    plant(fakes, "gguf", source, "0.1.2")
    problem = f"m.gguf: gguf 0.1.2 cannot be imported .{reason}"
    with pytest.raises(UsageError, match=problem) as caught:
        import_package("gguf", "m.gguf")
    assert str(caught.value).endswith("run `pip install -U 'gguf>=0.17'`")


@pytest.mark.parametrize("url, driver", [("s3://b/x", "s3fs"), ("gs://b/x", "gcsfs")])
def test_a_store_whose_driver_fails_names_the_driver(fakes, monkeypatch, url, driver):
    monkeypatch.delitem(sys.modules, driver, raising=False)
    plant(fakes, driver, "import absent_of_driver")
    with pytest.raises(UsageError, match=f"data: {driver}.*(not installed|absent_of_driver)"):
        open_store(url, "data")


@pytest.mark.parametrize("module", ["hydra", "typer", "transformers"])
def test_any_command_reports_a_package_that_it_cannot_import(tmp_path, module):
    plant(tmp_path, module, f"raise ModuleNotFoundError('broken', name='{module}')")
    (tmp_path / "config.json").write_text('{"model_type": "olmo2"}')
    options = environment()
    options["PYTHONPATH"] = os.pathsep.join([str(tmp_path), options["PYTHONPATH"]])
    args = ["estimate-memory", "model=hf", f"model.path={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-m", "fsdpctl", *args], env=options, capture_output=True, text=True
    )
    out = done.stderr.splitlines()[-1]
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert out.startswith(f"fsdpctl: {module}"), out
    assert "run `pip install" in out
