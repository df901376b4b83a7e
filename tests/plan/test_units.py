"""The division of models into units."""

import pytest

from fsdpctl.errors import UsageError
from fsdpctl.plan.layout import ParamSpec
from fsdpctl.plan.units import ModuleSpec, divide_into_units


def leaf(name: str, class_name: str = "Linear", shared: str = "") -> ModuleSpec:
    param = ParamSpec(shared or f"{name}.weight", (4, 4))
    return ModuleSpec(name, class_name, False, True, (param,), ())


def node(name: str, class_name: str, *children: ModuleSpec) -> ModuleSpec:
    is_list = class_name in ("ModuleList", "Sequential")
    return ModuleSpec(name, class_name, is_list, class_name != "ModuleList", (), children)


def decoder(head_shared: str = "") -> ModuleSpec:
    names = [f"layers.{i}" for i in range(3)]
    blocks = [node(x, "Block", leaf(f"{x}.a"), leaf(f"{x}.b")) for x in names]
    return node(
        "", "Decoder", leaf("embed", "Embedding"), node("layers", "ModuleList", *blocks),
        leaf("norm", "RMSNorm"), leaf("head", shared=head_shared),
    )  # fmt: skip


def names(module: ModuleSpec, **options: object) -> dict[str, list[str]]:
    units = divide_into_units(module, **options)  # type: ignore[arg-type]
    return {unit.name: [param.name for param in unit.params] for unit in units}


def test_blocks_embedding_and_head_are_units_and_the_rest_is_the_root():
    assert names(decoder(), embedding="embed", head="head") == {
        "root": ["norm.weight"], "embed": ["embed.weight"],
        "layers.0": ["layers.0.a.weight", "layers.0.b.weight"],
        "layers.1": ["layers.1.a.weight", "layers.1.b.weight"],
        "layers.2": ["layers.2.a.weight", "layers.2.b.weight"], "head": ["head.weight"],
    }  # fmt: skip


def test_a_tied_parameter_belongs_to_the_root():
    units = names(decoder(head_shared="embed.weight"), embedding="embed", head="head")
    assert (units["root"], "embed" in units) == (["embed.weight", "norm.weight"], False)
    assert "head" not in units


def test_a_parameter_shared_by_blocks_belongs_to_the_root():
    pair = ("layers.0", "layers.1")
    blocks = [node(x, "Block", leaf(f"{x}.a"), leaf("", shared="s")) for x in pair]
    units = names(node("", "Net", node("layers", "ModuleList", *blocks)))
    assert units == {
        "root": ["s"], "layers.0": ["layers.0.a.weight"], "layers.1": ["layers.1.a.weight"],
    }  # fmt: skip


def test_only_the_outermost_list_makes_blocks():
    inner = node("layers.0.inner", "Sequential", leaf("layers.0.inner.0"), leaf("layers.0.inner.1"))
    outer = node(
        "layers", "ModuleList", node("layers.0", "Block", inner),
        node("layers.1", "Block", leaf("layers.1.a")),
    )  # fmt: skip
    assert list(names(node("", "Net", outer))) == ["root", "layers.0", "layers.1"]


def test_a_list_of_unlike_children_makes_no_blocks():
    module = node("", "Net", node("parts", "Sequential", leaf("parts.0", "Conv"), leaf("parts.1")))
    assert list(names(module)) == ["root"]


def test_units_can_be_named_by_class():
    assert list(names(decoder(), classes=["Linear"]))[1:] == [
        "layers.0.a", "layers.0.b", "layers.1.a", "layers.1.b", "layers.2.a", "layers.2.b", "head",
    ]  # fmt: skip


def test_an_unknown_class_is_an_error():
    with pytest.raises(UsageError, match="not found in the model"):
        divide_into_units(decoder(), classes=["Attention"])
