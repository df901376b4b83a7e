"""Checksums of exports: every byte of an exported directory can be verified, in a copy too."""

import json
import shutil
from pathlib import Path

import pytest

from fsdpctl.checkpoint.peft import write_peft
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.io.run_files import CHECKSUMS
from tests.commands.run import invoke
from tests.hostile import make_checkpoint, make_hugging_face


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exports")
    make_hugging_face(make_checkpoint(folder / "step-00000001"), folder / "hf")
    adapted = make_checkpoint(folder / "step-00000002", "model.lora.rank=2")
    write_peft(CheckpointReader(adapted), folder / "peft")
    return folder


@pytest.fixture(params=["hf", "peft"])
def export(request, exports, tmp_path):
    """Return a copy in another directory, which is also valid."""
    return Path(shutil.copytree(exports / request.param, tmp_path / "elsewhere"))


def verified(export: Path) -> tuple[int, str]:
    return invoke("verify-checkpoint", str(export))


def test_a_flipped_byte_in_any_file_is_named(export):
    assert verified(export)[0] == 0
    for file in sorted(export.iterdir()):
        content = file.read_bytes()
        for at in {0, 9, len(content) // 2, len(content) - 2}:
            damaged = bytearray(content)
            damaged[at] ^= 4
            file.write_bytes(damaged)
            code, out = verified(export)
            assert (code, str(file) in out) == (4, True), (file, at, out)
        file.write_bytes(content)
    assert verified(export)[0] == 0


def test_missing_truncated_and_added_files_are_named(export):
    for file in sorted(set(export.iterdir()) - {export / CHECKSUMS}):
        content = file.read_bytes()
        file.unlink()
        assert verified(export) == (4, f"{file}: not found; {CHECKSUMS} names it")
        file.write_bytes(content[:-1])
        code, out = verified(export)
        assert (code, f"{file}: corrupted: expected" in out) == (4, True)
        file.write_bytes(content)
    for name in ("model-00009-of-00009.safetensors", "pytorch_model.bin", "new.json", "a/b.jinja"):
        (export / name).parent.mkdir(exist_ok=True)
        (export / name).write_bytes(b"x")
        assert verified(export) == (4, f"{export / name}: does not belong to this export")
        (export / name).unlink()
    (export / "README.md").write_text("a model card")
    (export / ".gitattributes").write_text("")
    code, out = invoke("verify-checkpoint", str(export), "--json")
    result = json.loads(out)
    assert (code, result["verified"]) == (0, True)
    assert result["bytes"] == sum(
        each.stat().st_size
        for each in export.iterdir()
        if each.is_file() and each.name not in (CHECKSUMS, "README.md")
    )
