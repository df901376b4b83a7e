"""With this folder on PYTHONPATH, torch has emulated CUDA devices as soon as it is imported."""

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType


class _AfterTorch:
    """A finder of torch, which installs the devices once torch has been imported."""

    def find_spec(self, name: str, *options: object) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        sys.meta_path.insert(0, self)  # finding torch does not import it yet
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_install(module: ModuleType) -> None:
            sys.meta_path.remove(self)
            execute(module)
            _load("emulated_cuda_install", Path(__file__).parents[1] / "install.py").install()

        spec.loader.exec_module = execute_and_install  # type: ignore[method-assign]
        return spec


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if os.environ.get("EMULATED_CUDA"):
    sys.meta_path.insert(0, _AfterTorch())
