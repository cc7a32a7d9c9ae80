"""Star Attention against its oracle, and its inner methods against runs block by block."""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

import sparseprefill as sp
from helpers.layers import fields_of
from helpers.oracle_calls import call
from oracles import star_attention
from sparseprefill.errors import ParameterError

HEADS = st.sampled_from([(1, 1), (2, 1), (4, 2)])
SMALL: dict[str, dict[str, Any]] = {
    "streaming": {"sink": 8, "window": 8, "block": 8},
    "vertical-slash": {"gamma": 0.5, "block": 8},
    "anchor-attention": {"theta": 0.5, "step": 2, "block": 8, "init_tokens": 8},
}


@st.composite
def calls(draw: st.DrawFn, most: int = 300, *, padding: bool = True) -> dict[str, Any]:
    """Any length, offset and padding."""
    kv_len = draw(st.integers(1, most))
    q_len = draw(st.one_of(st.just(kv_len), st.integers(1, kv_len)))
    options: dict[str, Any] = {"softcap": draw(st.sampled_from([None, 3.0]))}
    if draw(st.booleans()):
        options["q_offset"] = draw(st.integers(0, kv_len - q_len))
    batch = draw(st.integers(1, 2)) if padding else 1
    starts = [0] * batch
    if padding and draw(st.booleans()):
        starts = options["starts"] = draw(st.lists(st.integers(0, kv_len - 1), min_size=batch, max_size=batch))
    if padding and draw(st.booleans()):
        options["lengths"] = [draw(st.integers(1, kv_len - start)) for start in starts]
    return call(draw(st.integers(0, 999)), draw(HEADS), q_len, kv_len, batch, **options)


PARAMETERS = st.fixed_dictionaries(
    {
        "block_size": st.one_of(st.none(), st.integers(1, 90)),
        "anchor_length": st.one_of(st.none(), st.integers(0, 120)),
        "context_length": st.one_of(st.none(), st.integers(-120, 310)),
        "tile": st.sampled_from([1, 4, 8, 16, 5]),
    }
)


def attention_call(made: dict[str, Any]) -> sp.AttentionCall:
    return sp.AttentionCall(**fields_of(made))


@settings(max_examples=100, deadline=None)
@given(made=calls(), parameters=PARAMETERS)
def test_mask_and_output_equal_the_paper(made: dict[str, Any], parameters: dict[str, Any]) -> None:
    out, mask = star_attention.star_attention(**made, p=star_attention.Parameters(**parameters))
    result = sp.build("star-attention", **parameters).run(attention_call(made))
    assert torch.equal(mask, result.mask.to_dense())
    torch.testing.assert_close(out, result.out, rtol=1e-12, atol=1e-12)
    result.mask.check()


