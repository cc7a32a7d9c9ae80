"""The attention of a model's layers on one prompt, on its own queries and keys, next to dense attention.

Layers run as hosts run them: the first is asked, as one of a prompt whose sizes are new, and those behind it repeat
what it came to where the method can.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from sparseprefill.adapters.calibration.layers import ask
from sparseprefill.adapters.session.options import HostOptions
from sparseprefill.adapters.session.repeat import Repeat
from sparseprefill.adapters.session.session import Prefill, Session
from torch import Tensor

from lab.bench.baseline import baseline
from lab.bench.clock import Clock
from lab.bench.dense import Baseline
from lab.bench.measure import memories, plan_only
from sparseprefill.call import AttentionCall
from sparseprefill.errors import ParameterError
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Result
from sparseprefill.registry import default_registry
from sparseprefill.route import Route, gated

_MORE = {"window": "a sliding window", "softcap": "a softcap", "sinks": "attention sinks"}


@frozen
class LayersTime:
    """Seconds of the attention of all layers that methods serve, in one prefill.

    seconds: of the sparse calls. estimate: until the masks are there, where each layer is asked. dense: of the dense
    kernel `baseline`, beside them in the same run.
    """

    seconds: float
    estimate: float
    dense: float
    baseline: str

    @property
    def speedup(self) -> float:
        """Dense time over time."""
        return self.dense / self.seconds


@frozen(eq=False)
class Layers:
    """The attention calls of one prefill, of all layers that methods serve, and dense attention for each.

    Layers with a sliding window are not among them: every key of theirs is computed anyway.
    """

    calls: tuple[AttentionCall, ...]
    dense: tuple[Baseline, ...]

    @classmethod
    def of(cls, model: Any, ids: Tensor) -> Layers:
        """The calls of a prefill of the prompt ``[1, n]``.

        Raises AttachError, or another of the library's errors, for a model that no method can be attached to, and
        ParameterError for one whose layers compute something other than causal attention: no dense kernel here does.
        """
        calls = tuple(layer_calls(model, ids))
        if not calls:
            raise ParameterError("no layer of this model runs through a method: every one has a sliding window")
        for call in calls:
            for name, what in _MORE.items():
                if getattr(call, name) is not None:
                    raise ParameterError(
                        f"layer {call.layer} has {what}: dense kernels are only timed with plain causal attention"
                    )
        # Dense attention takes layers of one shape equally long: inputs of one stand for all, which saves their copies.
        made: dict[Any, Baseline] = {}
        for call in calls:
            if _shape(call) not in made:
                made[_shape(call)] = baseline(call, [call.kv_len])
        return cls(calls, tuple(made[_shape(call)] for call in calls))

    def time(self, pipeline: Pipeline | Route, clock: Clock) -> LayersTime:
        """Time a pipeline on all layers, one after the other as in a prefill; its own errors pass through."""
        plain = gated(pipeline, None)
        before = memories(plain, self.calls)
        out = torch.empty_like(self.calls[0].q.transpose(1, 2), memory_format=torch.contiguous_format)
        seconds, dense = clock.beside(lambda: self._run(plain, out), lambda: [one.run() for one in self.dense])

        def plan() -> None:
            for call, memory in zip(self.calls, before, strict=True):
                plan_only(plain, call, memory)

        estimate = clock.median(plan)
        return LayersTime(seconds, estimate, dense, self.dense[0].kernel)

    def _run(self, pipeline: Pipeline | Route, rows: Tensor) -> None:
        """rows: ``[B, Nq, Hq, D]``, a host's tensor for the output of the layers that fit it."""
        session, prefill = Session(pipeline, HostOptions(strict=True, tail=0, recall_every=0)), Prefill()
        repeat: Repeat | None = None
        with torch.cuda.device_of(rows):
            for call in self.calls:
                out = rows if call.q.transpose(1, 2).shape == rows.shape else torch.empty_like(call.q.transpose(1, 2))
                slots = (*call.tensors, out)
                if repeat is not None and repeat.fits(slots):
                    repeat.run(call.layer, slots)
                else:
                    repeat = ask(session, call, prefill, out.transpose(1, 2), slots)


def _shape(call: AttentionCall) -> tuple[Any, ...]:
    return (*call.q.shape, *call.k.shape, call.softmax_scale)


@torch.inference_mode()
def layer_calls(model: Any, ids: Tensor) -> list[AttentionCall]:
    """The calls of every layer in a prefill of the prompt ``[1, n]`` with every key; errors as of `attach`, strict."""
    from sparseprefill.adapters.huggingface import attach

    calls: dict[int, AttentionCall] = {}

    def observe(call: AttentionCall, result: Result) -> None:
        calls[call.layer] = call

    with attach(
        model, default_registry().build("dense"), strict=True, verify=False, observe=observe, gate=None, recall_every=0
    ):
        model(ids, use_cache=False, logits_to_keep=1)
    return [call for _, call in sorted(calls.items())]


def check_plain(call: AttentionCall) -> None:
    """ParameterError for a call that is not plainly causal."""
    if call.window is not None or call.sinks is not None or call.softcap is not None or call.starts is not None:
        raise ParameterError(
            f"layer {call.layer} has a window, sinks, a softcap or padding, and only plain ones are counted: pass a "
            "model without them, or leave that layer out"
        )
