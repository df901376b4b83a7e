"""Exports compared with their bases: changes are counted, a loss is a line and exit code 3."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fsdpctl.checkpoint.findings import Finding
from fsdpctl.checkpoint.manifest import BaseInfo
from fsdpctl.checkpoint.peft import write_peft
from fsdpctl.checkpoint.publish import CheckpointMetadata
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.save import take_snapshot, write_checkpoint
from fsdpctl.checkpoint.training_progress import Progress
from fsdpctl.checkpoint.verify_export import verify_export
from fsdpctl.comm.collectives import Collectives
from fsdpctl.config.compose import compose_config
from fsdpctl.config.serialize import to_settings
from fsdpctl.data.tokenizer import ByteTokenizer
from fsdpctl.models.adapter_names import PEFT_PREFIX
from fsdpctl.resolve.run_plan import stored_config
from fsdpctl.training.assemble import make_model
from tests.commands.run import invoke
from tests.models.decoders import save_decoder

Tensors = dict[str, Tensor]
EXPERTS = "model.layers.0.mlp.experts"
MODEL, ADAPTERS = "model.safetensors", "adapter_model.safetensors"


def change(file: Path, edit: Callable[[Tensors], Tensors | None]) -> None:
    tensors = load_file(file)
    changed = edit(tensors) or tensors
    save_file({name: each.contiguous() for name, each in changed.items()}, file, {"format": "pt"})


def change_json(file: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content))


def scaled(tensors: Tensors, part: str, by: float = 1.01) -> Tensors:
    return {name: each * by if part in name else each for name, each in tensors.items()}


def without(tensors: Tensors, part: str) -> Tensors:
    return {name: each for name, each in tensors.items() if part not in name}


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """Write a base with experts, a model trained from it, and adapters for it."""
    folder = tmp_path_factory.mktemp("made")
    base = folder / "base"
    save_decoder("qwen3_moe", base)
    for name, content in ByteTokenizer().files().items():
        (base / name).write_bytes(content)
    change_json(base / "config.json", lambda content: content.update(vocab_size=320))
    rows = torch.randn(320, 32, generator=torch.Generator().manual_seed(0))
    new = {"model.embed_tokens.weight": rows, "lm_head.weight": -rows}
    change(base / MODEL, lambda x: {**x, **new})
    (base / "generation_config.json").write_text('{"eos_token_id": 0}')
    (base / "chat_template.jinja").write_text("{{ messages }}")
    shutil.copytree(base, folder / "model")
    change(folder / "model" / MODEL, lambda x: scaled(x, "mlp.experts"))
    args = ["model=hf", f"model.path={base}", "model.lora.rank=8", "precision=fp32",
             "model.lora.targets=[all_linear,experts]", "data.tokenizer=bytes"]  # fmt: skip
    config = stored_config(compose_config(args).config)
    options = CheckpointMetadata(Progress(1), to_settings(config), base=BaseInfo(str(base), "", ""))
    snapshot = take_snapshot(make_model(config, torch.device("cpu")), None, 0, options)
    write_checkpoint(folder / "step-00000001", snapshot, Collectives())
    write_peft(CheckpointReader(folder / "step-00000001"), folder / "adapters")
    generator = torch.Generator().manual_seed(1)
    change(folder / "adapters" / ADAPTERS, lambda tensors: {
        name: torch.randn(each.shape, generator=generator) / 9 for name, each in tensors.items()
    })  # fmt: skip
    return folder


def copied(exports: Path, kind: str, folder: Path) -> Path:
    return Path(shutil.copytree(exports / kind, folder / kind))


def lost(result: list[Finding]) -> list[str]:
    return [str(each) for each in result if each.is_lost]


def test_a_trained_model_has_a_line_for_each_kind_and_nothing_lost(exports):
    findings = verify_export(exports / "model", exports / "base")
    assert lost(findings) == []
    lines = {each.subject: each for each in findings if each.figures}
    assert {kind: each.figures["changed"] for kind, each in lines.items()} == {
        "attention": 0, "embeddings": 0, "experts": 24, "head": 0, "norms": 0, "routers": 0
    }  # fmt: skip
    assert lines["experts"].figures["relative_change"] == pytest.approx(0.01, rel=1e-3)
    assert "experts: 4 in each of 2 layers, as in the base" in map(str, findings)


def test_the_change_is_that_of_the_tensors_whatever_their_dtypes(exports, tmp_path):
    export = copied(exports, "model", tmp_path)
    change(export / MODEL, lambda x: {name: each.bfloat16() for name, each in x.items()})
    base, ours = (load_file(x / MODEL) for x in (exports / "base", export))
    names = [name for name in base if "experts" in name]
    rounded = [base[name].bfloat16().double() for name in names]
    delta = sum(((ours[a].double() - b) ** 2).sum() for a, b in zip(names, rounded, strict=True))
    expected = float((delta / sum((each**2).sum() for each in rounded)) ** 0.5)
    lines = {x.subject: x.figures for x in verify_export(export, exports / "base") if x.figures}
    assert lines["experts"]["relative_change"] == pytest.approx(expected, rel=1e-3)
    assert lines["attention"]["changed"] == 0  # equal to the rounded base


ROWS: dict[str, Callable[[Tensors], Tensors]] = {
    "experts: lost: 3 tensors of the base missing": lambda x: without(x, f"{EXPERTS}.3."),
    f"experts: lost: {EXPERTS}: 3 experts, base 4": lambda x: without(x, f"{EXPERTS}.1."),
    "norms: lost: 1 tensors of the base missing": lambda x: without(x, "0.input_layernorm"),
    "head: lost: 1 tensors of the base missing": lambda x: without(x, "lm_head"),
    "attention: lost: model.layers.1.self_attn.q_proj.weight: only zeros":
        lambda x: scaled(x, "1.self_attn.q_proj", 0),
    "norms: lost: model.norm.weight: 32 values are NaN":
        lambda x: scaled(x, "model.norm", float("nan")),
    "attention: lost: model.layers.0.self_attn.k_proj.weight: shape [32, 16]":
        lambda x: {n: y.T if "0.self_attn.k_proj" in n else y for n, y in x.items()},
    "vocabulary: lost: lm_head.weight has 64 rows":
        lambda x: {n: y[:64] if n == "lm_head.weight" else y for n, y in x.items()},
    "weights: lost: equal to the base's": lambda x: scaled(x, "experts", 1 / 1.01),
}  # fmt: skip


@pytest.mark.parametrize("line", ROWS)
def test_what_weights_lost_is_a_line(exports, tmp_path, line):
    export = copied(exports, "model", tmp_path)
    base = exports / "base"
    if "equal to the base" in line:
        shutil.copy(base / MODEL, export / MODEL)
    else:
        change(export / MODEL, ROWS[line])
    assert any(each.startswith(line) for each in lost(verify_export(export, base)))


FILES: dict[str, Callable[[Path], object]] = {
    "tokenizer: lost: missing; the base has tokenizer.json":
        lambda x: (x / "tokenizer.json").unlink(),
    "tokenizer: lost: 2 tokens of the base missing or with other IDs":
        lambda x: change_json(x / "tokenizer.json", lambda y: y["model"]["vocab"].update(
            {"a": y["model"]["vocab"]["b"], "b": y["model"]["vocab"]["a"]})),
    "chat template: lost: missing": lambda x: (x / "chat_template.jinja").unlink(),
    "generation_config.json: lost: missing": lambda x: (x / "generation_config.json").unlink(),
    "generation_config.json: lost: no eos_token_id; the base has 0":
        lambda x: (x / "generation_config.json").write_text('{"do_sample": true}'),
    "config.json: lost: model_type llama; the base has qwen3_moe":
        lambda x: change_json(x / "config.json", lambda y: y.update(model_type="llama")),
    "vocabulary: lost: lm_head.weight has 320 rows, config.json vocab_size=400":
        lambda x: change_json(x / "config.json", lambda y: y.update(vocab_size=400)),
    "weights: lost: ":  # both are stored, and differ
        lambda x: change_json(x / "config.json", lambda y: y.update(tie_word_embeddings=True)),
}  # fmt: skip


@pytest.mark.parametrize("line", FILES)
def test_what_the_files_with_the_weights_lost_is_a_line(exports, tmp_path, line):
    export = copied(exports, "model", tmp_path)
    FILES[line](export)
    assert any(each.startswith(line) for each in lost(verify_export(export, exports / "base")))


def test_a_changed_template_and_rope_are_lines_and_not_lost(exports, tmp_path):
    export = copied(exports, "model", tmp_path)
    (export / "chat_template.jinja").write_text("{{ messages[0] }}")
    change_json(export / "config.json", lambda x: x["rope_parameters"].update(rope_theta=7.0))
    findings = verify_export(export, exports / "base")
    assert lost(findings) == []
    assert {"chat template: differs from the base's", "config.json: differs from the base's in "
            "rope_parameters"} <= {*map(str, findings)}  # fmt: skip


def test_experts_that_the_base_stores_in_another_form_are_the_same(exports, tmp_path):
    base = copied(exports, "base", tmp_path)
    names = ("gate_proj", "up_proj")

    def stacked(x: Tensors) -> Tensors:
        tensors = without(x, "experts")
        for layer in (f"model.layers.{n}.mlp.experts" for n in range(2)):
            pairs = [torch.cat([x[f"{layer}.{n}.{w}.weight"] for w in names]) for n in range(4)]
            tensors[f"{layer}.gate_up_proj"] = torch.stack(pairs)
            downs = [x[f"{layer}.{n}.down_proj.weight"] for n in range(4)]
            tensors[f"{layer}.down_proj"] = torch.stack(downs)
        return tensors

    change(base / MODEL, stacked)
    findings = verify_export(exports / "model", base)
    assert lost(findings) == []
    assert str(findings[0]).startswith("weights: 24 tensors under other names than in the base's")
    assert any(x.subject == "experts" and x.figures.get("changed") == 4 for x in findings)


# ---- adapters ----------------------------------------------------------------------------


def test_adapters_change_as_much_as_their_products(exports):
    findings = verify_export(exports / "adapters", exports / "base")
    assert lost(findings) == []
    lines = {each.subject: each.figures for each in findings if each.figures}
    ours, base = load_file(exports / "adapters" / ADAPTERS), load_file(exports / "base" / MODEL)
    delta = norm = 0.0
    for name in (each for each in base if "_proj.weight" in each and "self_attn" in each):
        layer = f"{PEFT_PREFIX}{name.removesuffix('.weight')}"
        product = 2 * ours[f"{layer}.lora_B.weight"] @ ours[f"{layer}.lora_A.weight"]
        delta, norm = delta + float((product**2).sum()), norm + float((base[name] ** 2).sum())
    assert lines["attention"]["relative_change"] == pytest.approx((delta / norm) ** 0.5, rel=1e-4)
    (readers,) = (str(each) for each in findings if "target_parameters" in each.text)
    assert readers.startswith("experts: adapters of 4 experts in 2 layers, stacked")
    assert "--enable-mixed-moe-lora-format" in readers
    assert "--merge" in readers


def per_expert(x: Tensors) -> Tensors:
    """Return adapters in the form of servers that have a module for each expert."""
    result = without(x, ".experts.")
    for layer in (f"{PEFT_PREFIX}model.layers.{n}.mlp.experts" for n in range(2)):
        for inner, names in (("base_layer.", ("gate_proj", "up_proj")), ("", ("down_proj",))):
            down, up = (x[f"{layer}.{inner}lora_{half}.weight"] for half in "AB")
            for number in range(4):
                part = up.view(len(up), 8, 4)[..., number].chunk(len(names))
                for arg, rows in zip(names, part, strict=True):
                    name = f"{layer}.{number}.{arg}"
                    result[f"{name}.lora_A.weight"] = down.view(4, 8, -1)[number].clone()
                    result[f"{name}.lora_B.weight"] = rows.clone()
    return result


def swapped(x: Tensors) -> Tensors:
    """Return adapters in the layout of PEFT 0.18."""
    other = {"A": "B", "B": "A"}
    return {
        name: x[name[:-8] + other[name[-8]] + name[-7:]].T if ".experts." in name else each
        for name, each in x.items()
    }


def test_adapters_for_each_expert_are_read_as_such_and_counted(exports, tmp_path):
    export = copied(exports, "adapters", tmp_path)
    change(export / ADAPTERS, per_expert)
    change_json(export / "adapter_config.json", lambda x: x.pop("target_parameters"))
    findings = verify_export(export, exports / "base")
    assert lost(findings) == []
    assert any("two matrices each: vLLM reads them" in x.text for x in findings)
    change(export / ADAPTERS, lambda x: without(x, f"{EXPERTS}.2."))
    lines = lost(verify_export(export, exports / "base"))
    assert lines == [f"experts: lost: {EXPERTS}: adapters of 3 of 4 experts"]


LAYER = "model.layers.0.self_attn.q_proj"
OF_ADAPTERS: dict[str, Callable[[Tensors], Tensors]] = {
    f"attention: lost: 1 adapters whose product is zero: {LAYER}":
        lambda x: scaled(x, f"{LAYER}.lora_B", 0),
    "experts: lost: 4 adapters whose product is zero":
        lambda x: {n: 0 * y if "experts" in n and "lora_A" in n else y for n, y in x.items()},
    f"attention: lost: {LAYER}: only lora_B": lambda x: without(x, f"{LAYER}.lora_A"),
    "adapter_config.json: lost: target_modules: no adapters of model.layers.0.self_attn.q_proj":
        lambda x: without(x, "q_proj"),
    "adapter_config.json: lost: target_parameters: no adapters of model.layers.0.mlp.experts":
        lambda x: without(x, ".experts."),
    "attention: lost: model.layers.0.attn.k_proj, model.layers.0.attn.o_proj and 6 more: the base "
    "has no such layer": lambda x: {n.replace("self_attn", "attn"): y for n, y in x.items()},
    "adapters: lost: model.layers.0.mlp.experts.base_layer.lora_A.weight":
        lambda x: {n.removeprefix(PEFT_PREFIX): y for n, y in x.items()},
    f"attention: lost: {LAYER}.weight: NaN or infinite":
        lambda x: scaled(x, f"{LAYER}.lora_A", float("inf")),
    f"attention: lost: {LAYER}: lora_A and lora_B: expected in 32, out 32, got in 16, out 32, rank":
        lambda x: {n: y[:, :16] if f"{LAYER}.lora_A" in n else y for n, y in x.items()},
    "adapter_config.json: lost: r=8: expected 4": lambda x: {
        n: (y[:4] if "lora_A" in n else y[:, :4]) if LAYER in n else y for n, y in x.items()},
    "experts: lost: model.layers.0.mlp.experts, model.layers.1.mlp.experts: in and out are swapped":
        swapped,
    "adapters: lost: model.layers.0.mlp.experts.lora_gate_and_up_A: a form that PEFT and vLLM":
        lambda x: x | {f"{PEFT_PREFIX}{EXPERTS}.lora_gate_and_up_A": torch.ones(4, 32, 8)},
    "adapters: lost: model.norm.lora_magnitude_vector: neither LoRA nor a parameter":
        lambda x: x | {f"{PEFT_PREFIX}model.norm.lora_magnitude_vector": torch.ones(32)},
}  # fmt: skip


@pytest.mark.parametrize("line", OF_ADAPTERS)
def test_what_adapters_lost_is_a_line(exports, tmp_path, line):
    export = copied(exports, "adapters", tmp_path)
    change(export / ADAPTERS, OF_ADAPTERS[line])
    result = lost(verify_export(export, exports / "base"))
    assert any(each.startswith(line) for each in result), result


def test_targets_that_the_base_lacks_are_named(exports, tmp_path):
    export = copied(exports, "adapters", tmp_path)
    change_json(export / "adapter_config.json", lambda x: x["target_modules"].append("c_attn"))
    (line,) = lost(verify_export(export, exports / "base"))
    assert line == "adapter_config.json: lost: target_modules: the base has no c_attn"


def test_a_checkpoint_as_base_has_no_configuration_to_differ_from(exports):
    findings = verify_export(exports / "model", exports / "step-00000001")
    assert not [each for each in lost(findings) if each.startswith("config.json")]


def test_published_adapters_name_no_directory_of_the_machine(exports, tmp_path):
    reader = CheckpointReader(exports / "step-00000001")
    for names_base in (True, False):
        write_peft(reader, tmp_path / "out", names_base=names_base, overwrite=True)
        text = (tmp_path / "out" / "adapter_config.json").read_text()
        assert (str(exports) in text) == names_base


def test_adapters_are_compared_with_a_base_whose_weights_are_not_here(exports, tmp_path):
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(exports / "base" / name, tmp_path)
    findings = verify_export(exports / "adapters", tmp_path, base_has_weights=False)
    assert lost(findings) == []
    assert "attention: 8 of 8 tensors changed" in map(str, findings)


# ---- the command -------------------------------------------------------------------------


def test_the_command_prints_each_finding_and_fails_if_something_is_lost(exports, tmp_path):
    model, base = str(exports / "model"), str(exports / "base")
    code, out = invoke("verify-checkpoint", model, "--base", base, "--json")
    content = json.loads(out)
    assert (code, content["verified"], content["base"]) == (0, True, base)
    assert {"experts", "tokenizer"} <= {each["subject"] for each in content["findings"]}
    export = copied(exports, "adapters", tmp_path)
    assert invoke("verify-checkpoint", str(export), "--base", base) == (
        4, f"{export}: 1 of 4 findings are losses"  # the checksum
    )  # fmt: skip
    (export / "fsdpctl_checksums.json").unlink()  # as if another tool had exported
    tensors = load_file(export / "adapter_model.safetensors")
    zero = {name: x * 0 if "lora_B" in name else x for name, x in tensors.items()}
    save_file(zero, export / "adapter_model.safetensors")
    code, out = invoke("verify-checkpoint", str(export), "--base", base)
    assert (code, "findings are losses" in out) == (3, True)


@pytest.mark.parametrize(("source", "base", "expected"), [
    ("step-00000001", "base", "--base: only valid with an export; step-00000001 is not one"),
    ("model", "bass", "--base bass: not found; did you mean base?"),
    ("model", "adapters", "--base adapters: model.path=adapters: adapters without a model"),
    ("model", "words.txt", "--base words.txt: not found"),
])  # fmt: skip
def test_a_mistake_is_one_line(exports, monkeypatch, source, base, expected):
    monkeypatch.chdir(exports)
    code, out = invoke("verify-checkpoint", source, "--base", base)
    assert (code, out[: len(expected)]) == (2, expected)


@pytest.mark.parametrize(("kind", "file", "content"), [
    ("adapters", "adapter_config.json", '{"r": "x"}'),
    ("adapters", "adapter_config.json", '{"r": 8, "target_modules": [1]}'),
    ("adapters", "adapter_config.json", '{"r": 8, "rank_pattern": [1]}'),
    ("adapters", "adapter_config.json", "[]"),
    ("adapters", "adapter_model.safetensors", "damaged"),
    ("model", "tokenizer.json", '{"model": {"vocab": [1]}}'),
    ("model", "tokenizer.json", '{"added_tokens": [1]}'),
    ("model", "generation_config.json", "[]"),
    ("model", "config.json", '{"vocab_size": "x"'),
    ("model", "model.safetensors", "damaged"),
])  # fmt: skip
def test_a_damaged_file_is_named_in_one_line(exports, tmp_path, kind, file, content):
    export = copied(exports, kind, tmp_path)
    (export / file).write_text(content)
    code, out = invoke("verify-checkpoint", str(export), "--base", str(exports / "base"))
    assert (code, str(export / file) in out, "\n" in out) == (4, True, False), out


def test_adapters_of_rank_0_fit_nothing(exports, tmp_path):
    export = copied(exports, "adapters", tmp_path)
    empty = {f"{PEFT_PREFIX}{LAYER}.lora_A.weight": torch.ones(0, 32),
             f"{PEFT_PREFIX}{LAYER}.lora_B.weight": torch.ones(32, 0)}  # fmt: skip
    change(export / ADAPTERS, lambda x: empty)
    lines = lost(verify_export(export, exports / "base"))
    assert "adapters: lost: none for a layer of the base" in lines
