"""What a run looks at between its steps: validation, and a sample at the end.

Both may take long, so between one piece and the next the ranks ask each other whether to go on.
"""

from collections import deque
from collections.abc import Callable, Iterator

import torch

from fsdpctl.comm.arriving import Arriving, raised
from fsdpctl.comm.base import Collectives
from fsdpctl.run.metrics import finite
from fsdpctl.train.generate import Sampling, generate
from fsdpctl.train.loss import describe_validation, validation_loss
from fsdpctl.train.parts import TrainingParts
from fsdpctl.train.requests import Asked
from fsdpctl.train.telling import Teller


class Hearing:
    """The ranks tell each other what they were asked for."""

    def __init__(
        self, look: Callable[[], Asked], ranks: Collectives, device: torch.device, lag: int = 0
    ) -> None:
        """`look()` is this rank's own; the last `lag` answers are not waited for."""
        self.heard = Asked()
        self._look, self._ranks, self._device, self._lag = look, ranks, device, lag
        self._arriving: deque[Arriving] = deque()

    def goes_on(self) -> bool:
        """Whether nobody was asked to end, as far as all ranks know. Collective."""
        self._arriving.append(raised(self._ranks, self._look().flags, self._device))
        return not self._heard_but(self._lag).ends

    def all_heard(self) -> Asked:
        """What was asked for until now."""
        return self._heard_but(0)

    def _heard_but(self, lag: int) -> Asked:
        while len(self._arriving) > lag:
            counts = self._arriving.popleft().tolist()
            self.heard |= Asked(*(count > 0 for count in counts))
        return self.heard


def validate(
    parts: TrainingParts, teller: Teller, step: int, goes_on: Callable[[], bool], *, last: bool
) -> bool:
    """Tell the validation loss after `step`; returns whether there is one. Collective.

    Args:
        parts: with data to validate with.
        teller: is told.
        step: steps done.
        goes_on: asked after each global batch; where it says no the rest is left, unless that was
            the last one.
        last: whether this is the one at the end.
    """
    assert parts.val_batches is not None
    train, done = parts.config.train, 0
    at_most = train.final_eval_batches if last else train.eval_batches
    total = parts.val_batches.num_validation_batches(at_most)

    def is_to_go_on(number: int) -> bool:
        nonlocal done
        done = number
        return goes_on() or number == total

    loss = validation_loss(
        parts.model,
        parts.val_batches,
        parts.model.collectives,
        parts.device,
        at_most=at_most,
        chunk_tokens=train.loss_chunk_tokens or 0,
        goes_on=is_to_go_on,
    )
    if loss is None:
        left = f"validation left after {done} of {total} batches, as asked to stop"
        teller.say(f"step {step}: {left}")
        return False
    teller.write({"step": step, "val_loss": finite(loss)})
    teller.say(f"step {step}: {describe_validation(loss, parts.data, compare=last)}")
    return True


def sample(parts: TrainingParts, goes_on: Callable[[], bool]) -> str:
    """Text out of the model, in words to be shown; cut short where `goes_on()` says no."""
    config, data = parts.config, parts.data
    count = config.train.sample_tokens

    def turns() -> Iterator[None]:
        for _ in range(count):
            if not goes_on():
                return
            yield

    tokens = generate(
        parts.model,
        list(data.prompt) or data.tokenizer.encode_prompt(""),
        turns(),
        context=config.train.seq_len,
        sampling=Sampling(config.train.seed),
        device=parts.device,
        caches=not config.train.compile,
    )
    text = "a sample"
    if len(tokens) < count:
        text += f", cut short after {len(tokens)} of {count} tokens as asked to stop"
    if data.prompt:
        text += f" of an answer to\n{data.tokenizer.decode(data.prompt).rstrip()}\n"
    # Drawn to the end on every rank, shown to the end of the answer.
    ended = next((n for n, token in enumerate(tokens) if token in data.end_tokens), len(tokens))
    return f"{text}:\n{data.tokenizer.decode(tokens[:ended])}"
