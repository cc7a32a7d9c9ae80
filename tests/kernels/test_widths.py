"""Stripes of one key and of more: every executor, and what is made of such masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from sparseprefill.plugins.star_attention import StarConfig
from sparseprefill.plugins.star_attention.stages import StarEstimator

from kernels.device import BOUNDS, CUDA, DEVICE
from kernels.requests import mask_of, step_of
from sparseprefill import (
    AttentionCall,
    Memory,
    Pipeline,
    Plan,
    ReferenceExecutor,
    Result,
    SparseMask,
    output_error,
)
from sparseprefill.executors.cpu import CpuExecutor
from sparseprefill.executors.triton import TritonExecutor
from sparseprefill.kernels.attention import together
from sparseprefill.kernels.family.choose import variant
from sparseprefill.kernels.family.record import Wanted
from sparseprefill.mask.lists import IndexLists
from sparseprefill.parts.split import Part, Recorder
from sparseprefill.refiners.rescue import over_group
from sparseprefill.testing import attention, tensors

# numpy, which the interpreter computes with, warns of the infinities that a softmax lives with
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
EXECUTORS = (ReferenceExecutor(), TritonExecutor(), *(() if CUDA else (CpuExecutor(),)))
WIDTHS = (1, 2, 16, 32)
TILE = (32, 32)
CALL = AttentionCall(*(torch.zeros(1, heads, 100, 8) for heads in (4, 2, 2)))


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


FEATURES: dict[str, Any] = {
    "plain": lambda length: {},
    "padded": lambda length: {"starts": int32(0, length // 3), "lengths": int32(length - length // 5, length // 2 + 1)},
    "window": lambda length: {"window": length // 2 + 1, "starts": int32(0, length // 4)},
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (127, 127), (128, 128), (129, 129), (61, 131), (1, 97)])
def test_every_executor_matches_float64(q_len: int, kv_len: int, feature: str) -> None:
    """Columns that end behind the last key, that queries see in part, and that padding cuts."""
    of: dict[str, Any] = {"batch": 2, "heads": 2, "kv_heads": 1, "q_len": q_len, "kv_len": kv_len, "head_dim": 64}
    q, k, v = tensors("random", seed=kv_len, device=DEVICE, **of)
    call = AttentionCall(q, k, v, **FEATURES[feature](kv_len))
    kinds = ("stripes", "both") if q_len < 100 else (("stripes", "both")[len(feature) % 2],)
    for kind in kinds:
        for width in WIDTHS if q_len < 100 else (16, 32):
            mask = mask_of(call, kind, TILE, width=width)
            out, lse = attention(call, mask.to_dense())
            for executor in EXECUTORS:
                result = executor.execute(call, Plan(mask))
                assert torch.equal(lse == -torch.inf, result.lse == -torch.inf)
                if float(out.norm()) > 0:
                    assert output_error(result.out, out) <= BOUNDS[torch.float32]


def columns(call: AttentionCall, width: int, tile: int | tuple[int, int] = TILE) -> SparseMask:
    """Every third column, for groups of two query tiles."""
    keep = torch.arange(call.geometry.tile_columns(width)) % 3 == 0
    return SparseMask.from_stripes(call, keep.view(1, 1, 1, -1), 2, tile, width=width, diagonal=False)


def test_finer_lists_name_no_key_behind_the_last_and_share_what_was_shared() -> None:
    wide = SparseMask.from_stripes(CALL, torch.ones(1, 1, 1, 7, dtype=torch.bool), 2, TILE, width=16, diagonal=False)
    fine = wide.with_stripe_width(1)
    assert fine.stripes is not None
    assert fine.stripes.counts.flatten().tolist() == [100] * 8
    fine.check()
    assert fine is fine.with_stripe_width(1) or torch.equal(fine.to_dense(), fine.with_stripe_width(1).to_dense())
    shared = IndexLists(torch.tensor([[[2, 2]]], dtype=torch.int32), torch.zeros(1, 1, 2, dtype=torch.int64),
                        torch.tensor([0, 6], dtype=torch.int32))  # fmt: skip
    half = shared.split(2, 13)
    assert tuple(x.flatten().tolist() for x in (half.counts, half.indices, half.offsets)) == (
        [3, 3],
        [0, 1, 12, 13],
        [0, 0],
    )


def test_columns_meet_key_tiles_that_they_do_not_fit_into() -> None:
    narrow = SparseMask.from_tiles(CALL, torch.rand(1, 4, 4, 13) < 0.5, (32, 8))
    for other in (narrow, narrow | columns(CALL, 1, (32, 8))):
        union = columns(CALL, 16) | other
        assert (8, 8 if other is narrow else 1) == (union.tile_k, union.stripe_width)
        assert torch.equal(columns(CALL, 16).to_dense() | other.to_dense(), union.to_dense())


def test_heads_of_a_group_are_united_by_columns() -> None:
    keep = torch.rand(1, 4, 2, 7, generator=torch.Generator().manual_seed(0)) < 0.4
    mask = SparseMask.from_stripes(CALL, keep, 2, TILE, width=16, diagonal=False)
    united = over_group(mask, 2)
    assert united.stripe_width == 16
    expected = mask.to_dense().unflatten(1, (2, 2)).any(2).repeat_interleave(2, dim=1)
    assert torch.equal(expected, united.to_dense())


def test_parts_of_other_widths_are_joined_on_the_finest() -> None:
    recorder, dense = Recorder(CALL.geometry), []
    for number, heads in enumerate(((0, 2), (2, 4))):
        part = Part(heads, (0, 100))
        mask = columns(part.of(CALL), (16, 2)[number])
        call = part.of(CALL)
        recorder.add(part, (mask,), Result(call.q, call.q[..., 0], Plan(mask)))
        dense.append(mask.to_dense())
    whole = recorder.mask()
    assert whole.stripe_width == 2
    assert torch.equal(torch.cat(dense, 1), whole.to_dense())


class Columns:
    """An estimator with columns of 16 keys."""

    head_scope = "head"

    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        del memory
        return Plan(columns(call, 16) | SparseMask.from_rules(call, TILE, band=0))


def test_star_attention_moves_columns_of_an_inner_method() -> None:
    """Blocks of tiles of 8 tokens: columns of 16 keys go as two of 8."""
    plans = []
    for width in (16, 1):
        inner = Columns()
        fine = evolve(Pipeline(inner), refiners=(Narrower(width),))
        plans.append(StarEstimator(StarConfig(block_size=40, tile=8), fine).estimate(CALL, Memory()))
    assert plans[0].mask.stripe_width == 8
    assert torch.equal(plans[1].mask.to_dense(), plans[0].mask.to_dense())


class Narrower:
    """A refiner that only changes the width."""

    head_scope = "head"

    def __init__(self, width: int) -> None:
        self.width = width

    def refine(self, call: AttentionCall, plan: Plan, memory: Memory) -> Plan:
        del call, memory
        return evolve(plan, mask=plan.mask.with_stripe_width(self.width))


def test_kernels_are_compiled_for_a_width_and_launched_with_no_other() -> None:
    wide, narrow = (variant(CALL, columns(CALL, width), Wanted()) for width in (16, 1))
    assert wide != narrow
    call = step_of([(20, 40)])[0]
    alike = [together.key(call, Plan(mask_of(call, "both", TILE, width=width))) for width in (16, 16, 1)]
    assert alike[0] == alike[1] != alike[2]
