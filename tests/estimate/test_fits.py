"""All commands have the same verdict on the memory of devices and hosts."""

import re
from collections.abc import Sequence

import pytest

from fsdpctl.commands.compare.report import OK, TOO_LARGE
from fsdpctl.commands.compare.results import predict
from fsdpctl.commands.compare.variants import variants_of
from fsdpctl.config.compose import compose_config
from fsdpctl.errors import DoesNotFitError
from fsdpctl.estimate.estimator import Estimator
from fsdpctl.estimate.largest import largest_that_fits
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.estimate.search import rank_candidates
from fsdpctl.estimate.suggestions import suggest
from fsdpctl.launch.prepare_run import check_fits
from fsdpctl.resolve.launchers import ESTIMATE_ROLE
from fsdpctl.resolve.prepare import prepare
from fsdpctl.resolve.run_plan import make_run_plan
from tests.commands.run import invoke

SMALL = ["model.num_layers=2", "train.seq_len=512", "train.global_batch_size=4",
         "launch.nproc_per_node=2", "cluster=h100"]  # fmt: skip
# Too little host memory, without and with states in it; too little device memory; both.
SHORTAGES = [
    (["cluster.host_memory=2"], ["host memory"]),
    (["cluster.host_memory=2", "strategy.offload=states"], ["host memory"]),
    (["cluster.host_memory=2", "checkpoint.mode=sync"], ["host memory"]),
    (["cluster.memory=1.92"], ["memory"]),
    (["cluster.memory=1.92", "cluster.host_memory=2"], ["memory", "host memory"]),
]


def estimated(*args: str) -> RunEstimate:
    prepared = prepare(compose_config([*SMALL, *args]), ESTIMATE_ROLE)
    return Estimator().estimate(make_run_plan(prepared.config))


@pytest.mark.parametrize(("args", "short"), SHORTAGES)
def test_each_shortage_is_named_and_no_command_takes_it_for_fitting(args, short):
    estimator, results = Estimator(), estimated(*args)
    assert [each.split(":")[0] for each in results.shortages] == short
    assert (results.fits, results.verdict, results.margin < 0) == (False, "too_large", True)
    assert estimator.estimate_if_fits(results.plan) is None
    assert largest_that_fits(estimator, results.plan, "micro_batch").estimate is None
    assert all(each.fits for _, each in suggest(estimator, results.plan))
    with pytest.raises(DoesNotFitError, match=f"^{short[0]}: about .* needed"):
        check_fits(results, estimator, lambda line: None)


def simulated(args: Sequence[str]) -> list[str]:
    result = variants_of([*SMALL, *args, "strategy=full_shard,no_shard"], None, simulates=True)
    list(predict(result))
    return [each.result.status for each in result]


@pytest.mark.parametrize(("args", "short"), SHORTAGES)
def test_neither_auto_nor_a_simulation_selects_what_train_refuses(args, short):
    overrides = [*SMALL, *args, "strategy=auto", "activation_checkpointing=auto"]
    config = prepare(compose_config(overrides), ESTIMATE_ROLE).config
    ranking = rank_candidates(Estimator(), config)
    assert ranking.summary.startswith("nothing fits; closest is ")
    assert f": {short[0]}: about" in ranking.summary
    sharded, replicated = simulated(args)
    assert sharded.startswith(f"{TOO_LARGE}{short[0]}: about")
    assert replicated != OK


def test_enough_memory_of_both_kinds_fits_everywhere():
    args = ["cluster.host_memory=64"]
    estimate = estimated(*args)
    assert (estimate.fits, estimate.shortages) == (True, [])
    check_fits(estimate, Estimator(), pytest.fail)
    assert simulated(args) == [OK, OK]


def test_a_run_that_only_fits_by_emptying_the_cache_does_not_fit():
    args = ["model=llama3_8b", "cluster=h100", "activation_checkpointing=selective",
             "launch.allocator=native"]  # fmt: skip

    def with_memory(*more: str) -> RunEstimate:
        return Estimator().estimate(
            make_run_plan(prepare(compose_config([*args, *more]), ESTIMATE_ROLE).config)
        )

    result = with_memory()
    saved = (result.peak_reserved - result.allocated) // 8
    needed = result.peak_reserved - saved + result.outside_allocator.high
    thrashes = with_memory(f"cluster.memory={needed / 2**30}")
    assert (thrashes.verdict, thrashes.fits, len(thrashes.shortages)) == ("thrashes", False, 1)


