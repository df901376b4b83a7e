"""Devices of type `cuda` on a machine without a GPU, for tests. See README.md."""

import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import version
from pathlib import Path

_HERE = Path(__file__).parent
_SOURCES = ("streams.cpp", "memory.cpp", "operators.cpp", "nccl.cpp")


def library() -> Path:
    """Return the path of the extension for this torch and Python, built or not."""
    if path := os.environ.get("EMULATED_CUDA_LIBRARY"):
        return Path(path)
    digest = hashlib.sha256(f"{version('torch')} {sys.version}".encode())
    for file in sorted([*_HERE.glob("*.cpp"), *_HERE.glob("*.h")]):
        digest.update(file.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "fsdpctl-tests" / digest.hexdigest()[:16] / "emulated_cuda.so"


@functools.cache
def missing() -> str | None:
    """Return the reason why this machine cannot emulate devices, or None."""
    if Path("/dev/nvidiactl").exists():
        return "this machine has GPUs of its own"
    if library().exists():
        return None
    if not (shutil.which("c++") and shutil.which("make")):
        return "the emulated CUDA device needs a C++ compiler and make"
    return None


def build() -> Path:
    """Build the extension, once per torch and Python: about a minute on two cores."""
    target = library()
    if target.exists():
        return target
    from torch.utils.cpp_extension import include_paths, library_paths

    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        # A copy, because make does not support paths with spaces.
        shutil.copytree(_HERE, folder, dirs_exist_ok=True)
        includes = [*include_paths(), sysconfig.get_paths()["include"]]
        flags = ["-std=c++20", "-O1", "-fPIC", "-w", "-DTORCH_EXTENSION_NAME=emulated_cuda"]
        flags += ["-DUSE_C10D_GLOO", *(shlex.quote(f"-I{each}") for each in includes)]
        objects = [f"{Path(each).stem}.o" for each in _SOURCES]
        rules = [
            f"{compiled}: {source}\n\tc++ {' '.join(flags)} -c $< -o $@"
            for compiled, source in zip(objects, _SOURCES, strict=True)
        ]
        libraries = shlex.join(f"-L{each}" for each in library_paths())
        linked = f"-shared {' '.join(objects)} {libraries} -lc10 -ltorch_cpu -ltorch -ltorch_python"
        rules.insert(0, f"emulated_cuda.so: {' '.join(objects)}\n\tc++ {linked} -o $@")
        Path(folder, "Makefile").write_text("\n".join(rules) + "\n")
        subprocess.run(["make", "--silent", "-j2"], cwd=folder, check=True)
        os.replace(Path(folder, "emulated_cuda.so"), target)
    return target


def environment(**settings: object) -> dict[str, str]:
    """Return the environment of a process with emulated devices: `seed=1, lag_us=0`, …"""
    paths = [str(_HERE / "site"), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)), "EMULATED_CUDA": str(build()),
        **{f"EMULATED_CUDA_{name.upper()}": str(value) for name, value in settings.items()},
    }  # fmt: skip
