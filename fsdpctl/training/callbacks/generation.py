"""Text generation, token by token, and a generated sample at the end of a run."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdpctl.comm.collectives import count_flags
from fsdpctl.io.activity import doing
from fsdpctl.models.attention_kernels import without_cudnn_attention
from fsdpctl.models.transformers_decoder import Decoder, KeyValueCache, eval_mode
from fsdpctl.training.trainer import Callback, Trainer


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters of random sampling."""

    seed: int
    temperature: float = 0.8  # 0: greedy
    top_p: float = 1.0  # probability mass of the likeliest tokens to sample from
    end_tokens: tuple[int, ...] = ()  # tokens that end the text; generation yields them too


@torch.no_grad()
def generate(
    model: Decoder,
    prompt: list[int],
    turns: Iterable[object],
    *,
    context: int,
    sampling: Sampling,
    device: torch.device,
    caches: bool = True,
) -> Iterator[int]:
    """Yield the tokens that follow `prompt`, one per turn. Collective for a sharded model.

    `turns` is an iterable of the same length on every rank, such as `range(COUNT)`; it may end
    early. The model sees the last `context` tokens. If `caches`, keys and values are cached.
    Compiled blocks should not use the cache: they would be compiled again for each length.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    tokens, cache = list(prompt), KeyValueCache()
    for _ in turns:
        with eval_mode(model), without_cudnn_attention():
            if caches and len(tokens) <= context:
                logits = model(torch.tensor([tokens[len(cache) :]], device=device), cache=cache)
            else:  # the window has moved: positions have changed, so the cache is not valid
                logits = model(torch.tensor([tokens[-context:]], device=device))
        tokens.append(draw(logits[0, -1].float().cpu(), sampling, generator))
        yield tokens[-1]
        if tokens[-1] in sampling.end_tokens:
            return


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw one token from 1-D logits by nucleus sampling (Holtzman et al., 2020)."""
    if not sampling.temperature:
        return int(logits.argmax())
    probs = torch.softmax(logits / sampling.temperature, dim=-1)
    if sampling.top_p < 1:
        sorted_probs, order = probs.sort(descending=True, stable=True)
        mass_before = sorted_probs.cumsum(0) - sorted_probs
        probs[order[mass_before >= sampling.top_p]] = 0
    return int(torch.multinomial(probs, 1, generator=generator))


class SampleText(Callback):
    """A callback that generates tokens after the last step, until a stop is requested."""

    def end(self, run: Trainer, error: BaseException | None) -> None:
        if error is not None or not run.parts.config.train.sample_tokens:
            return
        if run.is_ending:
            run.journal.say("sample skipped (stop requested)")
            return
        if not run.parts.data.has_text:
            run.journal.say("no sample: the tokenizer of the data is unknown (data.tokenizer)")
            return
        with doing("generating a sample (Ctrl-C skips it)"):
            self._sample(run)

    def _sample(self, run: Trainer) -> None:
        config, data = run.parts.config, run.parts.data
        count, sync = config.train.sample_tokens, run.request_sync()
        count_done, has_ended = 0, False

        def turns() -> Iterator[None]:
            for _ in range(count):
                # All ranks end together, even if rounding lets them draw different tokens.
                ended = count_flags(run.ranks, [has_ended], run.parts.device)
                if not sync.should_continue() or ended.tolist()[0]:
                    return
                yield

        def until_ended() -> Iterator[int]:
            nonlocal count_done, has_ended
            for token in tokens:
                count_done += 1
                has_ended |= token in data.end_tokens
                if not has_ended:
                    yield token

        tokens = generate(
            run.parts.model,
            list(data.generation_prompt) or data.tokenizer.encode_prompt(""),
            turns(),
            context=config.train.seq_len,
            sampling=Sampling(config.train.seed),
            device=run.parts.device,
            caches=not config.train.compile,
        )
        if data.generation_prompt:
            run.journal.say(f"prompt:\n{data.tokenizer.decode(data.generation_prompt).rstrip()}")
        run.journal.say("sample:")
        with run.journal.display.stream() as write:
            for piece in data.tokenizer.decode_stream(until_ended()):
                write(piece)
        run.is_ending = sync.received.stops
        if run.is_ending:
            run.journal.say(f"sample stopped after {count_done} of {count} tokens (stop requested)")