@pytest.mark.parametrize(("args", "short"), [SHORTAGES[0], SHORTAGES[3]])
def test_the_estimate_shows_what_is_missing_and_what_to_change(args, short):
    code, text = invoke("estimate-memory", *SMALL, *args, "--require-fit")
    (verdict,) = (line for line in text.splitlines() if line.startswith("verdict"))
    assert (code, "does not fit" in verdict, "missing" in verdict) == (3, True, True)
    assert ("host memory" in verdict) == (short == ["host memory"])
    assert "to fit" in text
    code, text = invoke("estimate-memory", *SMALL, *args, "--fit", "micro_batch")
    assert f"train.micro_batch_size=1 does not fit ({short[0]}: about" in text
    code, text = invoke("estimate-memory", *SMALL, *args, "--all-strategies", "--require-fit")
    assert (code, text.count("does not fit") > 1, " fits\n" in text) == (3, True, False)


@pytest.mark.slow
@pytest.mark.parametrize("args", [
    ["activation_checkpointing=auto"], ["strategy=auto", "train.micro_batch_size=auto"],
    ["prefetch=auto", "activation_checkpointing=auto", "launch.nproc_per_node=1"],
])  # fmt: skip
def test_a_selection_leaves_a_reserve_on_gpus_unless_nothing_does(args):
    sizes = ["train.seq_len=2048", "model.hidden_size=1024", "launch.nproc_per_node=2"]
    names = {arg.partition("=")[0] for arg in (*sizes, *args)}
    overrides = [*(w for w in SMALL if w.partition("=")[0] not in names), *args]
    typed = {arg.partition("=")[0] for arg in args}
    overrides += [arg for arg in sizes if arg.partition("=")[0] not in typed]

    def chosen(memory: float) -> RunEstimate:
        composed = compose_config([*overrides, f"cluster.memory={memory:.9f}"])
        config = prepare(composed, ESTIMATE_ROLE).config
        return rank_candidates(Estimator(), config).estimate

    def filled_to(result: RunEstimate, share: float) -> float:
        return (result.peak_reserved / share + result.outside_allocator.high) / 2**30

    usual, least = chosen(80), chosen(0.71)
    assert usual.leaves_reserve
    assert not least.fits
    roomy, tight, full = (chosen(filled_to(usual, share)) for share in (0.94, 0.97, 1))
    memory = {"cluster.memory": 1}
    assert roomy.config.changed(memory) == usual.config.changed(memory)
    assert tight.leaves_reserve
    assert tight.peak_reserved < usual.peak_reserved
    assert full.leaves_reserve
    last = chosen(filled_to(least, 0.99))
    assert (last.fits, last.leaves_reserve, last.peak_reserved) == (
        True, False, least.peak_reserved,
    )  # fmt: skip
    fit = largest_that_fits(Estimator(), usual.plan, "micro_batch")
    assert fit.estimate is not None
    assert fit.estimate.leaves_reserve
    assert fit.next is None or not fit.next.leaves_reserve


def test_the_verdict_names_the_reserve():
    estimate = estimated()
    for share, messages in ((0.5, "(with "), (0.98, "(less than ")):
        memory = (estimate.peak_reserved / share + estimate.outside_allocator.high) / 2**30
        _, text = invoke("estimate-memory", *SMALL, f"cluster.memory={memory:.9f}")
        (verdict,) = (line for line in text.splitlines() if line.startswith("verdict fits: "))
        assert messages in verdict
        assert f"the {estimate.reserve_share:.0%} that a selection leaves)" in verdict
    _, text = invoke("estimate-memory", "launch.device=cpu")
    assert "a selection leaves" not in text


@pytest.mark.slow
def test_what_an_estimate_assumes_is_told(tmp_path):
    _, text = invoke("estimate-memory", "data=chat", "model.vocab_size=1000", *SMALL)
    assert "note    samples of 512 tokens are assumed to contain documents of 256" in text
    assert "assumed to hold" not in invoke("estimate-memory", *SMALL)[1]
    (tmp_path / "a.txt").write_text("words " * 5000)
    few = [f"data.path={tmp_path / 'a.txt'}", "data=text", "train.tokens=1e9"]
    _, text = invoke("estimate-memory", *(x for x in SMALL if "seq_len" not in x), *few)
    assert re.search(r"steps read the data's [\d,]+ samples [\d,]+ times", text)
    _, text = invoke("estimate-memory", "launch.device=cpu", "launch.nproc_per_node=1000")
    assert "1,000 ranks x 1 thread on " in text
