"""A model's own dense prefill beside sparse ones, prompt by prompt.

For every prompt the model reads once with its own attention, which serves all contenders. A contender then prefills the
same tokens: once watched, for distributions and recall, and as often as asked for the clock (on a CPU the watched one
counts too, less the time of watching). What follows the prompt, a held-back tail of it and dense's greedy continuation,
is read with dense attention behind the sparse prefill's cache, as a server decodes. One cache is alive at a time. Of
the rows only hidden states are kept: logits are made of a few at once, so that all rows can be compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.errors import ParameterError, SparsePrefillError
from sparseprefill.mask.mask import SparseMask
from sparseprefill.metrics import recall, sample_rows
from sparseprefill.plan import Result
from sparseprefill.profiles.table import Progress

from ..huggingface import attach
from ..huggingface.inspection import find_decoder
from .outcome import Contender, Fidelity, Layer, Outcome, Sketch, compare
from .prompts import Prompt
from .reading import Answers, Reader, Rows, Sizes, copied, inside_rows, right_inside

NONFINITE = (
    "its logits, or those of the model's own attention, are NaN, as where 16 bits overflow: pass another dtype, or "
    "leave the method out"
)
WARM = 64
"""Tokens of a prefill in front of the first, which takes then what later ones take."""
Decoding = Callable[[], AbstractContextManager[Any]]
"""Gives a block in which forwards are decoding, as `Handle.decoding` does."""
Ask = Callable[[Any, Progress, Decoding], Answers]
"""Asks about the prompt that a cache holds, and leaves the cache as it was: ``ask(cache, progress, decoding)``."""


def _silent(what: str, done: int, of: int) -> None:
    """Hears of progress and says nothing."""


@define
class LayerWatch:
    """Observer of one forward: recall on sampled rows and on the last ones, density, and masks worth a look.

    rows: sampled evenly. last: at the end of the call. pictured: layer and head whose mask is kept, and with it those
    of the heads that keep least, in `lowest` layers; None for no masks. Batch row 0 only.
    """

    rows: int
    last: int
    pictured: tuple[int, int] | None = None
    lowest: int = 0
    found: dict[int, Layer] = field(factory=dict, init=False)
    mask: Sketch | None = field(default=None, init=False)
    _worst: dict[int, tuple[float, int, SparseMask]] = field(factory=dict, init=False)

    def __call__(self, call: AttentionCall, result: Result) -> None:
        """Take the figures of one layer; waits for the device."""
        q_len = call.q.shape[2]
        last = torch.arange(max(0, q_len - self.last), q_len, device=call.q.device)
        spread = sample_rows(call, self.rows)
        at = torch.cat([spread, last])
        kept = recall(call, result, rows=at)[0].double()  # [H, rows]
        kept = torch.where(
            call.geometry.real_queries()[0, at], kept.nan_to_num(0.0), torch.nan
        )  # an overflow keeps none
        rows = kept[:, : spread.numel()].cpu()
        recalls, ends = _means(rows), _means(kept[:, spread.numel() :])
        least = min(range(len(recalls)), key=lambda head: min(recalls[head], ends[head]))
        self.found[call.layer] = Layer(call.layer, min(1.0, result.density), recalls, ends, rows=rows)
        if self.pictured is None:
            return
        if call.layer == self.pictured[0]:
            self.mask = Sketch.of(result.mask.head(0, self.pictured[1]))
        self._worst[call.layer] = min(recalls[least], ends[least]), least, result.mask.head(0, least)
        if len(self._worst) > self.lowest:
            del self._worst[max(self._worst, key=lambda layer: self._worst[layer][0])]

    def sketch(self) -> None:
        """Put the masks of the heads that keep least into their layers, and let go of what they stood in."""
        for layer, (_, head, mask) in self._worst.items():
            self.found[layer] = evolve(self.found[layer], lowest=(head, Sketch.of(mask)))
        self._worst.clear()


def _means(kept: Tensor) -> tuple[float, ...]:
    return tuple(kept.nanmean(-1).nan_to_num(1.0).tolist())


@frozen(eq=False)
class Comparison:
    """One prompt on one model, read by the model itself; runs contenders one after the other.

    stock: the outcome of that dense pass. rows: all of its rows. tail, greedy: logits of the held-back text and of the
    greedy continuation. continuation: the greedy tokens. peak: bytes that a dense prefill adds on the
    devices, None on a CPU. pictured: layer and head whose mask is kept. ask: asks about the prompt, if there is one.
    """

    reader: Reader
    prompt: Prompt
    sizes: Sizes
    stock: Outcome
    rows: Rows
    tail: Tensor
    greedy: Tensor
    continuation: Tensor
    peak: int | None
    pictured: tuple[int, int] | None = None
    ask: Ask | None = None

    @classmethod
    @torch.inference_mode()
    def of(
        cls,
        model: Any,
        prompt: Prompt,
        sizes: Sizes | None = None,
        *,
        pictured: tuple[int, int] | None = None,
        ask: Ask | None = None,
        progress: Progress = _silent,
    ) -> Comparison:
        """Read the prompt with the model's own attention. ParameterError where it is too short for the sizes."""
        sizes, reader = sizes or Sizes(), Reader(model)
        ids, text = _cut(prompt, sizes, reader)
        with counted(model, lambda done, of: progress("dense", done, of)):
            if sizes.beside and reader.on_cpu:
                reader.once(WARM)
            began = time.perf_counter()
            rows, cache = reader.prefill(ids)
            seconds = time.perf_counter() - began
            answers = {} if ask is None else ask(cache, progress, nullcontext)
            tail = reader.follow(cache, text)
            continuation, greedy = reader.decode(cache, tail[-1], sizes.greedy)
            del cache
            seconds, peak = reader.clock(ids, sizes, seconds)
        stock = Outcome(
            Contender("stock"),
            prompt.name,
            ids.shape[1],
            seconds=seconds,
            extra_bytes=None if peak is None else 0,
            layers=_dense_layers(model),
            inside=right_inside(prompt, rows),
            copies=copied(prompt, rows),
            answers=answers,
        )
        read = rows, tail[:-1], greedy, continuation, peak
        return cls(reader, prompt, sizes, stock, *read, pictured, ask)

    @torch.inference_mode()
    def again(self) -> Comparison:
        """The same with the lower time of two stock prefills: on a CPU the first pays for what later ones find done."""
        if not self.reader.on_cpu:
            return self  # a GPU was warm when the clock ran
        ids, _ = _cut(self.prompt, self.sizes, self.reader)
        seconds = min(self.stock.seconds, self.reader.timed(ids)[0])
        return evolve(self, stock=evolve(self.stock, seconds=seconds))

    def run(self, contender: Contender, progress: Progress = _silent, before: float | None = None) -> Outcome:
        """Prefill, compare, ask. An error of the library, or lack of memory, ends the contender alone.

        before: seconds of a stock prefill just now, which then stands beside this one; None to time one right behind.
        """
        if contender.pipeline is None:
            return self.stock
        try:
            return self._run(contender, progress, before)
        except (SparsePrefillError, torch.OutOfMemoryError) as error:
            return Outcome(contender, self.prompt.name, error=str(error).splitlines()[0])

    @torch.inference_mode()
    def _run(self, contender: Contender, progress: Progress, before: float | None) -> Outcome:
        reader, sizes = self.reader, self.sizes
        ids, tail = _cut(self.prompt, sizes, reader)
        watch = LayerWatch(sizes.rows, sizes.last, self.pictured, sizes.lowest)
        watching, spent = True, 0.0

        def observe(call: Any, result: Any) -> None:
            nonlocal spent
            if watching:
                began = time.perf_counter()
                watch(call, result)
                spent += time.perf_counter() - began

        attached = partial(
            attach, reader.model, contender.pipeline, gate=None, tail=contender.dense_tail, recall_every=0
        )
        with attached(observe=observe) as handle:
            with counted(reader.model, lambda done, of: progress("prefill", done, of)):
                began = time.perf_counter()
                rows, cache = reader.prefill(ids)
                seconds = time.perf_counter() - began - spent
            watching = False
            watch.sketch()
            report = handle.report()
            answers = {} if self.ask is None else self.ask(cache, progress, handle.decoding)
        progress("fidelity", 0, 1)
        answered, again = right_inside(self.prompt, rows), copied(self.prompt, rows, self.stock.copies)
        fidelity = self._fidelity(rows, cache, tail)
        del cache, rows
        if fidelity.broken:
            return Outcome(contender, self.prompt.name, error=NONFINITE)
        with attached(verify=False):  # it was verified just now
            progress("clock", 0, 1)
            seconds, peak = reader.clock(ids, sizes, seconds)
        beside = None
        if sizes.beside:
            beside = reader.timed(ids)[0] if before is None else before
        return Outcome(
            contender,
            self.prompt.name,
            ids.shape[1],
            fidelity,
            seconds,
            None if peak is None or self.peak is None else peak - self.peak,
            _layers(watch, report, self.stock.layers),
            answered,
            again,
            answers,
            watch.mask,
            dict(report.notes),
            beside=beside,
        )

    def _fidelity(self, rows: Rows, cache: Any, tail: Tensor) -> Fidelity:
        ids = torch.tensor(self.prompt.ids, dtype=torch.int64, device="cpu")
        end = len(self.prompt.ids) - tail.shape[1]
        inside, last = slice(0, inside_rows(end), self.sizes.every), slice(end - self.sizes.last, end)
        follows = self.reader.follow(cache, tail)
        _, chosen = self.reader.decode(cache, follows[-1], self.sizes.greedy, self.continuation)
        parted = (chosen.argmax(-1).cpu() != self.continuation.cpu()).nonzero()
        return Fidelity(
            compare(self.rows.part(inside), rows.part(inside), ids[1:][inside]),
            compare(self.rows.part(last), rows.part(last), ids[1:][last]),
            compare(self.tail, follows[:-1], ids[end + 1 :]),
            compare(self.greedy, chosen),
            int(parted[0]) if parted.numel() else None,
        )


