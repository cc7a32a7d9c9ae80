"""Running a causal language model over one prompt: prefill, the text that follows, and greedy decoding."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor

from sparseprefill.errors import AttachError
from sparseprefill.validate import flag, whole

from ..huggingface.inspection import find_decoder
from .outcome import Copies, surprises
from .prompts import Prompt, Span

Answers = Mapping[str, tuple[int, int]]
"""Values right and asked, by family of task."""

APART = 160
"""Last rows of a prefill that do not count as inside it: the dense tail serves 128 of them whatever a method keeps."""


def inside_rows(tokens: int) -> int:
    """Number of rows that count as inside a prefill of so many tokens: all but the last `APART`, or all where there are
    no more."""
    return tokens - APART if tokens > APART else tokens


def right_inside(prompt: Prompt, rows: Rows) -> Answers:
    """Answers inside the prompt whose every token is the likeliest, and how many there are, by family."""
    spans = [one for one in prompt.inside if one.last <= len(rows)]
    if not spans:
        return {}
    found: dict[str, tuple[int, int]] = {}
    for one, hits in zip(spans, hits_of(prompt, spans, rows), strict=True):
        right, of = found.get(one.family, (0, 0))
        found[one.family] = right + all(hits), of + 1
    return found


def hits_of(prompt: Prompt, spans: Sequence[Span], rows: Rows) -> list[tuple[bool, ...]]:
    """True for each token of some spans of the prompt that is the likeliest, span by span."""
    if not spans:
        return []
    asked, tokens = _asked(prompt, spans)
    same = rows[asked].argmax(-1).cpu() == tokens
    return [tuple(hits.tolist()) for hits in same.split([one.last - one.first for one in spans])]


def copied(prompt: Prompt, rows: Rows, dense: Copies | None = None) -> Copies | None:
    """A prefill's answers on the tokens of the prompt's restated passages; None where it has none.

    dense: the same of the model's own attention; None where this is it.
    """
    spans = [one for one in prompt.copies if one.last <= len(rows)]
    if not spans:
        return None
    asked, tokens = _asked(prompt, spans)
    logits = rows[asked]
    right = int((logits.argmax(-1).cpu() == tokens).sum())
    surprise = float(surprises(logits, tokens).sum())
    return Copies(right, len(tokens), surprise, right if dense is None else dense.right)


def _asked(prompt: Prompt, spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
    """The rows that predict the tokens of some spans, and these tokens, int64 ``[n]``."""
    rows = torch.cat([torch.arange(one.first - 1, one.last - 1, device="cpu") for one in spans])
    return rows, torch.tensor(prompt.ids, dtype=torch.int64, device="cpu")[rows + 1]


@frozen(kw_only=True)
class Sizes:
    """Amounts that are looked at, in tokens or rows.

    last: last rows of the prefill. tail: text held back from the prompt's end. greedy: tokens of dense's own
    continuation. rows: sampled for the recall. repeats: prefills that are timed; the median counts. every: of so many
    rows inside the prompt one is compared; 1 for all. beside: whether each contender is held against a
    prefill of the stock model right before or behind its own, so that other work on the machine slows both alike.
    lowest: layers of which the mask of the head that keeps least is kept, where masks are pictured.
    """

    last: int = field(default=32, validator=whole(1))
    tail: int = field(default=32, validator=whole(2))
    greedy: int = field(default=64, validator=whole(1))
    rows: int = field(default=64, validator=whole(1))
    repeats: int = field(default=1, validator=whole(1))
    every: int = field(default=1, validator=whole(1))
    beside: bool = field(default=False, validator=flag())
    lowest: int = field(default=4, validator=whole(0))


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
        """The device of token ids, also for a model spread over several devices."""
        found: torch.device = self.model.get_input_embeddings().weight.device
        return self.model.device if found.type == "meta" else found

    @property
    def decoder(self) -> Any:
        """The part of the model in front of its head. AttachError where it has no head of its own."""
        found = find_decoder(self.model)
        if found is self.model:
            name = type(self.model).__name__
            raise AttachError(f"{name} has no language-modelling head: pass a causal language model")
        return found

    def prefill(self, ids: Tensor, cache: Any = None) -> tuple[Rows, Any]:
        """All rows of the prompt ``[1, tokens]``, read behind a cache where there is one, and the cache.

        Only the hidden states of the rows are kept; logits are made of them when they are asked for.
        """
        found: list[Any] = []
        behind = {} if cache is None else {"past_key_values": cache}
        with self.decoder.register_forward_hook(lambda _, given, out: found.append(out)):
            out = self._run(ids, 1, use_cache=True, **behind)
        cache = getattr(out, "past_key_values", None)
        if cache is None:
            name = type(self.model).__name__
            raise AttachError(f"{name} returns no cache: pass a model that decodes from past_key_values")
        return Rows(self, found[-1][0][0], type(found[-1])), cache

    def head(self, hidden: Tensor, kind: Any) -> Tensor:
        """Logits ``[n, vocabulary]`` of hidden states ``[n, width]`` as the model's own forward makes them of what its
        decoder gives, so with whatever scale or cap it has. kind: class of the decoder's output."""
        decoder, given = self.decoder, hidden[None]
        out = (given,) if kind is tuple else kind(last_hidden_state=given)
        own = vars(decoder).get("forward")
        decoder.forward = lambda *_, **__: out
        try:
            ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=self.device)
            logits: Tensor = self._run(ids, 0, use_cache=False).logits[0]
        finally:
            if own is None:
                del decoder.forward
            else:
                decoder.forward = own
        return logits

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
        """True if no part of the model is on a GPU, so that what has returned has run."""
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

    @torch.inference_mode()
    def once(self, tokens: int) -> float:
        """Seconds of a dense prefill of so many random tokens; on a GPU of the second one, since the first compiles."""
        source = torch.Generator("cpu").manual_seed(0)
        most = self.model.config.get_text_config().vocab_size
        ids = torch.randint(0, most, (1, tokens), generator=source, dtype=torch.int64, device="cpu").to(self.device)
        if not self.on_cpu:
            self.timed(ids)
        return self.timed(ids)[0]

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


@frozen(eq=False)
class Rows:
    """Rows of a prefill, of which logits are made a part at a time: ``rows[first:last]``, or ``rows[index]``.

    hidden: states ``[n, width]`` behind the decoder. kind: class of the decoder's output.
    """

    reader: Reader
    hidden: Tensor
    kind: Any

    def __len__(self) -> int:
        """The number of rows."""
        return self.hidden.shape[0]

    def __getitem__(self, rows: slice | Tensor) -> Tensor:
        """Logits ``[n, vocabulary]`` of some rows, in the model's dtype."""
        chosen = self.hidden[rows] if isinstance(rows, slice) else self.hidden[rows.to(self.hidden.device)]
        return self.reader.head(chosen, self.kind)

    def part(self, rows: slice) -> Rows:
        """Some of the rows, still without logits."""
        return Rows(self.reader, self.hidden[rows], self.kind)
