"""On the GPU: every method keeps its laws there, masks equal the CPU's, nothing synchronises, nothing recompiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve

from helpers.correctors import Blend
from sparseprefill import (
    AttentionCall,
    Corrector,
    MaskRefiner,
    Memory,
    PositionDecay,
    RelativeThreshold,
    Result,
    ValueWeights,
    build,
    default_registry,
    output_error,
    recall,
)
from sparseprefill.metrics import watched_recall
from sparseprefill.testing import check_method, tensors

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", default_registry().methods())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_contracts_hold(name: str, dtype: torch.dtype) -> None:
    check_method(name, device="cuda", dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "theta"), [("random", 2.4), ("sink", 7.0), ("stripes", 3.0)])
def test_anchor_attention_selects_what_the_reference_selects(kind: str, theta: float, dtype: torch.dtype) -> None:
    shape: dict[str, Any] = {"batch": 2, "heads": 8, "kv_heads": 2, "q_len": 1500, "kv_len": 1700, "head_dim": 128}
    q, k, v = tensors(kind, dtype=dtype, **shape)
    pipeline = build("anchor-attention", theta=theta, step=4, block=64, init_tokens=64)
    expected = pipeline.run(AttentionCall(q, k, v))
    actual = pipeline.run(AttentionCall(q.cuda(), k.cuda(), v.cuda()))
    differ = int((expected.mask.to_dense() ^ actual.mask.to_dense().cpu()).sum())
    assert differ <= 1e-4 * int(expected.mask.to_dense().sum())
    assert 0 < expected.density <= 1
    if differ == 0:
        assert output_error(actual.out.cpu(), expected.out) <= 1e-2


def given(name: str) -> dict[str, Any]:
    """Parameters without which a method cannot be built."""
    known: dict[str, dict[str, Any]] = {"share-prefill": {"clusters": "single"}, "kascade": {"anchors": (0,)}}
    return known.get(name, {})


@pytest.mark.parametrize("kind", ["random", "sink", "stripes"])
@pytest.mark.parametrize("name", default_registry().methods())
def test_masks_are_those_of_the_cpu(name: str, kind: str) -> None:
    q, k, v = tensors(kind, batch=2, heads=4, kv_heads=2, q_len=290, kv_len=353, head_dim=64)
    method = default_registry().get(name)
    pipeline = method.pipeline(**method.small)
    expected = pipeline.run(AttentionCall(q, k, v)).mask.to_dense()
    actual = pipeline.run(AttentionCall(q.cuda(), k.cuda(), v.cuda())).mask.to_dense().cpu()
    assert int((expected ^ actual).sum()) == 0


@pytest.mark.filterwarnings("ignore:.*[Ss]ynchroniz.*:UserWarning")
@pytest.mark.parametrize("name", default_registry().methods())
def test_no_host_synchronisation(name: str) -> None:
    run_without_waiting(name, **given(name))


@pytest.mark.filterwarnings("ignore:.*[Ss]ynchroniz.*:UserWarning")
@pytest.mark.parametrize("floor", [{}, {"span": 1024}, {"speaks_for": "tile", "rows": 5}], ids=str)
@pytest.mark.parametrize("name", ["streaming", "vertical-slash", "anchor-attention"])
def test_no_host_synchronisation_by_a_recall_floor(name: str, floor: dict[str, Any]) -> None:
    run_without_waiting(name, recall=floor)


@pytest.mark.parametrize("name", ["streaming", "vertical-slash", "anchor-attention"])
def test_a_recall_floor_holds_as_on_the_cpu(name: str) -> None:
    q, k, v = tensors("stripes", batch=2, heads=4, kv_heads=2, q_len=290, kv_len=353, head_dim=64)
    method = default_registry().get(name)
    pipeline = method.pipeline(**method.small, recall=0.9)
    expected = pipeline.run(AttentionCall(q, k, v)).plan
    actual = pipeline.run(AttentionCall(q.cuda(), k.cuda(), v.cuda())).plan
    sample = actual.notes["recall_sample"]
    assert bool((sample.after >= 0.9 - 1e-4).all())
    torch.testing.assert_close(expected.notes["recall_before"], actual.notes["recall_before"].cpu(), atol=1e-4, rtol=0)
    differ = int((expected.mask.to_dense() ^ actual.mask.to_dense().cpu()).sum())
    assert differ <= 1e-2 * int(expected.mask.to_dense().sum())


@pytest.mark.filterwarnings("ignore:.*[Ss]ynchroniz.*:UserWarning")
@pytest.mark.parametrize("floor", [None, 0.9])
def test_measuring_recall_waits_for_nothing(floor: float | None) -> None:
    from sparseprefill.adapters.session.options import HostOptions
    from sparseprefill.adapters.session.session import Prefill, Session

    shape: dict[str, Any] = {"batch": 1, "heads": 8, "kv_heads": 2, "q_len": 4096, "kv_len": 4096, "head_dim": 128}
    call = AttentionCall(*tensors("stripes", device="cuda", dtype=torch.bfloat16, **shape))
    session = Session(build("streaming", recall=floor), HostOptions(tail=0, recall_every=1))
    session.run(call, Prefill())
    session.report("h", "i")
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        result = session.run(call, Prefill())
        session.read_recall()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert isinstance(result, Result)
    found = session.report("h", "i").layers[0].recall
    assert found is not None
    assert found.calls == 2
    rows = watched_recall(call, result)
    expected = recall(call, result, rows=rows.rows[0])
    torch.testing.assert_close(rows.kept, expected, atol=1e-4, rtol=0)
    assert abs(found.mean - float(expected[..., : rows.spread].mean())) < 1e-4


BY_SCORE: list[tuple[MaskRefiner, ...]] = [
    (PositionDecay(share=0.2),),
    (RelativeThreshold(0.05),),
    (ValueWeights(1.0), PositionDecay()),
    (ValueWeights(), RelativeThreshold(0.05)),
]
SCORED = ["xattention", "rowmax", "bfla", "streaming", "vertical-slash", "anchor-attention"]


@pytest.mark.filterwarnings("ignore:.*[Ss]ynchroniz.*:UserWarning")
@pytest.mark.parametrize("refiners", BY_SCORE, ids=lambda ones: "+".join(type(one).__name__ for one in ones))
@pytest.mark.parametrize("name", SCORED)
def test_no_host_synchronisation_by_refiners_that_go_by_score(name: str, refiners: tuple[MaskRefiner, ...]) -> None:
    run_without_waiting(name, *refiners)


@pytest.mark.parametrize("refiners", BY_SCORE, ids=lambda ones: "+".join(type(one).__name__ for one in ones))
@pytest.mark.parametrize("name", SCORED)
def test_refiners_that_go_by_score_choose_as_on_the_cpu(name: str, refiners: tuple[MaskRefiner, ...]) -> None:
    q, k, v = tensors("stripes", batch=2, heads=4, kv_heads=2, q_len=290, kv_len=353, head_dim=64)
    method = default_registry().get(name)
    made = method.pipeline(**{**method.small, **((name in ("xattention", "rowmax", "bfla") and method.full) or {})})
    pipeline = evolve(made, refiners=(*made.refiners, *refiners))
    expected = pipeline.run(AttentionCall(q, k, v)).mask.to_dense()
    actual = pipeline.run(AttentionCall(q.cuda(), k.cuda(), v.cuda())).mask.to_dense().cpu()
    assert int((expected ^ actual).sum()) <= 1e-2 * int(expected.sum())


@pytest.mark.filterwarnings("ignore:.*[Ss]ynchroniz.*:UserWarning")
def test_no_host_synchronisation_by_a_pipeline_with_a_corrector() -> None:
    run_without_waiting("bfla", corrector=Blend())


def run_without_waiting(
    name: str, *refiners: MaskRefiner, corrector: Corrector | None = None, **parameters: Any
) -> None:
    """Run a method once warm, with every wait of the host for the device an error."""
    q, k, v = tensors(
        "sink", batch=1, heads=8, kv_heads=2, q_len=4096, kv_len=4096, head_dim=128, device="cuda", dtype=torch.bfloat16
    )
    made, memory, call = build(name, **parameters), Memory(), AttentionCall(q, k, v)
    pipeline = evolve(made, refiners=(*made.refiners, *refiners), corrector=corrector)
    pipeline.run(call, memory)
    torch.cuda.synchronize()
    torch.use_deterministic_algorithms(False)
    try:
        torch.cuda.set_sync_debug_mode("error")
        pipeline.run(call, memory)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_nothing_recompiles_when_only_the_length_changes() -> None:
    from sparseprefill.kernels.attention.kernel import sparse_attention_fwd_kernel as kernel

    pipeline = build("anchor-attention", step=2)
    compiled = []
    for length in (4096, 4097, 5000, 6144, 1):
        q, k, v = (torch.randn(1, h, length, 128, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2))
        pipeline(q, k, v)
        compiled.append(sum(len(cache[0]) for cache in kernel.device_caches.values()))
    assert len(set(compiled)) == 1, compiled


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", default_registry().methods())
def test_tensors_need_not_be_on_the_current_device(name: str) -> None:
    shape: dict[str, Any] = {"batch": 1, "heads": 4, "kv_heads": 2, "q_len": 600, "kv_len": 600, "head_dim": 128}
    q, k, v = tensors("sink", device="cuda:0", dtype=torch.bfloat16, **shape)
    pipeline = build(name, **given(name))
    here = pipeline.run(AttentionCall(q, k, v)).out
    with torch.cuda.device(0):
        there = pipeline.run(AttentionCall(q.to("cuda:1"), k.to("cuda:1"), v.to("cuda:1"))).out
    assert torch.equal(here, there.to("cuda:0"))
