"""Simulated comparisons: a suggestion if none of the variants fits, and short steps."""

from fsdpctl.commands.compare.report import OK, TOO_LARGE, VariantResult, cells
from fsdpctl.commands.compare.results import predict
from fsdpctl.commands.compare.variants import variants_of

SETTINGS = ["model.num_layers=2", "strategy=no_shard,full_shard", "launch.nproc_per_node=2",
         "train.seq_len=512", "train.global_batch_size=4", "cluster=h100"]  # fmt: skip


HELD = ["activation_checkpointing=none", "prefetch=both", "train.micro_batch_size=2"]


def simulated(*args: str) -> tuple[list[VariantResult], list[str]]:
    """Return the rows and the notes, except for the note on the cluster's price."""
    result = variants_of([*args, "train.steps=20"], None, simulates=True)
    notes = list(dict.fromkeys(predict(result)))  # sets what the rows have
    return [each.result for each in result], [x for x in notes if not x.startswith("cost at ")]


def test_changes_that_fit_are_named_if_no_variant_does():
    # CUDA context and communicators take up to 1.9 GiB of the memory.
    rows, notes = simulated(*SETTINGS, "cluster.memory=1.99", *HELD)
    assert all(row.status.startswith(TOO_LARGE) for row in rows)
    assert notes[0] == "no variant fits; settings with which the nearest variant fits:"
    assert notes[1].startswith("to fit  1. ")


def test_no_change_is_named_if_a_variant_fits():
    rows, notes = simulated(*SETTINGS, "cluster.memory=1.99")  # with the selected values
    assert [row.status for row in rows] == [OK, OK]
    assert notes[1].startswith("strategy=full_shard: the defaults need 2.0")
    assert "; selected: " in notes[1]
    rows, notes = simulated(*SETTINGS, "cluster.memory=0.01")
    assert [row.status == OK for row in rows] == [False, False]
    assert "to fit  no settings found with which the run fits" in notes


def test_missing_host_memory_is_in_the_status_of_a_variant():
    args = [*SETTINGS[:1], "strategy=full_shard", *SETTINGS[2:], "strategy.offload=none,states"]
    (fits, lacks), _ = simulated(*args, "cluster.host_memory=6.008")
    assert (fits.status, lacks.hours, lacks.gpu_hours) == (OK, None, None)
    assert fits.hours is not None
    assert [cells(row, [])[0] for row in (fits, lacks)] == ["-", "does not fit"]
    assert lacks.status.startswith(TOO_LARGE)
    assert lacks.status.endswith("GiB needed per node, 6.01 GiB available (cluster.host_memory)")


def test_short_steps_of_gpus_have_a_note_and_too_few_samples_are_refused():
    rows, (note,) = simulated(*SETTINGS, "cluster.memory=80")
    assert note.startswith("Steps shorter than 100 ms are limited by the host, ")
    assert all((row.step_seconds or 1) < 0.1 for row in rows)
    long = [*SETTINGS[1:4], "train.global_batch_size=1", "model=llama3_8b", "cluster=h200"]
    rows, notes = simulated(*long)
    assert notes == []
    refused = "=1: expected at least 2, one sample per rank"
    assert all(row.status.endswith(refused) for row in rows)
