"""The training loop."""

import contextlib
import hashlib
import time
from collections import deque
from contextlib import AbstractContextManager

import torch

from fsdpctl.checkpoint.manifest import Progress
from fsdpctl.errors import FsdpctlError, NonFiniteError, StoppedError
from fsdpctl.optim.record import StepFigures, StepRecord, record_step
from fsdpctl.optim.schedule import lr_factor
from fsdpctl.train.clock import StepClock
from fsdpctl.train.flops import model_flops
from fsdpctl.train.generate import Sampling, generate
from fsdpctl.train.kept import KeptFiles
from fsdpctl.train.loss import describe_validation, summed_loss, validation_loss
from fsdpctl.train.memory_check import MemoryCheck
from fsdpctl.train.metrics import MetricsFile, StepMetrics, peak_memory
from fsdpctl.train.parts import LaunchedStep, TrainingParts
from fsdpctl.train.profiling import Profiler, not_profiled, profiled
from fsdpctl.train.progress import RunProgress, format_seconds
from fsdpctl.train.run_dir import LOG
from fsdpctl.train.saver import Saver

_WORTH_A_LINE = 5.0  # seconds that a checkpoint takes


class Trainer:
    """Steps from where the last checkpoint was to the end of the run."""

    def __init__(self, parts: TrainingParts, done: Progress) -> None:
        self.parts = parts
        self.step = done.step  # optimizer steps done
        self.samples = done.samples
        self._launched: deque[LaunchedStep] = deque()
        # On CUDA the host runs one step ahead instead of waiting for the device's figures.
        self._lag = int(parts.device.type == "cuda")
        parts.model.mesh.measure_waits()
        parts.model.overlap_param_gather = True
        self._saved_step = done.step if done.step else -1
        self._ranks = parts.model.collectives
        watch = parts.watch
        self._saver = Saver(parts.config, parts.run_dir, watch.ranks, watch.after_save)
        self._memory = MemoryCheck(parts.run_dir, parts.model, parts.optimizer, done.step)
        self._is_main = self._ranks.rank == 0
        config = parts.config
        assert config.train.steps is not None
        self.total_steps = config.train.steps
        self._flops = model_flops(config, parts.model, parts.device, self._ranks.size)
        self._chunk_tokens = config.train.loss_chunk_tokens or 0
        file = parts.run_dir / "metrics.jsonl"
        self._metrics = MetricsFile(file, done.step, watch.line) if self._is_main else None
        self._files = KeptFiles(config, parts.run_dir, self._metrics)
        self._progress = RunProgress(
            self.total_steps,
            done.step,
            log_every=config.train.log_every,
            num_ranks=self._ranks.size,
            shows=self._is_main and parts.shows,
            log=parts.run_dir / LOG,
        )

    def run(self) -> None:
        """Train to the end.

        Raises:
            StoppedError: it was asked to stop, and has saved.
            NonFiniteError: a loss or gradient was not finite, and the configuration says stop.
        """
        config = self.parts.config
        watched = self.parts.watch.over(self.step, self._progress.say, self._metrics)
        with self._progress, watched, self._profiler() as profiler:
            while self.step < self.total_steps:
                self._train_step()
                profiler.step()
                last = self.step == self.total_steps
                validates = last or _is_multiple(self.step, config.train.eval_every)
                saves = last or _is_multiple(self.step, config.checkpoint.every)
                stop = self._report(0 if validates or saves else self._lag)
                self._tell_saved()
                if said := self._memory.after(self.step, self.parts.device):
                    self._progress.say(said)
                if stop:  # who asked may not wait for a validation
                    self._report(0)
                    self._save_what_is_lost()
                    self.save()
                if validates:
                    self._validate(last=last)
                if saves:
                    self.save()
                if stop and not last:
                    self._finish_saving()
                    raise StoppedError(f"stopped at step {self.step} of {self.total_steps}, saved")
            self._finish_saving()
            self._save_what_is_lost()
        self._show_sample()
        self._end()

    def leave(self) -> None:
        """After an exception: let the checkpoint on its way be completed, as far as that goes."""
        self._saver.close()

    def _profiler(self) -> AbstractContextManager[Profiler]:
        if not self.parts.config.train.profile:
            return not_profiled()
        steps = range(self.step, self.total_steps)
        return profiled(self.parts.model, self.parts.run_dir, self._ranks.rank, steps)

    def measure(self) -> None:
        """Do the steps and nothing else: no validation, no checkpoint, no sample.

        Raises:
            StoppedError: it was asked to stop.
            NonFiniteError: as in `run`.
        """
        while self.step < self.total_steps:
            self._train_step()
            if self._report(self._lag) and self.step < self.total_steps:
                raise StoppedError(f"stopped at step {self.step} of {self.total_steps}")
        self._report(0)
        self._end()

    def _end(self) -> None:
        """Write down what only all ranks together know. Collective."""
        own = self.parts.model.peak_memory_bytes() + self.parts.optimizer.memory_bytes()
        largest = max(self._ranks.gather_objects(own))
        if self._metrics is not None:
            self._metrics.write({"step": self.step, "peak_engine_bytes": largest})
            self._metrics.close()

    # ---- one step ------------------------------------------------------------------------

    def _train_step(self) -> None:
        """Launch a step; what came of it is reported later."""
        parts, config = self.parts, self.parts.config
        clock = StepClock(parts.device, parts.model.mesh.take_waits)
        record = self._gradients(clock)
        assert config.optimizer.lr is not None
        factor = lr_factor(config.lr_scheduler, self.step, self.total_steps)
        lr = config.optimizer.lr * factor
        for group in parts.optimizer.param_groups:
            group["lr"] = lr
        parts.optimizer.step(grad_scale=record.grad_scale, found_inf=record.found_inf)
        parts.optimizer.zero_grad()
        clock.lap("optimizer")
        self.step += 1
        if self.step < self.total_steps and parts.model.can_prefetch:
            # Beside what is reported, saved and loaded before the next forward.
            parts.model.prefetch_forward_params()
        self.samples += config.train.global_batch_size
        self._launched.append(LaunchedStep(self.step, record, lr, clock))

    def _report(self, keep: int) -> bool:
        """Tell of all launched steps but the newest `keep`; whether a rank was asked to stop."""
        stop = False
        while len(self._launched) > keep:
            done = self._launched.popleft()
            figures = done.record.figures()
            memory = peak_memory(self.parts.device)
            times = done.clock.times()
            metrics = StepMetrics(done.step, figures, done.lr, times, memory, self._flops)
            if self._metrics is not None:
                self._metrics.write(metrics.to_line())
            self._progress.step(metrics, self._saver.share_written)
            self._check_finite(done.step, figures)
            stop |= figures.stop_requested
        return stop

    def _gradients(self, clock: StepClock) -> StepRecord:
        """Forward and backward of every micro-step, and the record of what came of it."""
        parts, config = self.parts, self.parts.config
        plan = parts.train_batches.plan
        nominal = plan.micro_batch_size * plan.num_micro_batches * config.train.seq_len
        loss_sum = torch.zeros((), dtype=torch.float64, device=parts.device)
        tokens = 0
        for micro_step in range(plan.num_micro_batches):
            _reseed(config.train.seed, self.step, micro_step, self._ranks.rank)
            batch = parts.train_batches.training(self.samples, self._ranks.rank, micro_step)
            clock.lap("data")
            is_last = micro_step == plan.num_micro_batches - 1
            holds = config.accumulation.name == "last" and not is_last
            with parts.model.no_sync() if holds else contextlib.nullcontext():
                loss = summed_loss(parts.model, batch, parts.device, self._chunk_tokens)
                (loss / nominal).backward()
            loss_sum += loss.detach()
            tokens += int((batch.targets >= 0).sum())
            clock.lap("compute")
        return record_step(
            parts.model,
            loss_sum=loss_sum,
            tokens=torch.full((), tokens, device=parts.device),  # does not wait for the device
            nominal_tokens=nominal * self._ranks.size,
            max_grad_norm=config.optimizer.max_grad_norm,
            stop=parts.stop_requested() or self._files.look(),
        )

    def _check_finite(self, step: int, figures: StepFigures) -> None:
        if figures.finite:
            return
        what = f"step {step}: loss {figures.loss}, gradient norm {figures.grad_norm}"
        if self.parts.config.train.on_nonfinite == "stop":
            raise NonFiniteError(
                f"{what}; the step was not applied. A lower optimizer.lr may help; "
                "train.on_nonfinite=skip goes on without such steps"
            )
        self._progress.say(f"{what}; skipped")

    # ---- between steps -------------------------------------------------------------------

    def save(self) -> None:
        """Save this step, unless that was done."""
        if self._saved_step == self.step:
            return
        began = time.perf_counter()
        self._finish_saving()
        parts = self.parts
        progress = Progress(self.step, self.samples, parts.data.fingerprint)
        self._saver.save(parts.model, parts.optimizer, progress, began)
        self._saved_step = self.step

    def _save_what_is_lost(self) -> None:
        """See that the run directory is still there; what is not is saved again. Collective.

        Raises:
            FsdpctlError: it was not there.
        """
        if any(self._ranks.gather_objects(self._files.look(now=True))):
            self._files.put_back()
            self._saved_step = -1
            self.save()
            self._finish_saving()
            raise self._files.as_error(self.step)

    def _finish_saving(self) -> None:
        """Let the checkpoint on its way be completed, and tell of it."""
        self._saver.wait(self._progress.saving)
        self._tell_saved()

    def _tell_saved(self) -> None:
        try:
            saved = self._saver.take_saved()
        except FsdpctlError:
            if not self._files.look(now=True):
                raise
            saved = None  # it is saved again, where all ranks know of it
        if saved is None:
            return
        if self._metrics is not None:
            self._metrics.write(saved.to_line())
        if saved.note:
            self._progress.say(f"step {saved.step}: saved; but {saved.note}")
        if saved.write > _WORTH_A_LINE:
            self._progress.say(f"step {saved.step}: saved in {format_seconds(saved.write)}")

    def _validate(self, *, last: bool) -> None:
        parts = self.parts
        if parts.val_batches is None:
            return
        train = parts.config.train
        at_most = train.final_eval_batches if last else train.eval_batches
        loss = validation_loss(
            parts.model,
            parts.val_batches,
            self._ranks,
            parts.device,
            at_most=at_most,
            chunk_tokens=self._chunk_tokens,
        )
        if self._metrics is not None:
            self._metrics.write({"step": self.step, "val_loss": loss})
        described = describe_validation(loss, parts.data, compare=last)
        self._progress.say(f"step {self.step}: {described}")

    def _show_sample(self) -> None:
        config, parts = self.parts.config, self.parts
        if not config.train.sample_tokens:
            return
        tokens = generate(
            parts.model,
            parts.data.tokenizer.encode_prompt(""),
            config.train.sample_tokens,
            context=config.train.seq_len,
            sampling=Sampling(config.train.seed),
            device=parts.device,
            caches=not config.train.compile,
        )
        self._progress.say("a sample:\n" + parts.data.tokenizer.decode(tokens))


def _is_multiple(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _reseed(*place: int) -> None:
    """Give torch's generators a state that follows from where in the run this is."""
    digest = hashlib.blake2b(repr(place).encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little") >> 1)
