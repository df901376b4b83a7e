"""The training loop."""

import time
from collections import deque

from fsdpctl.checkpoint.manifest import Progress
from fsdpctl.comm.pulse import PULSE
from fsdpctl.errors import NonFiniteError, StoppedError
from fsdpctl.optim.record import OwnWord
from fsdpctl.run.directory import METRICS
from fsdpctl.run.metrics import was_validated
from fsdpctl.train.bad_numbers import BadNumbers, BadStep
from fsdpctl.train.due import Due, due_after
from fsdpctl.train.gradient_probe import GradientProbe
from fsdpctl.train.keeper import Keeper
from fsdpctl.train.kept import KeptFiles
from fsdpctl.train.looks import Hearing, sample, validate
from fsdpctl.train.memory_check import MemoryCheck, engine_bytes
from fsdpctl.train.parts import LaunchedStep, TrainingParts
from fsdpctl.train.profiling import Tracing
from fsdpctl.train.requests import PROFILE, STOP, Asked, Requests, TimeLimit
from fsdpctl.train.rollback import load_newest
from fsdpctl.train.step import launch_step
from fsdpctl.train.telling import Teller


class Trainer:
    """Steps from where the last checkpoint was to the end of the run."""

    def __init__(self, parts: TrainingParts, done: Progress) -> None:
        config = parts.config
        assert config.train.steps is not None
        self.parts = parts
        self.total_steps = config.train.steps
        self.step = done.step  # optimizer steps done
        self.samples = done.samples
        self._owes_validation = done.owes_validation
        self._settled = done.step  # after which everything was done that was due
        self._has_begun = self._is_ending = False
        self._launched: deque[LaunchedStep] = deque()
        # On CUDA the host runs one step ahead instead of waiting for the device's figures.
        self._lag = int(parts.device.type == "cuda")
        self._ranks = parts.model.collectives
        self._teller = Teller(parts, done.step)
        files = KeptFiles(config, parts.run_dir, self._teller.metrics)
        self._requests = Requests(parts.run_dir, files, self._time_limit())
        self._keeper = Keeper(parts, done.step, files, self._requests, self._teller)
        self._numbers = BadNumbers(config.train, done)
        self._probe = GradientProbe(parts.model.module)
        self._tracing = Tracing(parts.model, parts.run_dir, self._ranks.rank)
        self._memory = MemoryCheck(parts.run_dir, parts.model, parts.optimizer, done.step)

    def _time_limit(self) -> TimeLimit | None:
        """Rank 0's."""
        if self._teller.metrics is None:
            return None
        seconds, started = self.parts.config.launch.time_limit, self.parts.outside.started
        return TimeLimit(seconds, started, self._teller.metrics.seconds_to_save)

    def run(self) -> None:
        """Train to the end.

        Raises:
            StoppedError: it was asked to stop, and has saved.
            NonFiniteError: a step was not applied, for its numbers, and nothing is to be done.
        """
        watched = self.parts.watch.over(self.step, self._teller.say, self._teller.metrics)
        with self._teller, watched, self._tracing:
            for line in (*self.parts.lines, *self._requests.remove_left_over()):
                self._teller.say(line)
            if self._is_validation_missing():
                self._begin_to_heed()
                self._heed(Asked(), Due(last=self.step == self.total_steps, validates=True))
            if self.parts.config.train.profile:
                self._tracing.begin(range(self.step, self.total_steps))
            while self.step < self.total_steps:
                self._train_step()
                if self._tracing.step():
                    self._ranks.barrier()  # the others' files are complete too
                    self._requests.done(PROFILE)
                asked = self._report(0 if self._due() != Due() else self._lag)
                if asked.ends or asked.save:
                    asked |= self._report(0)
                self._keeper.tell()
                if said := self._memory.after(self.step, self.parts.device):
                    self._teller.say(said)
                self._heed(asked, self._due())
            self._keeper.finish()
            self._keeper.save_what_is_lost(self._done())
        self._show_sample()
        self._end()

    def measure(self) -> None:
        """Do the steps and nothing else: no validation, no checkpoint, no sample.

        Raises:
            StoppedError: it was asked to stop.
            NonFiniteError: as in `run`.
        """
        while self.step < self.total_steps:
            self._train_step()
            if self._report(self._lag).ends and self.step < self.total_steps:
                raise StoppedError(f"stopped at step {self.step} of {self.total_steps}")
        self._report(0)
        self._end()

    def leave(self) -> None:
        """After an exception: let the checkpoint on its way be completed, as far as that goes."""
        self._keeper.leave()

    def _end(self) -> None:
        """Write down what only all ranks together know. Collective."""
        own = engine_bytes(self.parts.model, self.parts.optimizer)
        every = self._ranks.gather_objects(own)
        largest = None if None in every else max(each for each in every if each is not None)
        self._teller.write({"step": self.step, "peak_engine_bytes": largest})
        self._teller.close()
        if self._is_ending:
            self._requests.done(STOP)
        for line in self._requests.end():
            self._teller.say(line)

    # ---- one step ------------------------------------------------------------------------

    def _train_step(self) -> None:
        """Launch a step; what came of it is reported later."""
        began = time.perf_counter()
        PULSE.at("data", self.step + 1 if self._has_begun else None)

        def own() -> OwnWord:
            return OwnWord(self._look(time.perf_counter() - began).flags, self._probe.take())

        launched = launch_step(
            self.parts,
            self.step,
            self.samples,
            limits=self._numbers.limits(self.step + 1),
            own=own,
            is_traced=self._tracing.is_on,
        )
        self.step, self.samples = launched.step, launched.samples
        self._launched.append(launched)

    def _look(self, seconds: float = 0.0) -> Asked:
        by_signal = self.parts.outside.stop_requested()
        return self._requests.look(by_signal=by_signal, seconds=seconds)

    def _report(self, keep: int) -> Asked:
        """Tell of all launched steps but the newest `keep`; returns what was asked for in them.

        A step that went wrong may bring the run back to an earlier one.
        """
        asked = Asked()
        while len(self._launched) > keep:
            PULSE.at("figures of the step")
            done = self._launched.popleft()
            figures = done.record.figures()
            asked |= Asked(*figures.flags)
            seconds = self._teller.step(done, figures, self._keeper.share_written)
            if self._requests.limit is not None:
                self._requests.limit.step_took(seconds)
            bad = self._numbers.judge(done.step, figures, done.limits)
            if bad is not None:
                asked |= self._deal_with(bad, done)
            self._begin_to_heed()
        return asked

    def _begin_to_heed(self) -> None:
        """From now on there is something to save. Collective, once."""
        if not self._has_begun:
            self._has_begun = True
            self._keeper.prepare()
            self.parts.outside.on_begun(self._ranks.barrier)

    # ---- bad numbers ---------------------------------------------------------------------

    def _deal_with(self, bad: BadStep, done: LaunchedStep) -> Asked:
        """Returns what was asked for in steps that are given up.

        Raises:
            NonFiniteError: the run is to end with it.
        """
        batches = self.parts.train_batches
        self._teller.write(bad.to_line(batches, done.samples - batches.plan.global_batch_size))
        if bad.action == "stop":
            raise self._numbers.as_error(bad)
        self._teller.say(bad.in_words)
        return self._roll_back(bad, done) if bad.action == "rollback" else Asked()

    def _roll_back(self, bad: BadStep, done: LaunchedStep) -> Asked:
        """To the newest checkpoint, and on with the samples after those of the step."""
        asked = Asked()
        for later in self._launched:  # with weights that are given up
            asked |= Asked(*later.record.figures().flags)
        self._launched.clear()
        self._keeper.finish()
        before = load_newest(self.parts)
        if before is None:
            raise NonFiniteError(
                f"{bad.in_words}, but there is none yet: an earlier one takes a smaller "
                "checkpoint.every; train.on_nonfinite=skip goes on without the step"
            )
        self.step, self.samples = before.step, done.samples
        self._settled = self._keeper.saved_step = before.step
        self._numbers.go_back(before)
        self._teller.cut_back(before.step)
        self._teller.say(f"goes on from step {before.step}, with the samples after step {bad.step}")
        return asked

    # ---- between steps -------------------------------------------------------------------

    def _due(self) -> Due:
        if self.step == self._settled:
            return Due()
        has_data = self.parts.val_batches is not None
        return due_after(self.step, self.parts.config, validates=has_data)

    def _heed(self, asked: Asked, due: Due) -> None:
        """Do what is due and what was asked for, together.

        Raises:
            StoppedError: that was to end; all is saved.
        """
        if asked.profile and not self._tracing.is_on and self.step < self.total_steps:
            self._tracing.begin(range(self.step, self.total_steps), later=True)
        if due.validates:
            asked = self._validate(asked, last=due.last)
        if asked.ends:
            self._keeper.save_what_is_lost(self._done())
        if asked.ends or asked.save or due.saves:
            self.save(was_asked=asked.save)
        self._settled = self.step
        self._is_ending = asked.ends
        if asked.ends and not (self.step == self.total_steps and not self._owes_validation):
            self._keeper.finish()
            self._requests.done(STOP)
            raise StoppedError(self._why(asked))

    def _why(self, asked: Asked) -> str:
        """Of a stop, in words."""
        why = ""
        if asked.by_clock:
            why = f"; launch.time_limit={self.parts.config.launch.time_limit:g} is near"
        elif asked.by_file:
            why = f"; {self.parts.run_dir / STOP} was there"
        owed = "; its validation is missing" if self._owes_validation else ""
        return f"stopped at step {self.step} of {self.total_steps}, saved{why}{owed}"

    def save(self, *, was_asked: bool = False) -> None:
        """Save this step, unless that was done."""
        self._keeper.save(self._done(), was_asked=was_asked)

    def _done(self) -> Progress:
        return Progress(
            self.step,
            self.samples,
            self.parts.data.fingerprint,
            owes_validation=self._owes_validation,
            num_skips=self._numbers.number,
            accepted=list(self._numbers.accepted),
        )

    def _is_validation_missing(self) -> bool:
        """Whether the last start was stopped before it had validated, and none has since."""
        if not self._owes_validation:
            return False
        metrics = self.parts.run_dir / METRICS
        is_there = self._ranks.rank == 0 and was_validated(metrics, self.step)
        self._owes_validation = not any(self._ranks.gather_objects(is_there))
        return self._owes_validation and self.parts.val_batches is not None

    def _validate(self, asked: Asked, *, last: bool) -> Asked:
        """Unless that was `asked`, or is in between, to end; returns what was asked in between."""
        self._owes_validation = True
        if asked.ends:
            self._teller.say(f"step {self.step}: not validated, as asked to stop")
            return asked
        hearing = Hearing(self._look, self._ranks, self.parts.device, self._lag)

        def goes_on() -> bool:
            goes = hearing.goes_on()
            if hearing.heard.save:
                self.save(was_asked=True)
            self._keeper.tell()
            return goes

        is_told = validate(self.parts, self._teller, self.step, goes_on, last=last)
        self._owes_validation = not is_told
        return asked | hearing.all_heard()

    def _show_sample(self) -> None:
        if not self.parts.config.train.sample_tokens:
            return
        if self._is_ending:
            self._teller.say("no sample, as asked to stop")
            return
        hearing = Hearing(self._look, self._ranks, self.parts.device)
        self._teller.say(sample(self.parts, hearing.goes_on))
        self._is_ending = hearing.heard.ends
