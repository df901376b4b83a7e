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
    use_cache: bool = True,
) -> Iterator[int]:
    """Yield the tokens that follow `prompt`, one per turn. Collective for a sharded model.

    `turns` is an iterable of the same length on every rank, such as `range(COUNT)`; it may end
    early. The model sees the last `context` tokens. If `use_cache`, keys and values are cached.
    Compiled blocks should not use the cache: they would be compiled again for each length.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    tokens, cache = list(prompt), KeyValueCache()
    for _ in turns:
        with eval_mode(model), without_cudnn_attention():
            if use_cache and len(tokens) <= context:
                logits = model(torch.tensor([tokens[len(cache) :]], device=device), cache=cache)
            else:  # the window has moved: positions have changed, so the cache is not valid
                logits = model(torch.tensor([tokens[-context:]], device=device))
        tokens.append(sample_token(logits[0, -1].float().cpu(), sampling, generator))
        yield tokens[-1]
        if tokens[-1] in sampling.end_tokens:
            return


def sample_token(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
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

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        if error is not None or not trainer.parts.config.train.sample_tokens:
            return
        if trainer.is_ending:
            trainer.journal.say("sample skipped (stop requested)")
            return
        if not trainer.parts.data.has_text:
            trainer.journal.say("no sample: the tokenizer of the data is unknown (data.tokenizer)")
            return
        with doing("generating a sample (Ctrl-C skips it)"):
            self._sample(trainer)

    def _sample(self, trainer: Trainer) -> None:
        config, data = trainer.parts.config, trainer.parts.data
        count, sync = config.train.sample_tokens, trainer.request_sync()
        count_done, has_ended = 0, False

        def turns() -> Iterator[None]:
            for _ in range(count):
                # All ranks end together, even if rounding lets them draw different tokens.
                ended = count_flags(trainer.collectives, [has_ended], trainer.parts.device)
                if not sync.should_continue() or ended.tolist()[0]:
                    return
                yield

        def until_ended() -> Iterator[int]:
            nonlocal count_done, has_ended
            for token in tokens:  # no break: the other ranks generate until turns() ends
                count_done += 1
                has_ended |= token in data.end_tokens
                if not has_ended:
                    yield token

        tokens = generate(
            trainer.parts.model, list(data.generation_prompt) or data.tokenizer.encode_prompt(""),
            turns(), context=config.train.seq_len, sampling=Sampling(config.train.seed),
            device=trainer.parts.device, use_cache=not config.train.compile,
        )  # fmt: skip
        if data.generation_prompt:
            prompt = data.tokenizer.decode(data.generation_prompt).rstrip()
            trainer.journal.say(f"prompt:\n{prompt}")
        trainer.journal.say("sample:")
        with trainer.journal.display.stream() as write:
            for piece in data.tokenizer.decode_stream(until_ended()):
                write(piece)
        trainer.is_ending = sync.received.stops
        if trainer.is_ending:
            done = f"{count_done} of {count} tokens"
            trainer.journal.say(f"sample stopped after {done} (stop requested)")
