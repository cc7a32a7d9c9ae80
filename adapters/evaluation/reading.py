"""Running a causal language model over one prompt: prefill, the text that follows, and greedy decoding."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor

from sparseprefill.errors import AttachError
from sparseprefill.validate import whole

from .prompts import Prompt

Answers = Mapping[str, tuple[int, int]]
"""Values right and asked, by family of task."""

APART = 160
"""Last rows of a prefill that do not count as inside it: the dense tail serves 128 of them whatever a method keeps."""


@frozen(eq=False)
class Kept:
    """Which rows of a prompt's prefill are read, int64 ``[n]`` each, ascending.

    inside: spread evenly over the rows before the last `APART`; over all of a prompt that has no more. answers: the
    rows that predict the tokens of answers inside the prompt, of its `Span`s one after the other. last: the last ones.
    """

    inside: Tensor
    answers: Tensor
    last: Tensor

    @classmethod
    def of(cls, prompt: Prompt, tokens: int, sizes: Sizes) -> Kept:
        """The rows to read of a prefill of the prompt's first tokens, so many."""
        most = tokens - APART if tokens > APART else tokens
        count = min(sizes.inside, most)
        inside = torch.linspace(0, most - 1, count, dtype=torch.float64, device="cpu").round().long()
        known = [one for one in prompt.inside if one.last <= tokens]
        answers = [torch.arange(one.first - 1, one.last - 1, device="cpu") for one in known]
        last = torch.arange(tokens - sizes.last, tokens, device="cpu")
        return cls(inside, torch.cat([*answers, last[:0]]), last)

    @property
    def index(self) -> Tensor:
        """All of them, one kind after the other."""
        return torch.cat([self.inside, self.answers, self.last])

    def split(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits ``[n, vocabulary]`` of `index`, by kind."""
        inside, answers, last = logits.split([len(self.inside), len(self.answers), len(self.last)])
        return inside, answers, last


def right_inside(prompt: Prompt, tokens: int, logits: Tensor) -> Answers:
    """Answers inside the prompt whose every token is the likeliest, and how many there are, by family.

    logits: of the rows `Kept.answers` of a prefill of so many tokens.
    """
    spans = [one for one in prompt.inside if one.last <= tokens]
    if not spans:
        return {}
    wanted = [token for one in spans for token in prompt.ids[one.first : one.last]]
    same = logits.argmax(-1).cpu() == torch.tensor(wanted, dtype=torch.int64, device="cpu")
    found: dict[str, tuple[int, int]] = {}
    for one, hits in zip(spans, same.split([one.last - one.first for one in spans]), strict=True):
        right, asked = found.get(one.family, (0, 0))
        found[one.family] = right + bool(hits.all()), asked + 1
    return found


@frozen(kw_only=True)
class Sizes:
    """How much is looked at, in tokens or rows.

    inside: rows spread over the prompt, of which the last `APART` are none. last: last rows of the prefill. tail: text
    held back from the prompt's end. greedy: tokens of dense's own continuation. rows: sampled for the recall. repeats:
    prefills that are timed; the median counts.
    """

    inside: int = field(default=2048, validator=whole(1))
    last: int = field(default=32, validator=whole(1))
    tail: int = field(default=32, validator=whole(2))
    greedy: int = field(default=64, validator=whole(1))
    rows: int = field(default=64, validator=whole(1))
    repeats: int = field(default=1, validator=whole(1))


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Runs the block with so many threads of PyTorch."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@frozen
class Reader:
    """A causal language model of transformers, read one prompt at a time (batch of 1), without gradients."""

    model: Any

    @property
    def device(self) -> torch.device:
        """Where token ids go, also for a model spread over several devices."""
        found: torch.device = self.model.get_input_embeddings().weight.device
        return self.model.device if found.type == "meta" else found

    def prefill(self, ids: Tensor, rows: Tensor) -> tuple[Tensor, Any]:
        """Logits ``[n, vocabulary]`` of some rows of the prompt ``[1, tokens]``, by index int64 ``[n]``, and the cache.

        No logits of other rows are made where the model's forward takes `logits_to_keep`.
        """
        out = self._run(ids, rows.to(self.device), use_cache=True)
        cache = getattr(out, "past_key_values", None)
        if cache is None:
            name = type(self.model).__name__
            raise AttachError(f"{name} returns no cache: pass a model that decodes from past_key_values")
        logits = out.logits[0]
        return logits if logits.shape[0] == rows.numel() else logits[rows.to(logits.device)], cache

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

    def _run(self, ids: Tensor, keep: int | Tensor, **more: Any) -> Any:
        if "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            more["logits_to_keep"] = keep
        return self.model(ids, **more)
