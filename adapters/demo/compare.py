"""Dense and sparse prefill of one model, side by side: answers, recall, density and time.

Each contender prefills one context once. The clock runs over that forward pass alone; its observer only keeps
references to the layers' calls and results, and recall and density are computed after the clock has stopped. Each
question is then read by the same method, as one more chunk of the prompt, so that what it needs of the text must pass
the method's mask; the answer is decoded with dense attention, as a server does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from attrs import frozen

from sparseprefill.call import AttentionCall
from sparseprefill.errors import SparsePrefillError
from sparseprefill.metrics import recall
from sparseprefill.plan import Result

from ..huggingface import attach
from ..progress import Progress, Steps
from .exam import Exam, greedy, take
from .outcome import Contender, Layer, Outcome

WARM = 1024
ROWS = 64


@frozen
class Comparison:
    """A model with its tokenizer and an exam; runs contenders one after the other.

    layer, head: whose mask an outcome keeps. rows: sampled query rows per layer for the recall.
    """

    model: Any
    tokenizer: Any
    exam: Exam
    layer: int = 0
    head: int = 0
    rows: int = ROWS

    def run(self, contender: Contender, progress: Progress = lambda what, done, of: None) -> Outcome:
        """Prefill, measure, ask. An error of the library, or lack of memory, ends the contender alone."""
        try:
            return self._run(contender, progress)
        except (SparsePrefillError, torch.OutOfMemoryError) as error:
            return Outcome(contender, error=str(error))

    @torch.inference_mode()
    def _run(self, contender: Contender, progress: Progress) -> Outcome:
        ids = torch.tensor([self.tokenizer(self.exam.context)["input_ids"]], device=self.model.device)
        kept: dict[int, tuple[AttentionCall, Result]] = {}
        progress("warm-up", 0, 1)
        recording = True

        def observe(call: AttentionCall, result: Result) -> None:
            if recording:
                kept[call.layer] = call, result

        with self._attached(contender, observe) as handle:
            self._prefill(ids if ids.is_cuda else ids[:, :WARM])
            kept.clear()
            with _counted(self.model, lambda done, of: progress("prefill", done, of)):
                seconds, cache = self._prefill(ids)
            recording = False
            reasons = {} if handle is None else _reasons(handle)
            families = self._ask(cache, progress)
        layers = []
        for index in range(self.model.config.num_hidden_layers):
            progress("recall", index, self.model.config.num_hidden_layers)
            layers.append(self._layer(index, kept.get(index), reasons))
        picked = kept.get(self.layer)
        mask = None if picked is None else picked[1].mask.head(0, self.head)
        return Outcome(contender, ids.shape[1], families, seconds, tuple(layers), mask)

    def _attached(
        self, contender: Contender, observe: Callable[[AttentionCall, Result], None]
    ) -> AbstractContextManager[Any]:
        if contender.pipeline is None:
            return nullcontext()
        handle: AbstractContextManager[Any] = attach(self.model, contender.pipeline, observe=observe, gate=None)
        return handle

    def _prefill(self, ids: torch.Tensor) -> tuple[float, Any]:
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        _wait(ids)
        began = time.perf_counter()
        self.model(ids, past_key_values=cache, logits_to_keep=1)
        _wait(ids)
        return time.perf_counter() - began, cache

    def _layer(self, index: int, seen: tuple[AttentionCall, Result] | None, reasons: Mapping[int, str]) -> Layer:
        if seen is None:
            heads = self.model.config.num_attention_heads
            return Layer(index, 1.0, (1.0,) * heads, reasons.get(index, ""))
        by_head = recall(*seen, rows=self.rows)[0].double().nanmean(-1)
        return Layer(index, seen[1].density, tuple(by_head.tolist()))

    def _ask(self, cache: Any, progress: Progress) -> dict[str, tuple[int, int]]:
        done = 0

        def answer(question: str, expected: str) -> str:
            nonlocal done
            progress("questions", done, self.exam.questions)
            done += 1
            prompt, draft = (
                self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (question, expected)
            )
            found: str = self.tokenizer.decode(greedy(self.model, cache, prompt, draft))
            return found

        with _one_thread(self.model):
            answers = take(self.exam, answer)
        progress("questions", done, self.exam.questions)
        return answers


@contextmanager
def _counted(model: Any, progress: Steps) -> Iterator[None]:
    """Tells how many of the model's layers have run."""
    layers = model.get_decoder().layers
    progress(0, len(layers))
    hooks = [
        layer.register_forward_hook(lambda *_, done=done: progress(done, len(layers)))
        for done, layer in enumerate(layers, start=1)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _one_thread(model: Any) -> Iterator[None]:
    """Decoding on a CPU is many small operations, where more threads cost more than they bring."""
    threads = torch.get_num_threads()
    if model.device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _wait(ids: torch.Tensor) -> None:
    if ids.is_cuda:
        torch.cuda.synchronize(ids.device)


def _reasons(handle: Any) -> dict[int, str]:
    return {layer.layer: "; ".join(layer.reasons) or f"ran as {layer.mode}" for layer in handle.report().layers}
