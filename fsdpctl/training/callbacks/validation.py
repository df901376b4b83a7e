"""Validation at intervals and at the end of a run."""

import gc

from fsdpctl.config.schema import Config
from fsdpctl.io.activity import doing
from fsdpctl.io.run_files import METRICS
from fsdpctl.run.metrics import validation_loss_at
from fsdpctl.training.requests import RequestFlags
from fsdpctl.training.trainer import Callback, Trainer
from fsdpctl.training.validation_loss import describe_validation, validation_loss


class Validation(Callback):
    """The validation loss, every `train.eval_every` steps and after the last step."""

    def __init__(self, config: Config, *, has_data: bool) -> None:
        assert config.train.steps is not None
        self._every, self._last = config.train.eval_every, config.train.steps
        self._has_data = has_data
        self._is_pending = False  # the last start stopped before this step's validation

    def begin(self, run: Trainer) -> None:
        """Determine whether the validation of the checkpoint's step is still pending."""
        if run.owes_validation:
            metrics, is_main = run.parts.run_dir / METRICS, run.ranks.rank == 0
            loss = validation_loss_at(metrics, run.step) if is_main else None
            (loss, *_) = run.ranks.all_gather_values(loss)
            if loss is not None:
                run.record_validation(loss)
            self._is_pending = run.owes_validation and self._has_data

    def is_due(self, step: int) -> bool:
        is_interval = self._every > 0 and step % self._every == 0
        return self._has_data and (is_interval or step == self._last)

    def act(self, run: Trainer, requested: RequestFlags) -> RequestFlags:
        """Validate; a stop request skips or ends the validation."""
        if not (self._is_pending or run.is_due(self)):
            return requested
        run.handle_requests()
        self._is_pending, run.owes_validation = False, True
        if requested.stops:
            run.journal.say(f"step {run.step}: validation skipped (stop requested)")
            return requested
        return requested | self._validate(run)

    def _validate(self, run: Trainer) -> RequestFlags:
        parts, train, is_last = run.parts, run.parts.config.train, run.step == self._last
        assert parts.val_batches is not None
        at_most = (train.final_eval_batches or 0) if is_last else train.eval_batches
        total, done = parts.val_batches.num_validation_batches(at_most), 0
        sync = run.request_sync(run.lag)

        def should_continue(number: int) -> bool:
            nonlocal done
            done = number
            advance(1)
            continues = sync.should_continue()
            if sync.received.save:
                run.save(was_requested=True)
            run.idle()
            return continues or number == total

        with doing("validating", "batches", total) as advance:
            loss = validation_loss(
                parts.model,
                parts.val_batches,
                run.ranks,
                parts.device,
                at_most=at_most,
                chunk_tokens=train.loss_chunk_tokens or 0,
                should_continue=should_continue,
            )
        if loss is None:
            progress = f"validation stopped after {done} of {total} batches"
            run.journal.say(f"step {run.step}: {progress} (stop requested)")
        else:
            run.journal.write({"step": run.step, **loss.to_line()})
            run.journal.say(f"step {run.step}: {describe_validation(loss, parts.data)}")
            self._record(run, loss.mean)
        gc.collect()
        return sync.complete()

    def _record(self, run: Trainer, loss: float) -> None:
        """Save the best checkpoint; print the reason if the run ends before its last step."""
        if run.record_validation(loss) and run.parts.config.checkpoint.keep_best:
            run.save()
        if run.is_over() and run.step < self._last:
            assert run.best is not None
            count = run.best.unimproved
            last = "validation loss is" if count == 1 else f"{count} validation losses are"
            run.journal.say(
                f"step {run.step}: the last {last} not below that of step {run.best.step} "
                f"({run.best.loss:.4f}): the run ends "
                f"(train.patience={run.parts.config.train.patience})"
            )
