"""A session's record of calls that run in parts: counted on the device, read when a report asks."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from sparseprefill.adapters.session.ledger import Uncounted
from sparseprefill.adapters.session.options import HostOptions
from sparseprefill.adapters.session.report import LayerReport
from sparseprefill.adapters.session.session import Prefill, Session

import sparseprefill as sp
from helpers.build import make
from sparseprefill.parts import split as parts
from sparseprefill.plan import Rounding

CALL = make(96, heads=4, kv_heads=2)


def report(measure: bool, workspace: int | None) -> LayerReport:
    """Two chunks of one prompt through a session."""
    pipeline = evolve(sp.build("streaming", sink=16, window=16, block=16), workspace=workspace)
    session = Session(pipeline, HostOptions(measure=measure, tail=16))
    prefill = Prefill()
    for end in (48, 96):
        q, k, v = CALL.q[:, :, end - 48 : end], CALL.k[:, :, :end], CALL.v[:, :, :end]
        session.run(sp.AttentionCall(q, k, v, layer=2), prefill)
    return session.report("none", "none").layers[0]


@pytest.mark.parametrize("measure", [False, True])
@pytest.mark.parametrize("kept", [parts.KEPT, 1], ids=["masks kept", "masks dropped"])
def test_the_density_of_a_prefill_in_parts(measure: bool, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "KEPT", kept)
    whole, cut = report(measure, None), report(measure, 1)
    assert whole == cut
    assert cut.density is not None
    assert 0 < cut.density < 1
    assert (cut.mean_density == cut.density) == measure


def test_what_waits_is_small_where_the_masks_are_large() -> None:
    result = evolve(sp.build("dense"), workspace=1).run(CALL)
    waiting = Uncounted.of(result)
    assert () == waiting.lists
    assert 4 * 8 == waiting.held
    assert waiting.count()[0] == waiting.count()[1] == 4 * 96 * 97 // 2


def test_errors_of_parts_in_8_bits_are_the_largest_of_each_head() -> None:
    recorder, call = parts.Recorder(CALL.geometry), sp.Plan(sp.SparseMask.full(CALL))
    plain = sp.Result(CALL.q, CALL.q[..., 0], call)
    for heads, errors in (((0, 2), [0.1, 0.2]), ((0, 2), [0.3, 0.1]), ((2, 4), [0.0, torch.nan])):
        found = evolve(plain, rounded=Rounding("int8", torch.tensor([errors]), 0.25))
        recorder.add(parts.Part(heads, (0, 96)), (), found)
    recorder.add(parts.Part((0, 2), (0, 96)), (), plain)
    assert recorder.rounded is not None
    assert recorder.rounded.heads.tolist() == [[False, True, True, False]]
    assert torch.allclose(recorder.rounded.errors[0, :3], torch.tensor([0.3, 0.2, 0.0]))
