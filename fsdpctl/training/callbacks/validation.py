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
    """A callback that validates every `train.eval_every` steps and after the last step."""

    def __init__(self, config: Config, *, has_data: bool) -> None:
        assert config.train.steps is not None
        self._every, self._last = config.train.eval_every, config.train.steps
        self._has_data = has_data

    def begin(self, trainer: Trainer) -> None:
        """Determine whether the validation of the checkpoint's step is still pending."""
        if trainer.owes_validation:
            metrics, is_rank_0 = trainer.parts.run_dir / METRICS, trainer.collectives.rank == 0
            loss = validation_loss_at(metrics, trainer.step) if is_rank_0 else None
            (loss, *_) = trainer.collectives.all_gather_values(loss)
            if loss is not None:
                trainer.record_validation(loss)

    def is_due(self, step: int) -> bool:
        is_interval = self._every > 0 and step % self._every == 0
        return self._has_data and (is_interval or step == self._last)

    def act(self, trainer: Trainer, requested: RequestFlags) -> RequestFlags:
        """Validate; a stop request skips or ends the validation."""
        is_pending = trainer.owes_validation and self._has_data  # since an earlier start
        if not (is_pending or trainer.has_due_work(self)):
            return requested
        trainer.enable_saving_on_stop()
        trainer.owes_validation = True
        if requested.stops:
            trainer.journal.say(f"step {trainer.step}: validation skipped (stop requested)")
            return requested
        return requested | self._validate(trainer)

    def _validate(self, trainer: Trainer) -> RequestFlags:
        parts, train = trainer.parts, trainer.parts.config.train
        assert parts.val_batches is not None
        at_most = train.eval_batches
        if trainer.step == self._last:
            at_most = train.final_eval_batches or 0
        total, done = parts.val_batches.num_validation_batches(at_most), 0
        sync = trainer.request_sync(trainer.lag)

        def should_continue(number: int) -> bool:
            nonlocal done
            done = number
            advance(1)
            continues = sync.should_continue()
            if sync.received.save:
                trainer.save(was_requested=True)
            trainer.idle()
            return continues or number == total  # after the last batch, the result is complete

        with doing("validating", "batches", total) as advance:
            loss = validation_loss(
                parts.model, parts.val_batches, trainer.collectives, parts.device,
                max_batches=at_most, chunk_tokens=train.loss_chunk_tokens or 0,
                should_continue=should_continue,
            )  # fmt: skip
        if loss is None:
            progress = f"validation stopped after {done} of {total} batches"
            trainer.journal.say(f"step {trainer.step}: {progress} (stop requested)")
        else:
            trainer.journal.write_metrics({"step": trainer.step, **loss.to_line()})
            trainer.journal.say(f"step {trainer.step}: {describe_validation(loss, parts.data)}")
            self._act_on_loss(trainer, loss.mean)
        gc.collect()
        return sync.complete()

    def _act_on_loss(self, trainer: Trainer, loss: float) -> None:
        """Save the best checkpoint; print the reason if the run ends before its last step."""
        if trainer.record_validation(loss) and trainer.parts.config.checkpoint.keep_best:
            trainer.save()
        if trainer.is_over() and trainer.step < self._last:
            best, patience = trainer.best, trainer.parts.config.train.patience
            assert best is not None
            count = best.unimproved
            last = "validation loss is" if count == 1 else f"{count} validation losses are"
            trainer.journal.say(
                f"step {trainer.step}: the last {last} not below that of step {best.step} "
                f"({best.loss:.4f}): the run ends (train.patience={patience})"
            )
