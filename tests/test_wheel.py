"""The package as a stranger gets it: installed where nothing of this checkout is imported."""

import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow


def ran(*words: object, cwd: Path, python: Path = Path(sys.prefix)) -> str:
    """Run a program of an environment to its end, without a package index; return its output."""
    variables = {
        "PATH": f"{python}/bin:/usr/local/bin:/usr/bin:/bin", "HOME": str(cwd), "NO_COLOR": "1",
        "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0",  # 0: the option is given
    }  # fmt: skip
    text = list(map(str, words))
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
    """An environment with pip and the requirements of fsdpctl: those of no extra."""
    venv.create(tmp_path / "bare", with_pip=True)
    (site,) = (tmp_path / "bare").glob("lib/python*/site-packages")
    todo, names = ["fsdpctl", "hatchling"], set[str]()
    while todo:
        if (name := todo.pop()) in names:
            continue
        names.add(name)
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue  # for other systems
        needed = map(Requirement, package.requires or ())
        todo += [each.name for each in needed if not each.marker or each.marker.evaluate()]
        for top in {each.parts[0] for each in package.files or ()} - {"..", "__pycache__"}:
            if "fsdpctl" not in top and not (site / top).exists():
                (site / top).symlink_to(Path(sysconfig.get_path("purelib"), top))
    return tmp_path / "bare"


def test_the_source_distribution_builds_the_wheel_of_the_checkout(built: Path) -> None:
    ran("python", "-m", "hatchling", "build", "-t", "wheel", "-d", "again", cwd=built / "source")
    (first,), (again,) = built.glob("*.whl"), built.glob("source/again/*.whl")
    assert first.read_bytes() == again.read_bytes()
    names = set(ZipFile(first).namelist())
    assert {"fsdpctl/conf/config.yaml", "fsdpctl/recipes/quick.yaml"} <= names
    assert {each.split("/")[0] for each in names} == {"fsdpctl", f"{first.name[:13]}.dist-info"}


def test_the_wheel_trains_estimates_and_converts(built: Path, bare: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    ran("pip", "install", wheel, cwd=tmp_path, python=bare)

    def fsdpctl(*words: object) -> str:
        return ran("fsdpctl", *words, cwd=tmp_path, python=bare)

    code = "import fsdpctl, sys; print(fsdpctl.__file__, *sys.path)"
    assert str(ROOT) not in ran("python", "-c", code, cwd=tmp_path, python=bare)
    assert "\ndone: runs/quick-" in fsdpctl("train", "--recipe", "quick")
    assert "\nverdict fits" in fsdpctl("estimate-memory", "Qwen/Qwen3-8B", "cluster=8xh100")
    fsdpctl("convert", ROOT / "tests/importers/files/trl-sft.yaml", "--out", "recipe.yaml")
    assert "lora" in (tmp_path / "recipe.yaml").read_text()


def test_the_steps_of_the_dockerfile_install_the_command(built: Path, bare: Path) -> None:
    file = (built / "source" / "Dockerfile").read_text()
    steps = re.findall(r"^RUN (.*(?:\\\n.*)*)", file, re.MULTILINE)
    assert steps
    for step in steps:
        ran("sh", "-c", step, cwd=built / "source", python=bare)
    assert "fsdpctl 0." in ran("fsdpctl", "--version", cwd=bare, python=bare)
