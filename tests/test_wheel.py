"""The package as users install it: nothing of this checkout is imported."""

import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow


def ran(*args: object, cwd: Path, python: Path = Path(sys.prefix)) -> str:
    """Run a program of an environment to its end, without a package index; return its output."""
    variables = {
        "PATH": f"{python}/bin:/usr/local/bin:/usr/bin:/bin", "HOME": str(cwd), "NO_COLOR": "1",
        "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0",  # 0: the option is given
    }  # fmt: skip
    text = list(map(str, args))
    done = subprocess.run(text, cwd=cwd, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a wheel, the source distribution, and its content in `source`."""
    folder = tmp_path_factory.mktemp("built")
    ran("python", "-m", "hatchling", "build", "-d", folder, cwd=ROOT)
    (archive,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(archive, folder, filter="data")
    (folder / archive.name.removesuffix(".tar.gz")).rename(folder / "source")
    return folder


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """An environment with pip and the requirements of fsdpctl without extras."""
    venv.create(tmp_path / "bare", with_pip=True)
    (site,) = (tmp_path / "bare").glob("lib/python*/site-packages")
    names = ["fsdpctl", "hatchling"]
    for name in names:  # and the requirements of these
        with suppress(PackageNotFoundError):  # for other operating systems
            needed = map(Requirement, distribution(name).requires or ())
            wanted = {each.name for each in needed if not each.marker or each.marker.evaluate()}
            names += wanted - {*names}
            for top in {each.parts[0] for each in distribution(name).files or ()}:
                if "fsdpctl" not in top and top != ".." and not (site / top).exists():
                    (site / top).symlink_to(Path(sysconfig.get_path("purelib"), top))
    return tmp_path / "bare"


def test_the_source_distribution_builds_the_wheel_of_the_checkout(built: Path) -> None:
    ran("python", "-m", "hatchling", "build", "-t", "wheel", "-d", "again", cwd=built / "source")
    (first,), (again,) = built.glob("*.whl"), built.glob("source/again/*.whl")
    assert first.read_bytes() == again.read_bytes()


def test_the_dockerfile_and_the_wheel_install_a_command_that_trains_estimates_and_converts(
    built: Path, bare: Path, tmp_path: Path
) -> None:
    (step,) = re.findall(r"^RUN (.*)", (built / "source/Dockerfile").read_text(), re.MULTILINE)
    ran("sh", "-c", step, cwd=built / "source", python=bare)
    assert (bare / "bin" / "fsdpctl").exists()
    again = "pip install --force-reinstall --no-deps ../*.whl"
    ran("sh", "-c", again, cwd=built / "source", python=bare)
    next(bare.glob("lib/*/site-packages/matplotlib")).unlink()  # only pictures need it

    def fsdpctl(*args: object) -> str:
        return ran("fsdpctl", *args, cwd=tmp_path, python=bare)

    code = "import fsdpctl, sys; print(fsdpctl.__file__, *sys.path)"
    assert str(ROOT) not in ran("python", "-c", code, cwd=tmp_path, python=bare)
    assert "\ndone: runs/quick-" in fsdpctl("train", "--recipe", "quick")
    assert "\nverdict fits" in fsdpctl("estimate-memory", "Qwen/Qwen3-8B", "cluster=8xh100")
    fsdpctl("convert", ROOT / "tests/importers/files/trl-sft.yaml", "--out", "recipe.yaml")
    assert "lora" in (tmp_path / "recipe.yaml").read_text()
    lacks = "! fsdpctl consolidate-checkpoint runs/latest m.gguf --format gguf 2>&1"
    assert "pip install 'fsdpctl[gguf]'" in ran("sh", "-c", lacks, cwd=tmp_path, python=bare)
