"""A session's filter of layers: which run sparse, and what the report says of the others."""

from __future__ import annotations

import pytest
from attrs import evolve
from sparseprefill.adapters.session.kinds import Code
from sparseprefill.adapters.session.options import MOST_LAYERS, HostOptions
from sparseprefill.adapters.session.prospects import NOT_CHOSEN
from sparseprefill.adapters.session.session import Fallback, Prefill, Session

import sparseprefill as sp
from helpers.build import make

CALL = make(96, heads=4, kv_heads=2)
METHOD = sp.build("streaming", sink=16, window=16, block=16)


@pytest.mark.parametrize("strict", [False, True])
def test_layers_that_were_not_asked_for_run_dense(strict: bool) -> None:
    """Windowed or not, and no failure: `strict` raises nothing for them."""
    session, prefill = Session(METHOD, HostOptions(layers=[0, 2], strict=strict)), Prefill()
    for window in (None, 8):
        found = [session.run(evolve(CALL, layer=layer, window=window), prefill) for layer in range(4)]
        assert [isinstance(one, Fallback) for one in found] == [False, True, False, True]
        assert Fallback(NOT_CHOSEN, code=Code.LAYERS) == found[1]
    report = session.report("none", "none")
    assert {one.layer: (one.sparse_calls, one.dense_calls) for one in report.layers if one.layer % 2} == {
        1: (0, 2),
        3: (0, 2),
    }
    assert [one.sparse_calls for one in report.layers if one.layer % 2 == 0] == [1, 1]
    assert report.fallbacks == {NOT_CHOSEN: 4}


def test_no_filter_and_one_that_names_others() -> None:
    for layers, sparse in ((None, True), ([7], False)):
        session = Session(METHOD, HostOptions(layers=layers))
        assert all(
            isinstance(session.run(evolve(CALL, layer=layer), Prefill()), sp.Result) == sparse for layer in range(3)
        )


def test_a_host_that_declines_a_layer_not_asked_for_is_no_failure() -> None:
    session = Session(METHOD, HostOptions(layers=[0], strict=True))
    assert Fallback(NOT_CHOSEN, code=Code.LAYERS) == session.decline(1, "padding", (1, 4, 4))
    with pytest.raises(sp.UnsupportedCallError, match="layer 0: padding"):
        session.decline(0, "padding", (1, 4, 4))


def test_no_model_has_more_layers_than_a_filter_may_name() -> None:
    assert MOST_LAYERS == 65536
    assert Session(METHOD, HostOptions(layers=range(MOST_LAYERS))).layers == frozenset(range(MOST_LAYERS))
