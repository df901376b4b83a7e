"""The training loop: launches a step, reports completed steps, and acts between steps."""

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from fsdpctl.checkpoint.training_progress import Progress
from fsdpctl.comm.rank_status import STATUS_PAGE
from fsdpctl.errors import NonFiniteError, SelfCheckError, StoppedError
from fsdpctl.io.run_files import STOP
from fsdpctl.optim.record import LocalStepStats
from fsdpctl.run.step_metrics import StepMetrics, model_flops
from fsdpctl.training.journal import Journal
from fsdpctl.training.rejected_steps import GradientProbe, RejectionRule
from fsdpctl.training.requests import RequestCollector, RequestFlags, RequestSync, TimeLimit
from fsdpctl.training.script_precision import dtype_errors_as_usage
from fsdpctl.training.train_step import (
    LaunchContext,
    LaunchedStep,
    TrainingParts,
    finish_step,
    launch_step,
)

_STEPS_BETWEEN_GC = 50  # steps between two collections of cycles


class Callback:
    """Hooks of a run. Each hook does nothing unless overridden.

    The loop calls the hooks of all callbacks in the order of their list. Collective means that
    all ranks call the hook at the same point, so that it may communicate.
    """

    saves_state = False  # whether `save` writes a checkpoint

    def begin(self, trainer: "Trainer") -> None:
        """Prepare for the first step of this start. Collective."""

    def after_launch(self, trainer: "Trainer") -> None:
        """React to a launched step, without waiting for the device. Collective."""

    def inspect_gradients(self, trainer: "Trainer") -> None:
        """Inspect the reduced gradients of a step before they are applied. Not collective."""

    def is_due(self, step: int) -> bool:
        """Return whether `act` has work after `step`: the same on all ranks.

        On CUDA, the host waits for the device after such a step.
        """
        return False

    def on_step(self, trainer: "Trainer", metrics: StepMetrics) -> None:
        """Handle the metrics of a completed step; steps come in order. Not collective."""

    def act(self, trainer: "Trainer", requested: RequestFlags) -> RequestFlags:
        """Do due or requested work; return `requested` with the requests received meanwhile.

        Collective.
        """
        return requested

    def prepare_save(self, trainer: "Trainer") -> None:
        """Prepare for the first save, after a step is complete. Collective."""

    def save(self, trainer: "Trainer", *, was_requested: bool = False) -> None:
        """Save the state after this step, unless it is saved already. Collective."""

    def idle(self, trainer: "Trainer") -> None:
        """Do cheap work between steps and between batches of a validation. Not collective."""

    def end(self, trainer: "Trainer", error: BaseException | None) -> None:
        """Finish, even after a failure. Collective if `ends_together(error)`."""

    def finish_pending(self) -> None:
        """After a failure, let a checkpoint in progress complete as long as it makes progress."""


def ends_together(error: BaseException | None) -> bool:
    """Return whether a run that ends with `error` ends on all ranks at the same step."""
    return error is None or isinstance(error, StoppedError | NonFiniteError | SelfCheckError)


@contextmanager
def synchronized_gc() -> Iterator[None]:
    """Turn off automatic garbage collection within the block; the loop collects at fixed steps.

    Automatic collections pause the ranks at different steps, and all ranks wait for each of them.
    Objects that exist before the block are frozen, so that no collection visits them.
    """
    was_enabled, freezes = gc.isenabled(), not gc.get_freeze_count()
    gc.collect()
    if freezes:
        gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


