"""What a run says while it waits."""

from fsdpctl.train.progress import RunProgress


def test_a_wait_for_a_checkpoint_is_told_every_ten_seconds_of_it(capsys):
    progress = RunProgress(10, 0, log_every=1, shows=True, log=None)
    for share, seconds in [(0.1, 0.5), (0.4, 9.9), (0.5, 10.1), (0.6, 19.0), (0.9, 20.2)]:
        progress.saving(share, seconds)
    progress.saving(0.1, 0.5)  # the next one
    progress.saving(0.2, 10.5)
    said = capsys.readouterr().out.splitlines()
    assert said == [f"waiting for the checkpoint, {share}% written" for share in (50, 90, 20)]
