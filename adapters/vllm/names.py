"""The request of a batch's row. vLLM's metadata do not say; its model runner, which makes them, knows.

vLLM hands a metadata builder no reference to the runner, but the runner (or a part of it) is what makes the builder, so
it stands among the callers then. Asked at each step is what it keeps of its requests, by their ids:

- runner V1 (``vllm/v1/worker/gpu_model_runner.py``): rows are those of ``input_batch``, in its order, and ``requests``
  has their sampling parameters;
- runner V2 (``vllm/v1/worker/gpu/model_runner.py``): metadata have each row's slot, ``req_idx``, and ``req_states``
  whose slot it is. A slot by itself names nobody: a request that comes gets the slot of the one that has just gone.
  Metadata of hybrid models have no slots, nor has vLLM 0.29: their rows are those of the ``input_batch`` that its
  ``model_state`` makes them of. That is also told of each request that comes, with its sampling parameters, which
  nobody keeps: `Sight` listens to both.

Where none of this is found, as on a later vLLM that is made otherwise, rows have no name, and what they ask for is
`Unknown`. Never a wrong one.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from traceback import walk_stack
from typing import Any

from attrs import define, field, frozen

from ..serving.wishes import SWITCH, Unknown, wish

SLOTS = "req_idx"
"""The field of vLLM's metadata that holds each row's slot, with runner V2."""
UNKNOWN = "this vLLM's model runner is unknown"
DEAF = (
    "this vLLM's model runner V2 does not tell its model_state of requests and rows; VLLM_USE_V2_MODEL_RUNNER=0 does "
    "without"
)
HALVES = "model runner V1 cuts batches in two (--enable-dbo), and does not say which request a row belongs to"
UNNAMED = "vLLM does not say which request it belongs to, so what it asks for is unknown"
SILENT = "vLLM does not say what the request asks for"


@frozen
class Asked:
    """A request's wish: under ``sparseprefill`` in its extra arguments (None for nothing, Unknown where nobody tells),
    and whether for the log probabilities of its prompt, or for anything else of all its tokens."""

    wish: object
    every_row: bool = True

    @classmethod
    def of(cls, request: object) -> Asked:
        """The wish in vLLM's record of a request. One of a pooling model has no sampling parameters."""
        try:
            params: Any = request.sampling_params  # type: ignore[attr-defined]
            if params is None:
                return cls(None)
            return cls(wish(params.extra_args), getattr(params, "prompt_logprobs", 0) is not None)
        except AttributeError:
            return cls(Unknown(SILENT))


@define(eq=False)
class Sight:
    """Runner V2's messages to its model's state: the requests that come, and the rows of a batch.

    wishes: what the request in a slot asks for, with its id. rows: ids of the rows whose metadata are being made; None
    while none are.
    """

    wishes: dict[int, tuple[str, Asked]] = field(factory=dict, init=False)
    rows: list[str] | None = field(default=None, init=False)

    @classmethod
    def of(cls, state: Any) -> Sight | None:
        """Listen to a model's state from now on; None where there is no such state."""
        known = getattr(state, SWITCH, None)
        if isinstance(known, cls):
            return known
        coming, making = (getattr(state, name, None) for name in ("add_request", "prepare_attn"))
        if coming is None or making is None:
            return None
        sight = state.sparseprefill = cls()

        @functools.wraps(coming)
        def add_request(req_index: int, new_req_data: Any, *args: Any, **kwargs: Any) -> Any:
            sight.wishes[req_index] = new_req_data.req_id, Asked.of(new_req_data)
            return coming(req_index, new_req_data, *args, **kwargs)

        @functools.wraps(making)
        def prepare_attn(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
            sight.rows = _rows(input_batch)
            try:
                return making(input_batch, *args, **kwargs)
            finally:
                sight.rows = None

        state.add_request, state.prepare_attn = add_request, prepare_attn
        return sight

    def asked(self, slot: int | None, name: str) -> Asked:
        """The wish of the request with this id. slot: where it stands."""
        whose, found = self.wishes.get(-1 if slot is None else slot, (None, Asked(None)))
        return found if whose == name else Asked(Unknown(SILENT))


@frozen(eq=False)
class Names:
    """The requests of one model runner, which is not kept alive."""

    _runner: Callable[[], Any]
    _sight: Sight | None = None

    @classmethod
    def of_caller(cls) -> Names:
        """The requests of the runner on whose behalf this is called; no names where there is no such runner."""
        for frame, _ in walk_stack(sys._getframe(1)):
            owner = frame.f_locals.get("self")
            if hasattr(owner, "execute_model") and (hasattr(owner, "req_states") or hasattr(owner, "input_batch")):
                v2 = hasattr(owner, "req_states")
                return cls(weakref.ref(owner), Sight.of(getattr(owner, "model_state", None)) if v2 else None)
        return cls.of_nobody()

    @classmethod
    def of_nobody(cls) -> Names:
        """No runner, no names."""
        return cls(lambda: None)

    @property
    def runner(self) -> Any:
        """vLLM's model runner; None where there is none."""
        return self._runner()

    def objection(self) -> str | None:
        """Reason for which nobody will know what requests ask for, or None."""
        runner = self._runner()
        if runner is None:
            return UNKNOWN
        if hasattr(runner, "req_states"):
            return DEAF if self._sight is None else None
        if not hasattr(runner, "requests") or not hasattr(runner.input_batch, "req_ids"):
            return UNKNOWN
        return HALVES if _halves(runner) else None

    def of(self, common: Any, count: int) -> list[str | None]:
        """The requests' ids of the first `count` rows of a batch; None for a row that has no name."""
        runner, slots = self._runner(), getattr(common, SLOTS, None)
        found: list[str | None] = []
        if hasattr(runner, "req_states"):
            if slots is not None:
                found = list(map(runner.req_states.index_to_req_id.get, slots[:count].tolist()))
            elif self._sight is not None:
                found = list((self._sight.rows or [])[:count])
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

    def asked(self, name: str | None) -> object:
        """The wish of a request under ``sparseprefill`` in its extra arguments: None for nothing, Unknown where nobody
        tells."""
        return self._asked(name).wish

    def ends_alone(self, name: str | None) -> bool:
        """True if of a request's prompt vLLM reads the model's output for the last token alone."""
        return not self._asked(name).every_row

    def _asked(self, name: str | None) -> Asked:
        runner = self._runner()
        if runner is None or name is None:
            return Asked(Unknown(UNNAMED))
        if hasattr(runner, "req_states"):
            slot = runner.req_states.req_id_to_index.get(name)
            return Asked(Unknown(SILENT)) if self._sight is None else self._sight.asked(slot, name)
        return Asked.of(runner.requests.get(name))

    def alive(self, name: str) -> bool:
        """True if the runner still has a request of this id, running or waiting for its next chunk."""
        runner = self._runner()
        if hasattr(runner, "req_states"):
            return name in runner.req_states.req_id_to_index
        return runner is not None and name in runner.requests


def _rows(batch: Any) -> list[str] | None:
    """Ids of a batch's rows; None where requests have other numbers of rows than one."""
    found = getattr(batch, "req_ids", None)
    return found if found is not None and len(found) == getattr(batch, "num_reqs", None) else None


def drafting() -> bool:
    """True if this is called while a speculator loads its draft model, whose layers are not those of the served one."""
    owners = (frame.f_locals.get("self") for frame, _ in walk_stack(sys._getframe(1)))
    return any(hasattr(owner, "propose") and hasattr(owner, "load_model") for owner in owners)


def _halves(runner: Any) -> bool:
    return bool(getattr(getattr(runner, "parallel_config", None), "use_ubatching", False))
