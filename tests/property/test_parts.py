"""A call cut into parts gives what the whole call gives: masks bit for bit, numbers to rounding, and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from unittest.mock import patch

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from sparseprefill.plugins.kascade.table import AnchorTable

import sparseprefill as sp
from helpers.examples import SCOPES, few_calls, few_of, part
from sparseprefill.parts import split
from sparseprefill.testing import calls

REGISTRY = sp.default_registry()
METHODS = sorted(REGISTRY.methods())
ROWS = 16
HEADS = (0, 0, 1, 2, 4, 4, 5, 6, 8, 8, 9, 10)
"""KV heads that those of a later layer follow; calls may have a share of them, of one to four."""
CLUSTERS = {(layer, head): (layer + head) % 3 for layer in range(3) for head in range(6)}


def method(name: str, **more: object) -> sp.Pipeline:
    one = REGISTRY.get(name)
    return one.pipeline(**{**one.small, **more})


def refined(name: str, *refiners: sp.MaskRefiner) -> sp.Pipeline:
    made = method(name)
    return evolve(made, refiners=(*made.refiners, *refiners))


BUILT: dict[str, Callable[[], sp.Pipeline]] = {
    **{name: partial(method, name) for name in METHODS},
    "rowmax union": lambda: method("rowmax", union="group"),
    "rowmax tiles": lambda: method("rowmax", width=None),
    "kascade map": lambda: method("kascade", anchors=AnchorTable(anchors=(0,), maps=dict.fromkeys((1, 2), HEADS))),
    "share-prefill table": lambda: method("share-prefill", clusters=CLUSTERS),
    "streaming + rescue": lambda: refined("streaming", sp.StrideRescue(3, seed=7), sp.RandomRescue(0.2)),
    "bfla + budget": lambda: refined("bfla", sp.BudgetFloor(share=0.3), sp.BudgetCeiling(share=0.6)),
    **{f"{name} + ceiling": partial(refined, name, sp.BudgetCeiling(share=0.4)) for name in (
        "anchor-attention", "flexprefill", "rowmax", "vertical-slash", "xattention")},
    **{f"{name} + decay": partial(refined, name, sp.ValueWeights(pool=1), sp.PositionDecay(share=0.3)) for name in (
        "anchor-attention", "streaming", "xattention")},
    **{f"{name} + threshold": partial(refined, name, sp.ValueWeights(pool=1), sp.RelativeThreshold(0.3)) for name in (
        "anchor-attention", "bfla", "vertical-slash")},
    "anchor-attention + GQA": lambda: refined("anchor-attention", sp.LocalBand(1, tile=16), sp.GqaUnion()),
    "xattention + dense rows": lambda: refined("xattention", sp.DenseRows(20), sp.Sink(1)),
    "share-prefill + ceiling": lambda: refined("share-prefill", sp.BudgetCeiling(share=0.4)),
    "share-prefill in a union": lambda: sp.Pipeline(
        sp.UnionEstimator(method("share-prefill"), method("streaming"))),
    "kascade + ceiling": lambda: refined("kascade", sp.BudgetCeiling(share=0.4)),
    "kascade in a union": lambda: sp.Pipeline(sp.UnionEstimator(method("kascade"), method("streaming"))),
    "union": lambda: sp.Pipeline(sp.UnionEstimator(method("anchor-attention"), method("vertical-slash"))),
    "anchor-attention in star": lambda: method("star-attention", inner={"method": "anchor-attention", "parameters": {
        "theta": 1.0, "step": 2, "block": 16, "init_tokens": 16}}, context_length=112),
}  # fmt: skip
FEW = (*SCOPES.values(), "kascade map", "share-prefill table", "bfla + budget", "anchor-attention in star")
"""Those whose calls are drawn: a method of each head scope, what remembers between layers, budgets, one in another."""
DRAWN = calls(dtypes=(torch.float64,), head_dims=(8,), max_batch=2, max_heads=8, max_kv_heads=4)


@pytest.fixture(autouse=True)
def _short_rows() -> Iterator[None]:
    """The row unit of production would leave the calls of a test whole."""
    with patch.object(split, "ROWS", ROWS):
        yield


def same(expected: sp.Result, actual: sp.Result) -> None:
    torch.testing.assert_close(actual.out, expected.out, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(actual.lse, expected.lse, rtol=1e-11, atol=1e-11)
    assert torch.equal(expected.mask.to_dense(), actual.mask.to_dense())
    assert expected.density == actual.density


@pytest.mark.parametrize("name", few_of(BUILT, FEW))
@part(0.25)
@given(call=DRAWN, limit=st.sampled_from([1, 1, 20_000, 100_000]))
def test_parts_equal_the_whole(name: str, call: sp.AttentionCall, limit: int) -> None:
    check(BUILT[name](), call, limit)


@pytest.mark.parametrize("name", BUILT)
def test_parts_of_standard_calls_equal_the_whole(name: str) -> None:
    """With a prefix, with padding, and with several groups of heads; by heads and rows, and by heads alone."""
    for number, limit in ((1, 1), (3, 20_000), (6, 1)):
        check(BUILT[name](), few_calls(torch.float64)[number], limit, layers=2)


def check(pipeline: sp.Pipeline, call: sp.AttentionCall, limit: int, layers: int = 3) -> None:
    """Layers of one request: memory is written between them, and between the parts of each."""
    if pipeline.unsupported(call):
        call = evolve(call, window=None, softcap=None)
    cut, memories = evolve(pipeline, workspace=limit), (sp.Memory(), sp.Memory())
    for layer in range(layers):
        one = evolve(call, q=call.q * (1 + layer / 4), layer=layer)
        parts = split.parts(cut, one, limit)
        same(pipeline.run(one, memories[0]), cut.run(one, memories[1]))
        if limit == 1 and pipeline.head_scope == "head":
            rows = 1 if pipeline.grain is None or call.starts is not None else len({part.rows for part in parts})
            assert rows * call.q.shape[1] == len(parts)