class Listener(Protocol):
    """Hears which contender is at work."""

    def contender(self, name: str) -> AbstractContextManager[Progress]:
        """For the time of one contender on one prompt; gives what to call on each step."""
        ...


def outcomes(
    model: Any,
    prompts: Sequence[Prompt],
    contenders: Sequence[Contender],
    sizes: Sizes,
    listener: Listener,
    pictured: tuple[int, int] | None = None,
    ask: Ask | None = None,
) -> Iterator[Outcome]:
    """The stock model and every contender on each prompt, in this order; each is given as soon as it is there.

    Whoever stops listening keeps what came so far. pictured: layer and head whose masks are kept, of the first prompt.
    ask: asks about each prompt.
    """
    for index, prompt in enumerate(prompts):
        where = f", prompt {index + 1} of {len(prompts)}" if len(prompts) > 1 else ""
        with listener.contender(f"dense{where}") as progress:
            kept = None if index else pictured
            one = Comparison.of(model, prompt, sizes, pictured=kept, ask=ask, progress=progress)
        yield one.stock
        before = one.stock.seconds if len(contenders) > 1 else None  # of two, which show whether they are steady
        for contender in contenders:
            with listener.contender(f"{contender.label}{where}") as progress:
                outcome = one.run(contender, progress, before)
            before = outcome.beside if before is None else None  # one stock prefill serves those right around it
            yield outcome