class Trainer:
    """The loop over the remaining steps of a run, with the state that is equal on all ranks.

    Validation, checkpoints and reports are callbacks.
    """

    def __init__(
        self,
        parts: TrainingParts,
        progress: Progress,
        context: LaunchContext,
        journal: Journal,
        callbacks: Sequence[Callback],
    ) -> None:
        """Continue after the steps of `progress`, with `callbacks` in the order of their hooks."""
        config, collectives = parts.config, parts.model.collectives
        assert config.train.steps is not None
        self.parts, self.collectives, self.journal = parts, collectives, journal
        self.total_steps = config.train.steps
        self.step = progress.step  # launched optimizer steps
        self.samples = progress.samples
        self.owes_validation, self.best = progress.owes_validation, progress.best
        self.is_ending = False  # a stop was requested during the newest step
        self.is_traced = False  # a profile is being recorded
        # On CUDA the host launches one step ahead instead of waiting for the device.
        self.lag = int(parts.device.type == "cuda")
        self._callbacks, self._context = callbacks, context
        self._queue: deque[LaunchedStep] = deque()
        self._acted_step = progress.step  # the last step after which the callbacks have acted
        self._saves_on_stop = False
        self._rule = RejectionRule(config.train, progress)
        self._probe = GradientProbe(parts.model.module)
        self._flops = model_flops(config, parts.model.module, parts.device, collectives.size)
        longest = journal.longest_save_seconds
        self.requests = RequestCollector(
            parts.run_dir, TimeLimit(config.launch.time_limit, context.started, longest),
            is_rank_0=collectives.rank == 0, stop_requested=context.stop_requested,
            before_poll=journal.check_not_removed,
        )  # fmt: skip

    def run(self) -> None:
        """Train to the last step; StoppedError or NonFiniteError if the run ends earlier."""
        with synchronized_gc(), self._running(), dtype_errors_as_usage(self.parts.config):
            self._act(RequestFlags())  # runs a validation that is pending from an earlier start
            while not self.is_over():
                self._launch()
                is_due = self.is_over() or any(map(self.has_due_work, self._callbacks))
                requested = self._report_steps(in_flight=0 if is_due else self.lag)
                if requested.stops or requested.save:
                    requested |= self._report_steps(in_flight=0)  # a save needs the newest step
                self._act(requested)
        if self.is_ending:
            self.requests.clear(STOP)
        for line in self.requests.remove_stale(at_end=True):
            self.journal.say(line)
        self.journal.close_metrics()

    @contextmanager
    def _running(self) -> Iterator[None]:
        error: BaseException | None = None
        try:
            for line in self.requests.remove_stale(at_end=False):
                self.journal.say(line)
            self._each(lambda callback: callback.begin(self))
            yield
        except BaseException as caught:
            error = caught
        for each in self._callbacks:
            try:
                each.end(self, error)
            except Exception as caught:  # replaces a regular end, but not an earlier failure
                error = caught if ends_together(error) else error
        if error is not None:
            raise error

    def finish_pending(self) -> None:
        self._each(lambda callback: callback.finish_pending())

    # ---- for callbacks -------------------------------------------------------------------

    def has_due_work(self, callback: Callback) -> bool:
        """Return whether a callback has work after this step that it has not done yet."""
        return self.step != self._acted_step and callback.is_due(self.step)

    def save(self, *, was_requested: bool = False) -> None:
        self._each(lambda callback: callback.save(self, was_requested=was_requested))

    def is_over(self) -> bool:
        progress = Progress(self.step, best=self.best)
        return progress.is_finished(self.total_steps, self.parts.config.train.patience)

    def record_validation(self, loss: float) -> bool:
        """Record the validation loss of this step; return whether it is the lowest of the run."""
        progress = self.progress().after_validation(loss)
        self.owes_validation, self.best = False, progress.best
        return progress.best is not None and progress.best.step == self.step

    def progress(self) -> Progress:
        """Return the progress for a checkpoint. No step may be in flight: it has no results yet."""
        return Progress(
            self.step, self.samples, self.parts.data.fingerprint,
            owes_validation=self.owes_validation, best=self.best,
            num_skips=self._rule.num_rejected, accepted=list(self._rule.accepted),
        )  # fmt: skip

    def request_sync(self, lag: int = 0) -> RequestSync:
        return RequestSync(self.requests.poll, self.collectives, self.parts.device, lag)

    def idle(self) -> None:
        self._each(lambda callback: callback.idle(self))

    def enable_saving_on_stop(self) -> None:
        """From now on, a stop request saves before it ends the run. Collective, once."""
        if not self._saves_on_stop:
            self._saves_on_stop = True
            self._each(lambda callback: callback.prepare_save(self))
            self._context.on_first_step(self.collectives.barrier)

    # ---- the three phases ----------------------------------------------------------------

    def _launch(self) -> None:
        began = time.perf_counter()
        # None before the first complete step or validation: the watchdog then allows more time.
        STATUS_PAGE.at("data", self.step + 1 if self._saves_on_stop else None)

        def local_stats() -> LocalStepStats:
            self._each(lambda callback: callback.inspect_gradients(self))
            flags = self.requests.poll(time.perf_counter() - began).flags
            return LocalStepStats(flags, self._probe.take())

        launched = launch_step(
            self.parts, self.step, self.samples, limits=self._rule.limits(self.step + 1),
            local_stats=local_stats, is_traced=self.is_traced,
        )  # fmt: skip
        self.step, self.samples = launched.step, launched.samples
        self._queue.append(launched)
        self._each(lambda callback: callback.after_launch(self))
        if self.step % _STEPS_BETWEEN_GC == 0:
            gc.collect()

    def _report_steps(self, in_flight: int) -> RequestFlags:
        """Wait for launched steps, except the newest `in_flight`, and report their metrics."""
        requested = RequestFlags()
        while len(self._queue) > in_flight:
            STATUS_PAGE.at("step results")
            launched = self._queue.popleft()
            metrics = finish_step(launched, self.parts.device, self._flops, self.collectives.size)
            requested |= RequestFlags(*metrics.stats.flags)
            for each in self._callbacks:
                each.on_step(self, metrics)
            self.requests.limit.add_step(metrics.times.total)
            rejected = self._rule.evaluate(metrics.step, metrics.stats, launched.limits)
            if rejected is not None:
                batches = self.parts.train_batches
                position = launched.samples - batches.plan.global_batch_size
                self.journal.write_metrics(rejected.to_line(batches, position))
                if rejected.action == "stop":
                    raise self._rule.as_error(rejected)
                self.journal.say(rejected.message)
            self.enable_saving_on_stop()
        return requested

    def _act(self, requested: RequestFlags) -> None:
        """Do due and requested work after this step; StoppedError if a stop was requested."""
        for each in self._callbacks:
            requested = each.act(self, requested)
        self._acted_step = self.step
        self.idle()
        self.is_ending = requested.stops
        if requested.stops and (not self.is_over() or self.owes_validation):
            self.requests.clear(STOP)
            raise StoppedError(self._stop_reason(requested))

    def _each(self, hook: Callable[[Callback], None]) -> None:
        for each in self._callbacks:
            hook(each)

    def _stop_reason(self, requested: RequestFlags) -> str:
        saved = ", saved" * any(each.saves_state for each in self._callbacks)
        cause = ""
        if requested.stop_by_clock:
            cause = f"; launch.time_limit={self.parts.config.launch.time_limit:g} is near"
        elif requested.stop_by_file:
            cause = f"; requested by {self.parts.run_dir / STOP}"
        pending = "; its validation is pending" if self.owes_validation else ""
        return f"stopped at step {self.step} of {self.total_steps}{saved}{cause}{pending}"
