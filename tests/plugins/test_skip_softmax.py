"""skip-softmax: the method beside its oracle, its thresholds, and the same option on other methods."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from sparseprefill.adapters.session.options import HostOptions
from sparseprefill.adapters.session.session import Prefill, Session

import sparseprefill as sp
from helpers.build import int32
from helpers.examples import few_calls, few_of
from helpers.skipping import check_against_oracle
from sparseprefill.plan import Remark
from sparseprefill.refiners.skip import prompt_length
from sparseprefill.testing import calls, check_method, tensors

CALLS = calls(max_len=70, max_heads=2, max_batch=2, head_dims=(4,), dtypes=(torch.float64,))


def call_of(length: int = 300, *, batch: int = 1, sharp: float = 8.0, **fields: Any) -> sp.AttentionCall:
    """Keys of one run of 16 in four matter."""
    q, k, v = tensors("random", batch=batch, heads=2, kv_heads=1, q_len=length, kv_len=length, head_dim=16)
    strong = (torch.arange(length) // 16) % 4 == 0
    return sp.AttentionCall(q * sharp, torch.where(strong[:, None], k, k * 0.05), v, **fields)


def method(**parameters: Any) -> sp.Pipeline:
    built: sp.Pipeline = sp.build("skip-softmax", **{"block": 16, "skip_below": 30.0, **parameters})
    return built


@settings(max_examples=25)
@given(call=CALLS, below=st.sampled_from([2.0, 20.0, 50.0]), sharp=st.sampled_from([2.0, 8.0]))
def test_the_method_is_its_oracle(call: sp.AttentionCall, below: float, sharp: float) -> None:
    call = evolve(call, q=call.q * sharp)
    result = method(skip_below=below).run(call)
    if result.skipped is None:  # the prompt is too short
        assert any(isinstance(note, Remark) for note in result.plan.notes.values())
        assert all(length <= below for length in [prompt_length(call)] if isinstance(length, int))
        return
    check_against_oracle(call, result, below)


def test_a_row_whose_queries_are_all_padding_skips_nothing() -> None:
    q, k, v = (torch.randn(2, 1, n, 4) for n in (1, 17, 17))
    call = sp.AttentionCall(q, k, v, q_offset=0, starts=int32(2, 0))
    result = method(skip_below=2.0).run(call)
    assert result.plan.skip_below is not None
    assert result.plan.skip_below.tolist() == [0.0, 0.0]
    assert not result.out[0].any()


def test_zero_is_bit_equal_to_the_full_mask() -> None:
    call = call_of()
    plain, zero = sp.build("dense", block=16).run(call), method(skip_below=0).run(call)
    assert zero.plan.skip_below is None
    assert zero.skipped is None
    assert torch.equal(plain.out, zero.out)
    assert torch.equal(plain.lse, zero.lse)


def test_the_threshold_is_c_over_the_prompt() -> None:
    def thresholds(call: sp.AttentionCall) -> list[float]:
        below = method().run(call).plan.skip_below
        assert below is not None
        return below.tolist()

    call = call_of()
    assert thresholds(call) == pytest.approx([30 / 300])
    chunk = evolve(call, q=call.q[:, :, :160], k=call.k[:, :, :160], v=call.v[:, :, :160])
    assert thresholds(chunk) == pytest.approx([30 / 160])
    told = evolve(chunk, prompt_lengths=300)
    assert thresholds(told) == pytest.approx([30 / 300])
    rows = evolve(call_of(batch=2), lengths=torch.tensor([300, 25], dtype=torch.int32))
    assert thresholds(rows) == pytest.approx([30 / 300, 0.0])
    left = evolve(call_of(batch=2), starts=torch.tensor([0, 200], dtype=torch.int32))
    assert thresholds(left) == pytest.approx([30 / 300, 30 / 100])


def test_a_prompt_of_c_tokens_or_fewer_runs_whole_and_the_report_says_so() -> None:
    call = call_of(100)
    result = method(skip_below=100.0).run(call)
    assert result.plan.skip_below is None
    assert torch.equal(sp.build("dense", block=16).run(call).out, result.out)
    session = Session(method(skip_below=100.0), HostOptions(tail=0))
    session.run(call, Prefill())
    assert "below is 100 and the prompt is not longer, so nothing is skipped" in str(session.report("host", "sdpa"))


def test_chunks_of_a_prompt_are_the_whole_of_it() -> None:
    call, pipeline = call_of(), method()
    whole, memory, outs, skipped = pipeline.run(call), sp.Memory(), list[torch.Tensor](), 0
    for first, last in ((0, 96), (96, 240), (240, 300)):
        part = evolve(
            call, q=call.q[:, :, first:last], k=call.k[:, :, :last], v=call.v[:, :, :last], prompt_lengths=300
        )
        result = pipeline.run(part, memory)
        outs.append(result.out)
        assert result.skipped is not None
        skipped += int(result.skipped.pairs.sum())
    assert torch.allclose(whole.out, torch.cat(outs, 2), atol=1e-5)
    assert whole.skipped is not None
    assert int(whole.skipped.pairs.sum()) == skipped > 0


def test_parts_count_what_the_whole_counts() -> None:
    call, pipeline = call_of(), method()
    whole, parts = pipeline.run(call), evolve(pipeline, workspace=1).run(call)
    assert parts.parts is not None
    assert parts.parts.count > 1
    assert whole.skipped is not None
    assert parts.skipped is not None
    assert torch.equal(whole.skipped.pairs, parts.skipped.pairs)
    assert whole.density == parts.density < 1
    assert whole.skipped_share == pytest.approx(1 - whole.density)


def test_the_report_has_the_skipped_share() -> None:
    call, session = call_of(), Session(method(), HostOptions(tail=0))
    result = session.run(call, Prefill())
    assert isinstance(result, sp.Result)
    (layer,) = session.report("host", "sdpa").layers
    assert result.skipped_share == layer.skipped
    assert 0.3 < result.skipped_share < 1
    assert layer.density == pytest.approx(result.density)
    assert f"skipped {result.skipped_share:.3f}" in str(layer)
    assert Session(sp.build("streaming"), HostOptions(tail=0)).report("host", "sdpa").layers == ()


def test_an_executor_that_does_not_skip_is_noted() -> None:
    class Plain:
        def execute(self, call: sp.AttentionCall, plan: sp.Plan) -> sp.Result:
            return evolve(sp.ReferenceExecutor().execute(call, evolve(plan, skip_below=None)), plan=plan)

        def accumulate(self, call: sp.AttentionCall, plan: sp.Plan) -> sp.SoftmaxState:
            return sp.ReferenceExecutor().accumulate(call, plan)

    session = Session(evolve(method(), executor=Plain()), HostOptions(tail=0))
    session.run(call_of(), Prefill())
    assert "the executor cannot skip tiles by their logits" in str(session.report("host", "sdpa"))


@pytest.mark.parametrize("name", few_of(["bfla", "anchor-attention"], ["anchor-attention"]))
def test_on_any_method_in_one_line_through_the_contracts(name: str) -> None:
    one = sp.default_registry().get(name)

    def build(full: bool = False) -> sp.Pipeline:
        made = one.pipeline(**{**one.small, **((full and one.full) or {})})
        below = 0.0 if full else 60.0
        return evolve(made, refiners=(*made.refiners, sp.SkipSoftmax(below, grain=made.grain)), name=f"{name} skips")

    report = check_method(build, full={"full": True}, calls=few_calls())
    assert "result == softmax over its own mask" in report.cases
    # AnchorAttention drops what lies far below its anchor by itself, unless theta lets everything pass.
    plain = one.pipeline(**{**one.small, **({"theta": 100.0} if name == "anchor-attention" else {})})
    call = call_of()
    skipping = evolve(plain, refiners=(*plain.refiners, sp.SkipSoftmax(60.0, grain=None))).run(call)
    assert skipping.skipped_share > 0
    assert skipping.density < plain.run(call).density


def test_a_configuration_names_the_refiner() -> None:
    skips = {"name": "skip-softmax", "below": 20.0, "grain": 16}
    table = {"method": "streaming", "parameters": {"block": 16}, "refiners": [skips]}
    assert sp.SkipSoftmax(20.0, grain=16) == sp.from_config(table).refiners[0]  # type: ignore[union-attr]


def test_of_a_union_all_parts_must_want_it() -> None:
    call = call_of()
    loose, tight = method(skip_below=60.0), method(skip_below=30.0)
    both = sp.Pipeline(sp.UnionEstimator(loose, tight)).run(call)
    assert tight.run(call).plan.skip_below.tolist() == both.plan.skip_below.tolist()  # type: ignore[union-attr]
    assert sp.Pipeline(sp.UnionEstimator(loose, sp.build("dense", block=16))).run(call).plan.skip_below is None
