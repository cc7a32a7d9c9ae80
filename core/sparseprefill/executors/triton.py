"""TritonExecutor: the GPU path. Checks the call, runs the kernels; says why it cannot."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from sparseprefill.call import AttentionCall, uncast
from sparseprefill.errors import UnsupportedCallError
from sparseprefill.kernels.attention import launch as attention
from sparseprefill.kernels.attention import together
from sparseprefill.kernels.family.choose import a_precision, are_records, records
from sparseprefill.kernels.family.known import known
from sparseprefill.kernels.family.record import Family, Wanted
from sparseprefill.kernels.settings import HALVES_ALONE, HEAD_DIMS
from sparseprefill.parts.workspace import default_workspace
from sparseprefill.plan import BOUND, EXACT, Plan, Result, Rounding, SoftmaxState, check_plan
from sparseprefill.validate import fitting, number


@frozen
class TritonExecutor:
    """Tiles, stripes, carry and probes in Triton kernels, on CUDA tensors (or in Triton's interpreter on the CPU).

    float16, bfloat16 and float32; head dimensions 64, 80, 96, 128, 192, 256, 512 (of 16 bits alone), and 192 of
    queries and keys with 128 of values, as MLA has them; mask tiles that are powers of two >= 16.
    Softmax in float32. Honours padding, offsets, window, softcap and sinks, and skips tiles by their logits.

    kernels: the records among which the one that serves a call is chosen (`kernels.family.choose`); the reasons against
    those that come before it stand in `Result.kernels`. By default those of the registry that builds the executor, and
    of the installed plugins where it is built by hand: what is registered later serves executors that are built later.
    precision: "call" for the call's dtype, or one that a registered kernel has, such as "int8" for products in 8 bits
    where they pay (SageAttention2's recipe). What stays in the call's dtype has its reason in `Result.kernels`.
    bound: the error up to which a head is done so: that of sampled query rows beside the same in the call's dtype, as a
    share of their norm; `Result.rounded` has it. A softmax that is left in progress (`accumulate`) is never rounded.
    """

    kernels: tuple[Family, ...] = field(
        factory=known,
        converter=records,
        kw_only=True,
        repr=False,
        validator=fitting("TritonExecutor", are_records, "Family records, such as those of Registry.kernels()"),
    )
    precision: str = field(default=EXACT, kw_only=True, validator=a_precision)
    bound: float = field(default=BOUND, kw_only=True, validator=number(0.0))
    repeats: ClassVar[bool] = True

    @cached_property
    def _reduced(self) -> Wanted:
        return Wanted(precision=self.precision, bound=self.bound)

    def unsupported(self, call: AttentionCall) -> str | None:
        """Reason for which this executor cannot run the call, or None."""
        q, width = call.q, call.value_dim
        if q.device.type != "cuda" and not attention.interpreted():
            return f"q is on {q.device}; move q, k and v to a CUDA device, or use ReferenceExecutor"
        if call.recorded:
            return "gradients are recorded, and its kernels have none; use torch.no_grad(), or ReferenceExecutor"
        if q.dtype == torch.float64:
            return "float64 is not supported; use float16, bfloat16 or float32, or ReferenceExecutor"
        if q.dtype == torch.bfloat16 and q.device.type != "cuda":
            return "Triton's interpreter gets bfloat16 wrong; use float16 or float32 there"
        if (q.shape[-1], width) not in HEAD_DIMS:
            known = ", ".join(str(d) if d == v else f"{d} with {v}" for d, v in sorted(HEAD_DIMS))
            return f"head dimensions {q.shape[-1]} (q, k) and {width} (v); use one of {known}, or ReferenceExecutor"
        if q.dtype == torch.float32 and q.shape[-1] > HALVES_ALONE:
            return f"float32 with head dimension {q.shape[-1]}; use float16 or bfloat16, or ReferenceExecutor"
        return None

    @uncast
    def accumulate(self, call: AttentionCall, plan: Plan) -> SoftmaxState:
        """The carry, if any, resumed over the plan's mask; unnormalised, float32."""
        call = self._checked(call, plan)
        if plan.mask.tiles is None and plan.mask.stripes is None and plan.carry is not None:
            return plan.carry.state
        with torch.cuda.device_of(call.q):
            made = attention.sparse_attention_state(call, plan.mask, self.kernels, _carried(plan), plan.skip_below)
            return SoftmaxState(*made)

    def workspace(self, call: AttentionCall) -> int:
        """A map of tiles, for masks of tiles and stripes; keys and values rounded, a byte for each number."""
        copies = call.geometry.batch * call.kv_heads * call.kv_len * (call.q.shape[3] + call.value_dim)
        return default_workspace(call, per_pair=4) + (0 if self.precision == EXACT else copies)

    @uncast
    def execute(self, call: AttentionCall, plan: Plan) -> Result:
        """Output, LSE, and the tile mass of probed heads."""
        return self._execute(call, plan, None)

    @uncast
    def execute_into(self, call: AttentionCall, plan: Plan, out: Tensor, lse: Tensor) -> Result:
        """Run `execute` into tensors of the caller; without a copy where rows are contiguous."""
        if out.stride(-1) == 1 and lse.stride(-1) == 1:
            return self._execute(call, plan, (out, lse))
        return self._execute(call, plan, None).into(out, lse)

    @uncast
    def execute_many(self, calls: Sequence[AttentionCall], plans: Sequence[Plan]) -> list[Result]:
        """Run `execute` for each call, in order; calls that `together.key` finds alike share a launch.

        So do requests of one step whose keys and values stand in one cache, where their plans are masks alone, of the
        same tiles: no carry, probe or thresholds. Every other call is launched by itself.
        """
        return self._execute_many(calls, plans, ())

    @uncast
    def execute_many_into(
        self, calls: Sequence[AttentionCall], plans: Sequence[Plan], outs: Sequence[Tensor]
    ) -> list[Result]:
        """Run `execute_many` with outputs in tensors of the caller; without a copy where they are rows of one."""
        return self._execute_many(calls, plans, outs)

    def _execute_many(
        self, calls: Sequence[AttentionCall], plans: Sequence[Plan], outs: Sequence[Tensor]
    ) -> list[Result]:
        alike: dict[object, list[int]] = {}
        for i, (call, plan) in enumerate(zip(calls, plans, strict=True)):
            self._checked(call, plan)
            key = together.key(call, plan)
            alone = key is None or not attention.shares(call, plan.mask, self.kernels)
            alike.setdefault(i if alone else key, []).append(i)
        made: dict[int, Result] = {}
        for group in alike.values():
            group.sort(key=lambda i: calls[i].kv_len, reverse=True)  # long work first, so that all end together
            some, into = [calls[i] for i in group], [outs[i] for i in group] if outs else []
            if len(group) == 1:
                found = [self._alone(some[0], plans[group[0]], *into)]
            else:
                found = self._together(some, [plans[i] for i in group], into)
            made.update(zip(group, found, strict=True))
        return [made[i] for i in range(len(calls))]

    def _alone(self, call: AttentionCall, plan: Plan, out: Tensor | None = None) -> Result:
        if out is None:
            return self.execute(call, plan)
        exact = call.q.dtype == torch.float64
        lse = torch.empty(call.q.shape[:3], dtype=torch.float64 if exact else torch.float32, device=call.q.device)
        return self.execute_into(call, plan, out, lse)

    def _together(self, calls: Sequence[AttentionCall], plans: Sequence[Plan], outs: Sequence[Tensor]) -> list[Result]:
        masks, into = [plan.mask for plan in plans], outs if outs and together.alike(outs) else ()
        with torch.cuda.device_of(calls[0].q):
            found, kernel = attention.sparse_attention_together(calls, masks, self.kernels, self._reduced, into)
        made = [Result(*one, plan, kernels=(kernel,)) for one, plan in zip(found, plans, strict=True)]
        if not outs:
            return made
        return [
            evolve(result, out=out if into else out.copy_(result.out)) for result, out in zip(made, outs, strict=True)
        ]

    def _execute(self, call: AttentionCall, plan: Plan, into: tuple[Tensor, Tensor] | None) -> Result:
        call = self._checked(call, plan)
        with torch.cuda.device_of(call.q):
            made = attention.sparse_attention_fwd(
                call, plan.mask, self.kernels, _carried(plan), into, plan.skip_below, self._reduced
            )
            out, lse, kernel, skipped, errors = made
            probe = None if plan.probe is None else attention.tile_mass_fwd(call, plan.mask, lse, plan.probe)
        rounded = None if errors is None else Rounding(self.precision, errors, self.bound)
        return Result(out, lse, plan, probe, kernels=(kernel,), skipped=skipped, rounded=rounded)

    def _checked(self, call: AttentionCall, plan: Plan) -> AttentionCall:
        check_plan(call, plan)
        reason = self.unsupported(call)
        if reason is not None:
            raise UnsupportedCallError([f"TritonExecutor: {reason}"])
        names = ("q", "k", "v") if call.pages is None else ("q",)
        loose = {name: getattr(call, name) for name in names if getattr(call, name).stride(-1) != 1}
        return evolve(call, **{name: x.contiguous() for name, x in loose.items()}) if loose else call


def _carried(plan: Plan) -> SoftmaxState | None:
    return None if plan.carry is None else plan.carry.state