@settings(max_examples=40, deadline=None)
@given(made=calls(200, padding=False), parameters=PARAMETERS, data=st.data())
def test_a_prompt_may_be_cut_at_the_grain(
    made: dict[str, Any], parameters: dict[str, Any], data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from([None, *SMALL]))
    inner = None if name is None else {"method": name, "parameters": SMALL[name]}
    pipeline = sp.build("star-attention", **parameters, inner=inner)
    whole = evolve(attention_call(made), q_offset=0, q=made["k"], softcap=None)
    grain, length = pipeline.grain, made["k"].shape[2]
    sizes = [parameters[name] for name in ("block_size", "context_length")]
    assert (sizes[1] is None and sizes[0] is None) or (sizes[1] or 0) < 0 or grain is not None
    if grain is None or grain >= length:
        return
    cut = data.draw(st.integers(1, (length - 1) // grain)) * grain
    expected = pipeline.run(whole).out
    halves = [
        evolve(whole, q=whole.q[:, :, a:b], k=whole.k[:, :, :b], v=whole.v[:, :, :b], q_offset=a)
        for a, b in ((0, cut), (cut, length))
    ]
    torch.testing.assert_close(torch.cat([pipeline.run(half).out for half in halves], 2), expected)


def test_the_grain_is_one_token_where_nothing_is_counted_from_the_end() -> None:
    grains: dict[int | None, list[dict[str, Any]]] = {
        1: [{"block_size": 100}, {"context_length": 100}, {"block_size": 64, "context_length": 100}],
        128: [{"block_size": 100, "inner": "dense"}],
        256: [{"block_size": 129, "inner": "vertical-slash"}, {"context_length": 1000, "inner": "dense"}],
        None: [{}, {"context_length": -5}, {"block_size": 64, "context_length": -5}, {"inner": "dense"}],
    }
    for grain, settings_ in grains.items():
        assert [grain] * len(settings_) == [sp.build("star-attention", **one).grain for one in settings_]


@pytest.mark.parametrize(("context", "block"), [(1000, 256), (131072, 32768), (131073, 32768), (600000, 32768)])
def test_block_size_is_a_quarter_of_the_context_up_to_128k(context: int, block: int) -> None:
    pipeline = sp.build("star-attention", context_length=context, inner="dense")
    assert block == pipeline.grain


@settings(max_examples=60, deadline=None)
@given(
    made=calls(150),
    block=st.sampled_from([8, 16, 24, 40]),
    anchor=st.sampled_from([0, 8, 16, 24, 48]),
    context=st.sampled_from([None, 60, 96, -20]),
    name=st.sampled_from(sorted(SMALL)),
)
def test_an_inner_method_runs_in_each_block_as_in_a_call_of_its_own(
    made: dict[str, Any], block: int, anchor: int, context: int | None, name: str
) -> None:
    """One ordinary call per block: keys (prefix of the anchor, block), no padding, no offset beyond the prefix."""
    outer = attention_call(made)
    pipeline = sp.build(
        "star-attention",
        block_size=block,
        anchor_length=anchor,
        context_length=context,
        tile=8,
        inner={"method": name, "parameters": SMALL[name]},
    )
    result = pipeline.run(outer)
    inner = sp.build(name, **SMALL[name])
    allowed = outer.geometry.visible()
    mask, out = torch.zeros_like(result.mask.to_dense()), torch.zeros_like(result.out)
    for b in range(outer.q.shape[0]):
        start = made.get("starts", [0, 0])[b]
        length = made["lengths"][b] if "lengths" in made else outer.k.shape[2] - start
        first = outer.geometry.q_offset - start
        q, k, v = outer.q[b : b + 1], outer.k[b : b + 1, :, start:], outer.v[b : b + 1, :, start:]
        behind = length if context is None else (context if context >= 0 else max(length + context, 0)) // 8 * 8
        end = min(first + q.shape[2], length)
        for begin in range(0, min(behind, end), block):
            low, high = max(begin, first), min(begin + block, behind, end)
            if low >= high:
                continue
            keys = [*range(min(anchor, begin)), *range(begin, high)]
            rows = slice(low - first, high - first)
            one = inner.run(
                sp.AttentionCall(q[:, :, rows], k[:, :, keys], v[:, :, keys], softcap=outer.softcap, scale=outer.scale)
            )
            out[b, :, rows] = one.out[0]
            index = torch.tensor(keys) + start
            part = torch.zeros_like(mask[b, :, rows])
            part[:, :, index] = one.mask.to_dense()[0]
            mask[b, :, rows] = part
        rows = slice(max(behind - first, 0), max(end - first, 0))
        mask[b, :, rows] = allowed[b, rows]
        dense = sp.build("dense", block=8).run(
            evolve(
                outer,
                q=q,
                k=outer.k[b : b + 1],
                v=outer.v[b : b + 1],
                starts=None if outer.starts is None else outer.starts[b : b + 1],
                lengths=None if outer.lengths is None else outer.lengths[b : b + 1],
            )
        )
        out[b, :, rows] = dense.out[0, :, rows]
    assert torch.equal(mask, result.mask.to_dense())
    torch.testing.assert_close(out, result.out, rtol=1e-12, atol=1e-12)
    plan = result.plan
    assert (name == "anchor-attention") == (plan.carry is not None)
    if plan.carry is not None:
        assert not (plan.carry.region.to_dense() & plan.mask.to_dense()).any()


def test_hosts_that_do_not_own_the_query_are_not_masked_causally() -> None:
    """Released code masked every host's keys by the query's local index. The query sees all of the context."""
    made = call(3, (2, 1), 100, 100)
    result = sp.build("star-attention", block_size=16, context_length=80, tile=4).run(attention_call(made))
    assert result.mask.to_dense()[:, :, 80:, :80].all()


@pytest.mark.parametrize("size", [1.0, 1e4])
def test_hosts_merge_by_log_sum_exp_without_overflow(size: float) -> None:
    """Algorithm 2, lines 18 and 19, as printed lose the weights; log(1 + exp(x)) overflows at large logits."""
    made = call(4, (2, 1), 20, 100)
    made["q"] = made["q"] * size
    whole = attention_call(made)
    executor = sp.ReferenceExecutor()
    hosts = []
    for begin in range(0, 112, 16):  # the last host has no keys
        columns = (torch.arange(100) >= begin) & (torch.arange(100) < begin + 16)
        mask = sp.SparseMask.from_stripes(whole, columns[None, None, None], tile=4, diagonal=False)
        hosts.append(executor.accumulate(whole, sp.Plan(mask)))
    out, lse = reduce(sp.SoftmaxState.merge, hosts).finish()
    expected = sp.build("dense").run(whole)
    torch.testing.assert_close(out, expected.out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected.lse, rtol=1e-12, atol=1e-12)


def test_no_row_attends_to_another_block() -> None:
    """NaN in a block stays there and in the query's rows."""
    made = call(5, (1, 1), 96, 96)
    made["k"][:, :, 40:48], made["v"][:, :, 40:48] = torch.nan, torch.nan
    out = sp.build("star-attention", block_size=16, context_length=80, tile=8).run(attention_call(made)).out
    bad = torch.isnan(out).any(-1)[0, 0].nonzero()[:, 0].tolist()
    assert [*range(40, 48), *range(80, 96)] == bad


class Keeps:
    """An observer."""

    def observe(self, call: sp.AttentionCall, plan: sp.Plan, result: sp.Result, memory: sp.Memory) -> None: ...


def test_an_inner_method_with_observers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = evolve(sp.build("dense"), observers=(Keeps(),))
    star = sp.default_registry().get("star-attention")
    config = star.configure({"inner": "dense"})
    monkeypatch.setattr(sp.Method, "pipeline", lambda *_, **__: watched)
    with pytest.raises(ParameterError, match=r"inner: dense .*\(Keeps\)"):
        star.build(config)


def test_a_window_is_served_without_an_inner_method() -> None:
    windowed = evolve(attention_call(call(6, (1, 1), 40, 40)), window=8)
    assert sp.build("star-attention", tile=8).run(windowed).density > 0
