"""What holds of a pipeline with a corrector: its output changes, and nothing else does."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from torch import Tensor

import sparseprefill as sp
from helpers.build import make
from helpers.correctors import Blend
from helpers.examples import few_calls, few_of
from sparseprefill.testing import check_method
from sparseprefill.testing.truth import attention, difference


def same(expected: Tensor, actual: Tensor) -> None:
    message = difference(expected.double(), actual, torch.float32)
    assert message is None, message


@pytest.mark.parametrize(
    "name", few_of(["streaming", "bfla", "vertical-slash", "anchor-attention"], ["anchor-attention"])
)
def test_methods_keep_their_contracts(name: str) -> None:
    """Padding, chunks at the grain, parts by heads, and dense at the full parameters; of the mask all others."""

    def build(full: bool = False) -> sp.Pipeline:
        method = sp.default_registry().get(name)
        return method.pipeline(**{**method.small, **((full and method.full) or {})}).with_corrector(Blend())

    report = check_method(build, calls=few_calls(), full={"full": True})
    assert set(report.cases) >= {"causality", "batch rows independent", "full mask == dense", "no NaN for finite input"}


def test_what_is_given_back_reaches_the_output() -> None:
    call = make(300, heads=4, kv_heads=2)
    same(attention(call)[0], sp.build("streaming", sink=1, window=1).with_corrector(Blend(share=1.0)).run(call).out)


def test_chunks_at_the_grain_change_nothing() -> None:
    pipeline = sp.build("streaming", sink=64, window=64, block=32).with_corrector(Blend())
    call, grain = make(397, heads=4, kv_heads=2), pipeline.grain
    assert grain is not None
    together = pipeline.run(call).out
    for cut in (grain, 3 * grain):
        first = evolve(call, q=call.q[:, :, :cut], k=call.k[:, :, :cut], v=call.v[:, :, :cut])
        second = evolve(call, q=call.q[:, :, cut:])
        same(together, torch.cat([pipeline.run(first).out, pipeline.run(second).out], 2))


def test_recall_says_what_the_mask_kept() -> None:
    call, pipeline = make(300, heads=4, kv_heads=2), sp.build("streaming", sink=16, window=16, block=16)
    alone, result = pipeline.run(call), pipeline.with_corrector(Blend()).run(call)
    assert not torch.equal(alone.out, result.out)
    assert torch.equal(alone.lse, result.lse)
    assert torch.equal(sp.recall(call, alone), sp.recall(call, result))
    assert alone.density == result.density
    assert (alone.corrected, result.corrected) == ("", "Blend")


@pytest.mark.parametrize("name", ["streaming", "vertical-slash", "anchor-attention"])
def test_parts_are_corrected_as_the_whole(name: str) -> None:
    pipeline = sp.build(name, **sp.default_registry().get(name).small).with_corrector(Blend())
    call = make(4200, heads=4, kv_heads=2)
    whole, cut = (evolve(pipeline, workspace=limit).run(call) for limit in (None, 1 << 20))
    assert cut.parts is not None
    assert cut.parts.count > 1
    assert cut.corrected == whole.corrected == "Blend"
    same(whole.out, cut.out)
    same(whole.lse, cut.lse)


def test_a_route_gives_its_corrector_to_every_pipeline() -> None:
    made = sp.Route.of(sp.build("streaming")).with_corrector(Blend())
    assert made.corrects
    assert [one.corrector for one in made.known] == [Blend()]
    assert made.with_corrector(None).corrects is False
