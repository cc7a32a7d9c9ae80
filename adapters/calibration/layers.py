"""Layers of a step as hosts run them: the first is asked, and those behind it repeat what it came to where that can be.

They share one layer's tensors: what a host computes does not follow from which they are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from attrs import evolve
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.errors import UnsupportedCallError
from sparseprefill.pipeline import Pipeline

from ..session.options import HostOptions
from ..session.repeat import Repeat
from ..session.session import Fallback, Prefill, Session

Slots = tuple[Tensor, ...]


def ask(session: Session, call: AttentionCall, prefill: Prefill, out: Tensor, slots: Slots = ()) -> Repeat | None:
    """Have a session compute a layer's call into `out`; what does the same for other layers, None where nothing can.

    slots: see `Session.run_many`. Raises whatever the call fails by, UnsupportedCallError where it would run dense.
    """
    repeats: list[Repeat] = []
    (found,) = session.run_many([(call, prefill, None)], [out], slots, repeats)
    if isinstance(found, Exception):
        raise found
    if isinstance(found, Fallback):
        raise UnsupportedCallError([found.reason])
    return repeats[0] if repeats else None


def layers_of(call: AttentionCall, pipeline: Pipeline) -> Callable[[int], None]:
    """A function that runs a step of so many layers, each of which has the call's tensors. Each step is a new prompt's.

    Of a chunk the sizes are known from the step before, as they are to a server, whose chunks are alike; those of a
    whole prompt are new, as most lengths are, so that its first layer is recorded.
    """

    def fresh() -> Session:
        return Session(pipeline, HostOptions(strict=True, tail=0, recall_every=0))

    known = None if call.q.shape[2] == call.kv_len else fresh()
    rows = torch.empty_like(call.q.transpose(1, 2), memory_format=torch.contiguous_format)  # by token, as hosts have it
    out, slots = rows.transpose(1, 2), (*call.tensors, rows)

    def step(count: int) -> None:
        prefill, repeat, session = Prefill(), None, known or fresh()
        with torch.cuda.device_of(call.q):
            for layer in range(count):
                if repeat is None:
                    repeat = ask(session, evolve(call, layer=layer), prefill, out, slots)
                else:
                    repeat.run(layer, slots)

    return step
