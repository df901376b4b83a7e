"""Origins of values, and the single sequence of steps that computes them."""

import ast

import pytest

from fsdpctl.config.clusters import ClusterConfig
from fsdpctl.config.compose import compose_config
from fsdpctl.config.schema import Origin
from fsdpctl.config.selection import Selection, auto_names, unset_names, with_auto, with_selection
from fsdpctl.config.serialize import config_to_yaml, to_settings
from fsdpctl.errors import UsageError
from fsdpctl.estimate.cluster_specs import _with_missing
from fsdpctl.estimate.memory_savings import _unless_set
from fsdpctl.io.run_files import OVERRIDES_FILE, RUN_CONFIG
from fsdpctl.plan.recomputation import Recomputation
from fsdpctl.resolve.launchers import ESTIMATE_ROLE
from fsdpctl.resolve.machine import assign_ranks, without_other_cluster
from fsdpctl.resolve.prepare import prepare
from fsdpctl.resolve.run_plan import make_run_plan
from tests.test_architecture import package_sources
from tests.training.chats import CHATML, make_chat_model, make_chats

SIZE = "train.micro_batch_size"
# The steps from settings to a prepared configuration; an estimator passes `open_data`.
STEPS = {
    "with_vocabulary": 1, "adapt_to_decoder": 1, "with_data": 1, "open_checked_data": 1,
    "check_preflight": 1, "print_missing_weights": 1, "ensure_cache": 1,
}  # fmt: skip


def test_each_step_is_taken_in_one_place():
    calls = [
        node.func.id
        for source in package_sources().values()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    assert {name: calls.count(name) for name in STEPS} == STEPS


def test_a_value_knows_its_origin(tmp_path):
    (tmp_path / "r.yaml").write_text("cluster: 2xh100\ntrain.seed: 3\ntrain.seq_len: 64\n")
    typed = ["train.seed=0", "optimizer=muon", "strategy=auto", "train.global_batch_size=auto"]
    composed = compose_config(typed, str(tmp_path / "r.yaml"))
    origins = {
        "train.seed": Origin.TYPED, "train.seq_len": Origin.RECIPE, "cluster": Origin.RECIPE,
        "launch.nproc_per_node": Origin.OPTION, "strategy": Origin.AUTO, "optimizer": Origin.TYPED,
        "train.global_batch_size": Origin.AUTO, "train.log_every": Origin.DEFAULT,
        "optimizer.momentum": Origin.OPTION, "model.num_layers": Origin.DERIVED,
        "train.micro_batch_size": Origin.DEFAULT,
    }  # fmt: skip
    config = composed.config
    assert {name: config.origin(name) for name in origins} == origins
    assert config.is_set("train.seed")  # to its default
    assert not config.is_set("train.global_batch_size", "strategy.offload")
    assert not compose_config(["train.epochs=none"]).config.is_set("train.epochs")
    for setting, text in (
        (f"{SIZE}=none", "none"),
        (f"{SIZE}=auto", "auto"),
        ("train.seed=0", None),
    ):
        assert to_settings(compose_config([setting]).config).get(SIZE) == text
    here = without_other_cluster(composed).config
    assert here.launch.nproc_per_node is None
    assert here.is_auto("launch.nproc_per_node")


def test_a_default_in_the_file_of_a_run_hides_neither_advice_nor_specs(tmp_path):
    settings = {"cluster.pcie_bandwidth": "31.5", "activation_checkpointing.offload": "false"}
    (tmp_path / "run.yaml").write_text("".join(f"{x}: {y}\n" for x, y in settings.items()))
    typed = compose_config([f"{x}={y}" for x, y in settings.items()])
    composed = [compose_config([], str(tmp_path / "run.yaml")), typed]
    plans = [make_run_plan(prepare(x, ESTIMATE_ROLE).config) for x in composed]
    specs = ClusterConfig(pcie_bandwidth=63)
    assert [_with_missing(x.config, specs).pcie_bandwidth for x in plans] == [63, 31.5]
    key = "activation_checkpointing.offload"
    assert [len(_unless_set(x.config, key, True)) for x in plans] == [1, 0]


def test_data_is_opened_as_of_the_day_of_the_first_start(tmp_path):
    for name in ("model", "run"):
        (tmp_path / name).mkdir()
    model, chats = make_chat_model(tmp_path / "model", "llama"), make_chats(tmp_path / "c.jsonl")
    (template := tmp_path / "t.jinja").write_text("{{ strftime_now('%d %b %Y') }}" + CHATML)
    paths = {"data.path": chats, "data.template": template, "train.run_dir": tmp_path / "run"}
    typed = [f"model={model}", "data=chat", *(f"{name}={path}" for name, path in paths.items())]
    first = prepare(compose_config(typed))
    began = config_to_yaml(first.config.changed({"data.date": "2020-02-03"}))
    (tmp_path / "run" / RUN_CONFIG).write_text(began)
    (tmp_path / "run" / OVERRIDES_FILE).write_text("\n".join(typed))
    again = prepare(compose_config(typed))
    assert (again.config.data.date, again.data.date) == ("2020-02-03", "2020-02-03")
    assert again.data.fingerprint != first.data.fingerprint
    assert prepare(compose_config(typed), resume="never").data.date == first.data.date


def test_what_is_filled_in_stays_auto_and_what_is_selected_says_so():
    config = prepare(compose_config([f"{SIZE}=auto"]), ESTIMATE_ROLE).config
    assert (config.train.global_batch_size, config.is_auto("train.global_batch_size")) == (16, True)
    assert auto_names(config) == (SIZE,)
    selection = Selection("full_shard", Recomputation("none"), config.prefetch, 2)
    config = with_selection(config, selection)
    assert config.origin(SIZE) is Origin.SELECTED
    assert (auto_names(config), make_run_plan(config).batches.micro_batch_size) == ((), 2)
    assert set(unset_names(config)) == {"activation_checkpointing", "prefetch"}
    assert unset_names(with_auto(config, unset_names(config))) == ()


@pytest.mark.parametrize(("typed", "problem"), [
    ("optimizer.momentum=0.9", "only valid with optimizer=sgd or muon"),
    ("data.prompt=template", "only valid with data=chat"),
    ("data.format=auto", "only valid with data=tokens"),
])  # fmt: skip
def test_a_typed_value_is_set_even_if_it_is_the_default(tmp_path, typed, problem):
    with pytest.raises(UsageError, match=f"^{typed}: {problem}"):
        prepare(compose_config([typed]), ESTIMATE_ROLE)
    name, _, value = typed.partition("=")
    # The config.yaml of a run has every key.
    (tmp_path / "run.yaml").write_text(f"{name}: {value}\n")
    assign_ranks(prepare(compose_config([], str(tmp_path / "run.yaml")), ESTIMATE_ROLE).config)
