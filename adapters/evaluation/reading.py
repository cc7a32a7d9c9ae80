"""Running a causal language model over one prompt: prefill, the text that follows, and greedy decoding."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor

from sparseprefill.errors import AttachError
from sparseprefill.validate import whole

from .divergence import log_probabilities

Answers = Mapping[str, tuple[int, int]]
"""Values right and asked, by family of task."""


@frozen(kw_only=True)
class Sizes:
    """How much is looked at, in tokens or rows.

    last: last rows of the prefill. tail: text held back from the prompt's end. greedy: tokens of dense's own
    continuation. rows: sampled for the recall. repeats: prefills that are timed; the median counts.
    """

    last: int = field(default=32, validator=whole(1))
    tail: int = field(default=32, validator=whole(2))
    greedy: int = field(default=64, validator=whole(1))
    rows: int = field(default=64, validator=whole(1))
    repeats: int = field(default=1, validator=whole(1))


@frozen
class Reader:
    """A causal language model of transformers, read one prompt at a time (batch of 1), without gradients."""

    model: Any

    @property
    def device(self) -> torch.device:
        """Where token ids go, also for a model spread over several devices."""
        found: torch.device = self.model.get_input_embeddings().weight.device
        return self.model.device if found.type == "meta" else found

    def prefill(self, ids: Tensor, keep: int) -> tuple[Tensor, Any]:
        """Logits ``[keep, vocabulary]`` of the last rows of the prompt ``[1, n]``, and the cache."""
        out = self._run(ids, keep, use_cache=True)
        cache = getattr(out, "past_key_values", None)
        if cache is None:
            name = type(self.model).__name__
            raise AttachError(f"{name} returns no cache: pass a model that decodes from past_key_values")
        return out.logits[0, -keep:], cache

    def follow(self, cache: Any, ids: Tensor) -> Tensor:
        """Logits ``[n, vocabulary]`` of the tokens ``[1, n]`` behind the cache, which grows by them."""
        logits: Tensor = self._run(ids, ids.shape[1], past_key_values=cache, use_cache=True).logits[0]
        return logits

    def decode(self, cache: Any, first: Tensor, count: int, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Tokens ``[count]`` and their logits ``[count, vocabulary]``, one decoding step after the other.

        first: logits ``[vocabulary]`` of the first token. given: tokens to go through instead of the model's own.
        """
        logits, tokens = [first], [first.argmax(-1) if given is None else given[0]]
        for step in range(1, count):
            logits.append(self.follow(cache, tokens[-1].view(1, 1).to(self.device))[0])
            tokens.append(logits[-1].argmax(-1) if given is None else given[step])
        return torch.stack([token.to(first.device) for token in tokens]), torch.stack(logits)

    @property
    def on_cpu(self) -> bool:
        """Whether no part of the model is on a GPU, so that what has returned has run."""
        return not any(tensor.is_cuda for tensor in self.model.parameters())

    def clock(self, ids: Tensor, sizes: Sizes, seconds: float) -> tuple[float, int | None]:
        """Median seconds of `sizes.repeats` prefills, and the bytes that one adds (None on a CPU).

        seconds: of one that ran just now, less what was measured in it. It counts on a CPU, where that subtraction is
        exact; on a GPU every prefill is one in which nothing is measured.
        """
        if self.on_cpu:
            return median([seconds, *(self.timed(ids)[0] for _ in range(sizes.repeats - 1))]), None
        runs = [self.timed(ids) for _ in range(sizes.repeats)]
        return median(each for each, _ in runs), runs[-1][1]

    def timed(self, ids: Tensor) -> tuple[float, int | None]:
        """Seconds of one prefill, and the bytes that its peak adds on the devices (None on a CPU)."""
        devices = sorted({tensor.device.index for tensor in self.model.parameters() if tensor.is_cuda})
        before = sum(torch.cuda.memory_allocated(index) for index in devices)
        for index in devices:
            torch.cuda.reset_peak_memory_stats(index)
            torch.cuda.synchronize(index)
        began = time.perf_counter()
        self._run(ids, 1, use_cache=True)
        for index in devices:
            torch.cuda.synchronize(index)
        seconds = time.perf_counter() - began
        peak = sum(torch.cuda.max_memory_allocated(index) for index in devices)
        return seconds, peak - before if devices else None

    def _run(self, ids: Tensor, keep: int, **more: Any) -> Any:
        if "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            more["logits_to_keep"] = keep
        return self.model(ids, **more)


@frozen(eq=False)
class Truth:
    """What the model's own prefill of one prompt makes of it. Log-probabilities are float32 ``[rows, vocabulary]``.

    last, tail, greedy: of the prompt's last rows, of the held-back text, of the greedy continuation. continuation: the
    greedy tokens. answers: what was asked of the cache. seconds: of a prefill, median. peak: bytes that one adds on the
    devices, None on a CPU.
    """

    last: Tensor
    tail: Tensor
    greedy: Tensor
    continuation: Tensor
    answers: Answers
    seconds: float
    peak: int | None

    @classmethod
    def of(cls, reader: Reader, ids: Tensor, tail: Tensor, sizes: Sizes, ask: Callable[[Any], Answers]) -> Truth:
        """One dense pass over the prompt ``[1, n]``, the tail ``[1, t]`` behind it, and greedy tokens more.

        ask: is given the prompt's cache, and leaves it as it was.
        """
        began = time.perf_counter()
        logits, cache = reader.prefill(ids, sizes.last)
        seconds = time.perf_counter() - began
        answers = ask(cache)
        follows = reader.follow(cache, tail)
        continuation, chosen = reader.decode(cache, follows[-1], sizes.greedy)
        del cache
        seconds, peak = reader.clock(ids, sizes, seconds)
        last, before, greedy = (log_probabilities(rows) for rows in (logits, follows[:-1], chosen))
        return cls(last, before, greedy, continuation, answers, seconds, peak)
