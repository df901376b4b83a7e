"""Attention kernel of a run: kernels that can run, the selected one, and the stored one."""

from dataclasses import replace
from importlib.util import find_spec

import pytest

from fsdpctl.config.compose import compose_config
from fsdpctl.config.model_path import model_settings
from fsdpctl.config.schema import Filled
from fsdpctl.config.serialize import config_from_settings, config_to_yaml, to_settings
from fsdpctl.errors import UsageError
from fsdpctl.io.run_files import CHECKPOINTS, OVERRIDES_FILE, RUN_CONFIG
from fsdpctl.resolve.attention_kernel import can_run, check_attention, kernel_of, notes_on_kernel
from fsdpctl.resolve.auto_values import AutoInputs, Stage, decides_losses, fill_auto, run_identity
from fsdpctl.resolve.launchers import ESTIMATE_ROLE
from fsdpctl.resolve.prepare import _stored_values, prepare

KERNEL = "model.attention"


def placed(*settings: str) -> Filled:
    return prepare(compose_config(["model.vocab_size=64", *settings]), ESTIMATE_ROLE).config


def test_the_kernel_does_not_change_the_name_of_a_run():
    default, other = placed(), placed("launch.device=cpu", "model.attention=math")
    assert to_settings(default)["model.attention"] == "auto"
    assert not decides_losses("model.attention")
    same = replace(default, model=replace(default.model, attention="math"))
    assert run_identity(same) == run_identity(default)
    assert config_from_settings(to_settings(other)).model.attention == "math"


def test_the_kernel_is_not_part_of_a_model(tmp_path):
    (tmp_path / CHECKPOINTS).mkdir()
    (tmp_path / RUN_CONFIG).write_text(config_to_yaml(placed().changed({KERNEL: "cudnn"})))
    assert "model.attention: cudnn" in (tmp_path / RUN_CONFIG).read_text()
    assert "model.attention" not in model_settings(str(tmp_path))


@pytest.mark.parametrize(("settings", "part"), [
    (["launch.device=cpu", "model.attention=cudnn"], "device=cpu; expected auto, flash, math"),
    (["cluster=a100_80", "model.attention=flash3"], "Ampere GPUs; expected auto, flash, cudnn"),
    (["cluster=h100", "precision=fp32", "model.attention=flash"],
     "precision.param_dtype=float32; expected auto, efficient, math"),
    (["cluster=h100", "train.deterministic=true", "model.attention=cudnn"],
     "train.deterministic=true; expected auto, flash, flash3"),
])  # fmt: skip
def test_a_kernel_that_cannot_run_is_rejected_in_one_line(settings, part):
    with pytest.raises(UsageError, match=r"model\.attention=\w+: not supported") as caught:
        placed(*settings)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(find_spec("flash_attn_interface") is not None, reason="it is installed")
def test_a_missing_package_is_named_at_the_start_of_a_run(hopper):
    config = placed("cluster=h100", "model.attention=flash3")
    with pytest.raises(UsageError, match="flash3: package flash_attn_interface not found"):
        check_attention(config, is_here=True)


def test_auto_is_a_kernel_of_torch_by_the_gpu():
    assert kernel_of(placed("cluster=h100")) == kernel_of(placed("cluster=b200")) == "cudnn"
    assert kernel_of(placed("cluster=a100_80")) == "flash"
    assert kernel_of(placed("cluster=h100", "train.deterministic=true")) == "flash"
    assert kernel_of(placed("cluster=h100", "model.attention=flash3")) == "flash3"
    assert kernel_of(placed("cluster=h100", "precision=fp32")) == "efficient"
    assert kernel_of(placed("launch.device=cpu")) is None


def test_auto_leaves_out_versions_of_cudnn_that_were_wrong(monkeypatch):
    monkeypatch.setattr("torch.backends.cudnn.version", lambda: 91400)
    assert kernel_of(placed("cluster=h100")) == "flash"
    assert kernel_of(placed("cluster=h100", "model.attention=cudnn")) == "cudnn"


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr("fsdpctl.resolve.attention_kernel.architecture_here", lambda: "hopper")


def test_a_run_keeps_its_kernel_while_it_can_run(hopper):
    config = placed("cluster=a100_80").changed({KERNEL: None})
    filled = fill_auto(config, Stage.DECODER, AutoInputs(is_here=True))
    assert filled.model.attention == "cudnn"  # for the GPU of this machine
    assert can_run(config, "flash")
    assert not can_run(config, "flash3")  # no longer installed
    assert not can_run(placed("launch.device=cpu"), "cudnn")


def test_a_start_has_the_kernel_that_its_estimate_has(hopper, tmp_path):
    run = tmp_path / "run"
    config = placed("cluster=h100", f"train.run_dir={run}")
    assert config.model.attention == kernel_of(config) == "cudnn"
    assert _stored_values(config) == {}
    run.mkdir()
    (run / RUN_CONFIG).write_text(config_to_yaml(config.changed({KERNEL: "flash"})))
    (run / OVERRIDES_FILE).write_text("")
    assert _stored_values(config)[KERNEL] == "flash"
    (run / OVERRIDES_FILE).write_text("model.attention=flash\n")
    assert _stored_values(config) == {}  # the command line of the first start set it


def test_a_note_names_an_installed_kernel_that_auto_leaves_out(hopper, monkeypatch):
    config = placed("cluster=h100").changed({KERNEL: None})
    monkeypatch.setattr("fsdpctl.resolve.attention_kernel.is_installed", lambda name: False)
    assert notes_on_kernel(config) == ()
    monkeypatch.setattr("fsdpctl.resolve.attention_kernel.is_installed", lambda name: True)
    (line,) = notes_on_kernel(config)
    assert "set model.attention=flash3 to use it" in line
    assert notes_on_kernel(placed("launch.device=cpu")) == ()
    assert notes_on_kernel(config.changed({KERNEL: "flash"})) == ()
