"""The law of recordings: what is repeated is what runs plainly (`kernels.recording`)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from importlib.util import find_spec
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from sparseprefill import kernels
from sparseprefill.call import AttentionCall
from sparseprefill.mask.content import content
from sparseprefill.memory import Memory
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Plan
from sparseprefill.stages import ALL_ROWS, REACH
from sparseprefill.testing.trial import BreachError, NotApplicableError, Trial, require


def repeated_is_plain(trial: Trial) -> None:
    """A recording of a call, repeated for other tensors, another layer and, where nobody asks for it, a longer prompt,
    gives what the pipeline gives there itself, bit by bit.

    The whole call where kernels serve; elsewhere, where executors read values, at least its plan, if that reads none.
    """
    pipeline, call = trial.pipeline, trial.call
    if pipeline.asked is None:
        raise NotApplicableError(
            "the executor, or what comes after it, does not say that it repeats: nothing is recorded"
        )
    if find_spec("triton") is None:
        raise NotApplicableError("nothing is recorded without Triton")
    if not pipeline.whole(call):
        raise NotApplicableError("the call runs in parts, which nobody records")
    least = call.kv_len + REACH + (0 if pipeline.tail >= ALL_ROWS else pipeline.tail)
    near, far = (evolve(call, prompt_lengths=least + more) for more in (0, 1 << 20))
    pairs = [(call, call)] if isinstance(call.prompt_lengths, Tensor) or pipeline.repeats is not True else [
        (call, call), (near, far)
    ]  # fmt: skip
    for recorded, repeated in pairs:
        _repeats(pipeline, recorded, evolve(repeated, layer=call.layer + 3))


def _repeats(pipeline: Pipeline, recorded: AttentionCall, repeated: AttentionCall) -> None:
    """One call recorded, and what that gives for the tensors of another one, which come to be its own, changed."""
    from sparseprefill.kernels.recording import record

    reasons = list[str]()
    for what, work in {"the call": _whole, "its plan": _planned}.items():
        memory, room = Memory(), 1 << 40
        first, slots = _with_slots(recorded, lambda x: x)
        begun, key, tensors = _begun(pipeline, first, memory)
        _, step = record(lambda: work(pipeline, first, memory, slots[0], begun), [*slots, *tensors], room)  # noqa: B023 - at once
        if isinstance(step, str):
            if kernels.serve_device(recorded.q.device) and not step.startswith("the kernel "):
                raise BreachError(f"a stage says that it repeats, but {what} cannot be recorded: {step}")
            reasons.append(f"{what}: {step}")
            continue
        second, wanted = _with_slots(repeated, _changed)
        third, found = _with_slots(repeated, _changed)
        begun, other, tensors = _begun(pipeline, third, memory)
        if other != key or not step.slots.fit([*found, *tensors]):
            raise NotApplicableError("the plans of the stages that are asked differ in more than their tensors' values")
        actual = step.run([*found, *tensors], repeated.layer)
        expected = work(pipeline, second, memory, wanted[0], _begun(pipeline, second, memory)[0])
        for i, (one, other) in enumerate(zip([*wanted, *expected], [*found, *actual], strict=True)):
            alike = (one == other) | (one.isnan() & other.isnan())
            name = "the output" if i == 0 else "an input" if i < len(wanted) else "what comes with the output"
            require(
                alike,
                f"{what}, recorded in layer {recorded.layer} and repeated for other tensors in layer {repeated.layer} "
                f"of a prompt of {_prompt(repeated)} tokens where it had {_prompt(recorded)}: {int((~alike).sum())} "
                f"numbers of {name} differ from what the stages give there themselves",
            )
        return
    raise NotApplicableError(f"nothing can be recorded here; {'; '.join(reasons)}: pass device='cuda'")


def _begun(pipeline: Pipeline, call: AttentionCall, memory: Memory) -> tuple[Plan | None, Hashable, list[Tensor]]:
    """The plan of the stages that do not repeat, as a host asks them: itself, all of it but its tensors, and those."""
    if not pipeline.asked:
        return None, None, []
    plan = pipeline.ask(call, memory)
    told = content(plan, call.geometry)
    if told is None:
        raise NotApplicableError("a stage does not say that it repeats, and makes its plan when it is read")
    return plan, *told


def _prompt(call: AttentionCall) -> str:
    return "any number of" if call.prompt_lengths is None else str(call.prompt_lengths)


def _whole(pipeline: Pipeline, call: AttentionCall, memory: Memory, out: Tensor, begun: Plan | None) -> list[Tensor]:
    """LSE, and the pairs that were computed and skipped; the output is in its place."""
    result = pipeline.run_into(call, memory, out, begun)
    counts = [one.pairs() for one in result.plan.computed()] if result.parts is None else [result.parts.pairs]
    return [result.lse, *counts, *([] if result.skipped is None else [result.skipped.pairs])]


def _planned(pipeline: Pipeline, call: AttentionCall, memory: Memory, _: Tensor, begun: Plan | None) -> list[Tensor]:
    return [mask.to_dense() for mask in pipeline.plan(call, memory, begun).computed()]


def _with_slots(call: AttentionCall, change: Callable[[Tensor], Tensor]) -> tuple[AttentionCall, list[Tensor]]:
    """The call with copies of its tensors, changed, and those with room for an output ahead of them."""
    names = ("q", "k", "v") if call.sinks is None else ("q", "k", "v", "sinks")
    mine: dict[str, Any] = {name: torch.empty_like(x := getattr(call, name)).copy_(change(x)) for name in names}
    out = call.q.new_zeros(*call.q.shape[:3], call.value_dim)
    return evolve(call, **mine), [out, *mine.values()]


def _changed(x: Tensor) -> Tensor:
    return x.flip(-1) * -1.5 if x.dim() == 1 else (x.flip(2) * -1.5).roll(1, 1)