def check_length(prompt: Prompt, sizes: Sizes) -> None:
    """ParameterError where a prompt is too short for the sizes."""
    least = sizes.last + sizes.tail
    if len(prompt.ids) < least + 1:
        raise ParameterError(
            f"the prompt {prompt.name!r} has {len(prompt.ids)} tokens: pass one of more than {least}, of which "
            f"{sizes.tail} are held back and {sizes.last} are compared"
        )


def _cut(prompt: Prompt, sizes: Sizes, reader: Reader) -> tuple[Tensor, Tensor]:
    check_length(prompt, sizes)
    ids = torch.tensor([prompt.ids], dtype=torch.int64, device=reader.device)
    return ids[:, : -sizes.tail], ids[:, -sizes.tail :]


def _dense_layers(model: Any) -> tuple[Layer, ...]:
    config = model.config.get_text_config()
    heads = (1.0,) * int(config.num_attention_heads)
    return tuple(Layer(index, 1.0, heads, heads) for index in range(int(config.num_hidden_layers)))


def _layers(watch: LayerWatch, report: Any, stock: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """The layers that ran sparse, and those of the report that did not, with the reason."""
    heads = stock[0].recalls if stock else (1.0,)
    made = dict(watch.found)
    for layer in report.layers:
        if layer.layer not in made:
            reason = "; ".join(layer.reasons) or f"ran as {layer.mode}"
            made[layer.layer] = Layer(layer.layer, 1.0, heads, heads, reason)
    return tuple(made[index] for index in sorted(made))


@contextmanager
def counted(model: Any, progress: Callable[[int, int], None]) -> Iterator[None]:
    """Tells how many of the model's layers have run, prefill after prefill."""
    parts = [one for one in find_decoder(model).children() if isinstance(one, torch.nn.ModuleList)]
    layers = max(parts, key=len, default=torch.nn.ModuleList())
    progress(0, max(1, len(layers)))
    with ExitStack() as hooks:
        for done, layer in enumerate(layers, start=1):
            hooks.enter_context(layer.register_forward_hook(lambda *_, done=done: progress(done, len(layers))))
        yield
