"""A sample of generated text at the end of a run."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fsdpctl.train.callback import Callback
from fsdpctl.train.generate import Sampling, generate

if TYPE_CHECKING:
    from fsdpctl.train.trainer import Trainer


class SampleText(Callback):
    """Generated text of `train.sample_tokens` tokens, or fewer if a stop is requested."""

    def end(self, run: "Trainer", error: BaseException | None) -> None:
        """Print a sample after the last step."""
        if error is not None or not run.parts.config.train.sample_tokens:
            return
        if run.is_ending:
            run.say("sample skipped (stop requested)")
            return
        run.say(self._sample(run))

    def _sample(self, run: "Trainer") -> str:
        config, data = run.parts.config, run.parts.data
        count, sync = config.train.sample_tokens, run.request_sync()

        def turns() -> Iterator[None]:
            for _ in range(count):
                if not sync.goes_on():
                    return
                yield

        tokens = generate(
            run.parts.model,
            list(data.prompt) or data.tokenizer.encode_prompt(""),
            turns(),
            context=config.train.seq_len,
            sampling=Sampling(config.train.seed),
            device=run.parts.device,
            caches=not config.train.compile,
        )
        run.is_ending = sync.received.ends
        title = "sample"
        if len(tokens) < count:
            title += f", stopped after {len(tokens)} of {count} tokens (stop requested)"
        if data.prompt:
            title = f"prompt:\n{data.tokenizer.decode(data.prompt).rstrip()}\n{title}"
        # Every rank generates all tokens; the printed message ends where the model ends it.
        ended = next((n for n, token in enumerate(tokens) if token in data.end_tokens), len(tokens))
        return f"{title}:\n{data.tokenizer.decode(tokens[:ended])}"
