"""Which request a row of a batch is. vLLM's metadata do not say; its model runner, which makes them, knows.

vLLM hands a metadata builder no reference to the runner, but the runner (or a part of it) is what makes the builder, so
it stands among the callers then. Asked at each step is what it keeps of its requests, by their ids:

- runner V1 (``vllm/v1/worker/gpu_model_runner.py``): rows are those of ``input_batch``, in its order;
- runner V2 (``vllm/v1/worker/gpu/model_runner.py``): metadata have each row's slot, ``req_idx``, and ``req_states``
  whose slot it is. A slot by itself names nobody: a request that comes gets the slot of the one that has just gone.
  vLLM 0.29 has no ``req_idx``, and no version has it in what a speculator builds for its drafts.

Where none of this is found, as on a later vLLM that is made otherwise, rows have no name. Never a wrong one.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from attrs import frozen

SLOTS = "req_idx"
"""The field of vLLM's metadata that holds each row's slot, with runner V2."""
SWITCH = "sparseprefill"
"""The extra argument (``vllm_xargs``) by which a request asks for a profile."""
UNKNOWN = "this vLLM's model runner is unknown"
SLOTLESS = "this vLLM's model runner V2 does not say which request a row belongs to (VLLM_USE_V2_MODEL_RUNNER=0 does)"
HALVES = "model runner V1 cuts batches in two, and does not say which request a row belongs to"


@frozen(eq=False)
class Names:
    """The requests of one model runner, which is not kept alive."""

    _runner: Callable[[], Any]

    @classmethod
    def of_caller(cls) -> Names:
        """Those of the runner on whose behalf this is called; of none where there is no such runner."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            owner = frame.f_locals.get("self")
            if hasattr(owner, "execute_model") and (hasattr(owner, "req_states") or hasattr(owner, "input_batch")):
                return cls(weakref.ref(owner))
            frame = frame.f_back
        return cls.of_nobody()

    @classmethod
    def of_nobody(cls) -> Names:
        """No runner, no names."""
        return cls(_nobody)

    def objection(self, fields: set[str]) -> str | None:
        """Why rows will have no names, or None. fields: those that this vLLM's metadata have."""
        runner = self._runner()
        if runner is None:
            return UNKNOWN
        if hasattr(runner, "req_states"):
            return None if SLOTS in fields else SLOTLESS
        return HALVES if _halves(runner) else None

    def of(self, common: Any, count: int) -> list[str | None]:
        """The requests' ids of the first `count` rows of a batch; None for a row that has no name."""
        runner, slots = self._runner(), getattr(common, SLOTS, None)
        found: list[str | None] = []
        if hasattr(runner, "req_states"):
            if slots is not None:
                found = list(map(runner.req_states.index_to_req_id.get, slots[:count].tolist()))
        elif runner is not None and not _halves(runner):
            found = list(runner.input_batch.req_ids[:count])
        return found + [None] * (count - len(found))

    def prompt(self, name: str | None) -> int | None:
        """Tokens of the prompt of a request, those that it generated before it was preempted left out; None where the
        runner does not tell."""
        runner = self._runner()
        if name is None or runner is None:
            return None
        if hasattr(runner, "req_states"):
            states = runner.req_states
            lengths, slot = getattr(states, "prompt_len", None), states.req_id_to_index.get(name)
            lengths = getattr(lengths, "np", lengths)  # one with a copy on the device, or a plain array
            found = None if lengths is None or slot is None else lengths[slot]
        else:
            found = getattr(runner.requests.get(name), "num_prompt_tokens", None)
        return None if found is None or int(found) < 1 else int(found)

    def asked(self, names: Iterable[str]) -> dict[str, object]:
        """What requests ask for under ``sparseprefill`` in their extra arguments, by id; None for nothing.

        Runner V1 keeps a request's sampling parameters. Runner V2 gets them with its first chunk, in what the scheduler
        has for this step: the others are left out.
        """
        runner = self._runner()
        if runner is None:
            return {}
        if hasattr(runner, "req_states"):
            new = getattr(_scheduled(runner), "scheduled_new_reqs", None) or ()
            found = {one.req_id: one.sampling_params for one in new}
        else:
            found = {name: getattr(runner.requests.get(name), "sampling_params", None) for name in names}
        return {name: (getattr(found[name], "extra_args", None) or {}).get(SWITCH) for name in names if name in found}

    def alive(self, name: str) -> bool:
        """Whether the runner still has a request of this id, running or waiting for its next chunk."""
        runner = self._runner()
        if hasattr(runner, "req_states"):
            return name in runner.req_states.req_id_to_index
        return runner is not None and name in runner.requests


def drafting() -> bool:
    """Whether this is called while a speculator loads its draft model, whose layers are not those of the served one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if hasattr(owner, "propose") and hasattr(owner, "load_model"):
            return True
        frame = frame.f_back
    return False


def _scheduled(runner: Any) -> Any:
    """What the scheduler gave the runner for the step in which this is called; None where it stands nowhere."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "execute_model" and frame.f_locals.get("self") is runner:
            return frame.f_locals.get("scheduler_output")
        frame = frame.f_back
    return None


def _halves(runner: Any) -> bool:
    return bool(getattr(getattr(runner, "parallel_config", None), "use_ubatching", False))


def _nobody() -> None:
    return None
