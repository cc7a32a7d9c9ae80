"""rowmax against its rule, row by row and key by key: masks bit for bit, outputs to rounding; and its laws."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from sparseprefill.plugins.rowmax import RowMaxConfig, maxima
from sparseprefill.plugins.rowmax.maxima import Sampling, sampled_rows, sampling
from sparseprefill.plugins.rowmax.stages import RowMaxEstimator
from torch import Tensor

import sparseprefill as sp
from oracles import rowmax as oracle
from oracles.classic import Keep, chosen, dense_rows
from oracles.drawn import Made, call, calls, run
from oracles.rowmax import Parameters
from sparseprefill.testing import tensors

PARAMETERS = st.builds(
    lambda eps, every, rows, sink, union, width, times, strong: Parameters(
        eps, every, every * rows, sink, union, width if width and every * rows % width == 0 else None, times, strong
    ),
    eps=st.sampled_from([0.0, 0.02, 1.0]) | st.floats(0.005, 0.6),
    every=st.integers(1, 6),
    rows=st.integers(1, 5),
    sink=st.booleans(),
    union=st.sampled_from(["head", "group"]),
    width=st.sampled_from([None, 1, 2, 4, 8]),
    times=st.just(1e9) | st.floats(0.1, 8.0),
    strong=st.sampled_from([1.0, 1.0, 0.0]) | st.floats(0.02, 0.9),
)
FEATURES: list[dict[str, Any]] = [{}, {"window": 40}, {"softcap": 3.0}, {"window": 17, "softcap": 2.0, "first_head": 3}]


def expected(made: Made, p: Parameters, sinks: list[float] | None, **options: Any) -> tuple[Tensor, Tensor]:
    """Mask and output of the oracle; options: window, first_head."""
    q, k, v = made["q"], made["k"], made["v"]
    group, scale, softcap = q.shape[1] // k.shape[1], 1 / math.sqrt(q.shape[3]), made.get("softcap")
    mask = torch.zeros(*q.shape[:3], k.shape[2], dtype=torch.bool)
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    for b in range(q.shape[0]):
        start = made.get("starts", [0] * (b + 1))[b]
        length = made["lengths"][b] if "lengths" in made else k.shape[2] - start
        real = [i for i in range(q.shape[2]) if 0 <= made["q_offset"] + i - start < length]
        if not real:
            continue
        first, keys = made["q_offset"] + real[0] - start, slice(start, start + length)

        def head(h: int, b: int = b, real: list[int] = real, first: int = first, keys: slice = keys) -> oracle.Head:
            number, sink = options.get("first_head", 0) + h, None if sinks is None else sinks[h]
            window = options.get("window")
            return oracle.Head(
                q[b, h, real], k[b, h // group, keys], first, scale, number, group, softcap, window, sink
            )

        for h in range(q.shape[1]):
            kv = h // group
            together = range(kv * group, kv * group + group) if p.union == "group" else [h]
            group_heads = [head(kv * group + one) for one in range(group)]
            keep: Keep = oracle.rowmax([head(one) for one in together], p, group_heads)
            for n, i in enumerate(real):
                mask[b, h, i, [key + start for key in chosen(first + n, length, keep)]] = True
            if sinks is None:
                one = q[b, h, real], k[b, kv, keys], v[b, kv, keys]
                out[b, h, real] = dense_rows(*one, first, scale, softcap, keep)
    return mask, out


def check(made: Made, p: Parameters, sinks: list[float] | None = None, **options: Any) -> sp.Result:
    given = {} if sinks is None else {"sinks": torch.tensor(sinks, dtype=torch.float64)}
    result = run(sp.build("rowmax", **vars(p)), made, **given, **options)
    mask, out = expected(made, p, sinks, **options)
    assert torch.equal(mask, result.mask.to_dense())
    if sinks is None:
        torch.testing.assert_close(out, result.out, rtol=1e-12, atol=1e-12)
    return result


@settings(max_examples=40, deadline=None)
@given(made=calls(240), p=PARAMETERS)
def test_equals_the_rule(made: Made, p: Parameters) -> None:
    check(made, p)


@settings(max_examples=25, deadline=None)
@given(made=calls(90), p=PARAMETERS, window=st.integers(1, 60), first=st.integers(0, 9))
def test_equals_the_rule_under_a_sliding_window(made: Made, p: Parameters, window: int, first: int) -> None:
    check(made, p, window=window, first_head=first)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), p=PARAMETERS, sinks=st.lists(st.floats(-9, 9), min_size=4, max_size=4))
def test_equals_the_rule_with_sinks(seed: int, p: Parameters, sinks: list[float]) -> None:
    check(call(seed, (4, 2), 70, 21), p, sinks)


@pytest.mark.parametrize("most", ["ROWS", "LOGITS_ON_CPU"])
def test_in_parts_it_is_the_same(most: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One query tile, or one key tile, in memory at a time."""
    made = call(3, (2, 1), 50, 30)
    made["k"][:, :, 31] = 3 * made["q"][:, :1, 0]  # the first row's future
    one = sp.AttentionCall(made["q"], made["k"], made["v"])
    whole = estimator(0.03, 1, 16).shares(one)
    monkeypatch.setattr(maxima, most, 1)
    torch.testing.assert_close(whole, estimator(0.03, 1, 16).shares(one), rtol=1e-12, atol=1e-12)
    for made in (call(1, (4, 2), 150, 37), call(2, (2, 1), 90, 20, 0, 2, starts=[0, 33], lengths=[101, 70])):
        check(made, Parameters(0.03, 3, 15))
        check(made, Parameters(0.03, 2, 16, union="group"), window=50)


def drawn(seed: int, **options: Any) -> sp.AttentionCall:
    sizes: dict[str, Any] = {"batch": 1, "heads": 4, "kv_heads": 2, "q_len": 130, "kv_len": 170, "head_dim": 16}
    q, k, v = tensors("random", dtype=torch.float64, seed=seed, **sizes)
    return sp.AttentionCall(3 * q, k, v, **options)


def estimator(
    eps: float, every: int, block: int = 24, union: str = "head", width: int | None = None
) -> RowMaxEstimator:
    config = RowMaxConfig(
        eps=eps, times=1e9, every=every, block=block, sink=False, union=union, width=width, strong=1.0
    )
    return RowMaxEstimator(config)


def logits(one: sp.AttentionCall) -> Tensor:
    found = one.q @ one.k.repeat_interleave(one.group, 1).transpose(-1, -2) * one.softmax_scale
    found = found if one.softcap is None else one.softcap * torch.tanh(found / one.softcap)
    return found.masked_fill(~one.geometry.visible()[:, None], -torch.inf)


# Laws.


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 999), every=st.sampled_from([1, 2, 3, 4]), eps=st.floats(0.01, 0.4),
    more=st.sampled_from(FEATURES), width=st.sampled_from([None, 1, 4, 8]),
)  # fmt: skip
def test_no_dropped_column_holds_a_large_share_of_a_sampled_row(
    seed: int, every: int, eps: float, more: dict[str, Any], width: int | None
) -> None:
    """Nor does any of its keys have eps of the row's softmax; and each kept one holds a share, or is the row's own."""
    one, block = drawn(seed, **more), 24
    rows = sampled_rows(one, 0, one.geometry.tile_rows(block), block, Sampling(every, 1))
    at = rows.index[..., None].expand(-1, -1, -1, one.kv_len)
    seen = torch.gather(logits(one), 2, at).masked_fill(~rows.real[..., None], -torch.inf)
    kept = torch.gather(
        sp.build("rowmax", eps=eps, times=1e9, strong=1.0, every=every, block=block, width=width)
        .run(one)
        .mask.to_dense(),
        2,
        at,
    )
    weight = torch.where(rows.real[..., None], seen.softmax(-1), 0)
    assert not bool((weight[~kept] >= eps).any())
    column = width or block
    tops = torch.nn.functional.pad(seen, (0, -one.kv_len % column), value=-torch.inf).unflatten(-1, (-1, column))
    tops = tops.amax(-1)
    share = torch.where(rows.real[..., None], tops.softmax(-1), 0)
    by_column = share.unflatten(2, (-1, block // every)).amax(3)
    columns = estimator(eps, every, block, width=width).kept(one)
    assert torch.equal(by_column >= eps, columns)
    assert bool((by_column < eps).any())
    if width is None:
        assert bool((by_column >= eps).any())


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 999), width=st.sampled_from([1, 4, 8]), union=st.sampled_from(["head", "group"]))
def test_narrow_columns_are_stripes_beside_the_own_tile_and_the_first(seed: int, width: int, union: str) -> None:
    """No key is selected twice, so that a mask's pairs are those of its lists."""
    one = drawn(seed)
    for sink in (False, True):
        mask = sp.build("rowmax", eps=0.05, block=24, union=union, width=width, sink=sink).run(one).mask
        assert (24, 24, 1, width, True) == (mask.tile_q, mask.tile_k, mask.group, mask.stripe_width, mask.disjoint)
        assert torch.equal(mask.to_dense().sum((2, 3)), mask.pairs())
        assert mask.density < 1.0
        tiles = evolve(mask, stripes=None).to_dense()
        assert not bool((tiles & evolve(mask, tiles=None).to_dense()).any())
        assert torch.equal(sp.SparseMask.from_rules(one, 24, band=0, sink=int(sink)).to_dense(), tiles)


def test_a_row_that_looks_far_back_gets_its_column_alone() -> None:
    q, k = torch.zeros(1, 1, 512, 16), torch.zeros(1, 1, 512, 16)
    q[0, 0, 480, 0], k[0, 0, 101, 0] = 20.0, 1.0
    found = estimator(0.2, 1, 64, width=16).kept(sp.AttentionCall(q, k, k))
    assert [101 // 16] == found[0, 0, 7].nonzero().flatten().tolist()


@pytest.mark.parametrize("times", [-1.0, None, True, "3"])
def test_times_that_are_none(times: Any) -> None:
    with pytest.raises(sp.ParameterError, match=r"^times is .*: pass a number from 0 to 1e\+12$"):
        RowMaxConfig(times=times)


def test_one_value_of_times_serves_short_rows_and_long_ones() -> None:
    """Among n columns of equal shares but one, that one is kept from `times` of their mean on, whatever n is."""
    for n in (8, 64):
        k = torch.zeros(1, 1, n * 16, 16)
        q = torch.zeros_like(k)
        q[..., -1, 0], k[..., 20, 0] = 4.0, math.log(3.0)  # a weight of 3 beside others' 1, in the second column
        for times, due in ((2.0, True), (3.0, False)):  # its share is 3 / (n + 2)
            kept = RowMaxEstimator(RowMaxConfig(eps=1.0, times=times, every=1, block=16, union="head")).kept(
                sp.AttentionCall(q, k, k)
            )
            assert due == bool(kept[0, 0, -1, 1])


def test_a_strong_share_of_one_head_keeps_a_column_for_its_kv_head() -> None:
    """Others' rows lie between those that a head looks at; a share below `strong` is the head's own affair."""
    q, k = torch.zeros(1, 4, 512, 16), torch.zeros(1, 2, 512, 16)
    k[:, :, 101, 0], q[0, 1, 480, 0] = 1.0, 23.25  # a share of .92, of head 1 alone
    kept = {}
    for strong in (1.0, 0.95, 0.5, 0.0):
        config = RowMaxConfig(eps=0.2, times=1e9, every=1, block=64, width=16, strong=strong)
        found = RowMaxEstimator(config).kept(sp.AttentionCall(q, k, k))
        kept[strong] = found[0, :, 7, 101 // 16].tolist()
    alone = [False, True, False, False]
    together = [True, True, False, False]
    assert {1.0: alone, 0.95: alone, 0.5: together, 0.0: together} == kept


@pytest.mark.parametrize("strong", [-0.1, 1.1, None, True, "1"])
def test_a_strong_share_that_is_none(strong: Any) -> None:
    with pytest.raises(sp.ParameterError, match=r"^strong is .*: pass a number from 0 to 1$"):
        RowMaxConfig(strong=strong)


@pytest.mark.parametrize("width", [0, 3, 48, 256, True, 2.0, "16"])
def test_a_width_that_is_none(width: Any) -> None:
    with pytest.raises(
        sp.ParameterError, match=r"^width is .*: pass a power of two that divides block(, 128)?, or None"
    ):
        RowMaxConfig(width=width)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 999), a=st.floats(0.001, 1.0), b=st.floats(0.001, 1.0), union=st.sampled_from(["head", "group"])
)
def test_a_smaller_eps_keeps_no_less(seed: int, a: float, b: float, union: str) -> None:
    one = drawn(seed)
    few, many = (estimator(eps, 3, union=union).kept(one) for eps in (max(a, b), min(a, b)))
    assert not bool((few & ~many).any())
    configs = (
        RowMaxConfig(eps=1.0, times=9 * x, every=3, block=24, union=union, width=8) for x in (max(a, b), min(a, b))
    )
    few, many = (RowMaxEstimator(config).kept(one) for config in configs)
    assert not bool((few & ~many).any())
    configs = (RowMaxConfig(strong=x, every=3, block=24, width=8) for x in (1.0, max(a, b), min(a, b)))
    for some, more in pairwise(RowMaxEstimator(config).kept(one) for config in configs):
        assert not bool((some & ~more).any())


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 999), every=st.sampled_from([(4, 2), (12, 4), (6, 1), (8, 8), (24, 3)]))
def test_more_rows_keep_no_less(seed: int, every: tuple[int, int]) -> None:
    one, (many, few) = drawn(seed, first_head=seed % 7), every
    places = []
    for n in every:
        rows = sampled_rows(one, 0, one.geometry.tile_rows(24), 24, Sampling(n, 1))
        places.append([set(row[real].tolist()) for row, real in zip(rows.index[0], rows.real[0], strict=True)])
    assert all(some <= all_ for some, all_ in zip(*places, strict=True))
    assert not bool((estimator(0.03, many).kept(one) & ~estimator(0.03, few).kept(one)).any())


def test_heads_look_at_different_rows_that_meet_all_together() -> None:
    one = drawn(0)
    rows = sampled_rows(one, 0, 2, 24, Sampling(4, 1))
    for tile in range(2):
        each = [set(head.unflatten(0, (2, -1))[tile].tolist()) for head in rows.position[0]]
        assert set(range((tile + 1) * 24, (tile + 2) * 24)) == set().union(*each)  # the call begins in tile 1
        assert 24 == sum(len(head) for head in each)


@pytest.mark.parametrize(
    ("heads", "every", "block", "stride"),
    [((4, 2), 2, 24, 4), ((8, 2), 2, 128, 8), ((6, 2), 2, 128, 4), ((16, 1), 2, 128, 32), ((16, 1), 3, 24, 24),
     ((4, 4), 2, 24, 2), ((14, 2), 1, 16, 4), ((4, 1), 1, 128, 4)],
)  # fmt: skip
def test_heads_of_a_union_share_the_rows(heads: tuple[int, int], every: int, block: int, stride: int) -> None:
    """Together one in `every`, at even distances, whatever their number; of a power of two, each row by one head."""
    group = heads[0] // heads[1]
    which = sampling(RowMaxConfig(every=every, block=block, union="group", width=None), group)
    assert Sampling(stride, every if group > 1 else 1) == which
    one = sp.AttentionCall(
        *(torch.zeros(1, n, 3 * block, 16) for n in (heads[0], heads[1], heads[1])), first_head=group
    )
    rows = sampled_rows(one, 0, 3, block, which).position[0].unflatten(1, (3, -1))
    for kv in range(heads[1]):
        for tile in range(3):
            looked_at = rows[kv * group : kv * group + group, tile].flatten().tolist()
            first = tile * block + (tile + (kv + 1 if group == 1 else 0)) % every
            assert set(range(first, tile * block + block, every)) == set(looked_at)
            if stride == every * group:
                assert len(set(looked_at)) == len(looked_at)
    assert all(len(head.flatten()) == 3 * block // stride for head in rows)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), eps=st.floats(0.01, 0.5))
def test_a_union_is_what_its_heads_keep(seed: int, eps: float) -> None:
    one = drawn(seed)
    config = RowMaxConfig(eps=eps, times=1e9, every=2, block=24, width=None, sink=False, union="group")
    each = maxima.shares(one, 24, 24, Sampling(4, 2))
    assert torch.equal((each >= eps).unflatten(1, (2, 2)).any(2), RowMaxEstimator(config).kept(one))
    mask = sp.build("rowmax", eps=eps, block=24, width=None, union="group").run(one).mask.to_dense()
    assert torch.equal(mask[:, 0::2], mask[:, 1::2])


@pytest.mark.parametrize("union", ["head", "group"])
def test_at_0_it_is_dense_to_the_bit(union: str) -> None:
    for dtype in (torch.float64, torch.float32, torch.float16):
        one = drawn(3)
        one = evolve(one, q=one.q.to(dtype), k=one.k.to(dtype), v=one.v.to(dtype))
        dense = sp.build("dense").run(one)
        all_of: tuple[dict[str, Any], ...] = ({"eps": 0.0}, {"times": 0.0})
        for everything in all_of:
            assert torch.equal(dense.out, sp.build("rowmax", union=union, **everything).run(one).out)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 99),
    length=st.integers(20, 150),
    cuts=st.lists(st.integers(1, 8), min_size=1, max_size=3, unique=True),
    union=st.sampled_from(["head", "group"]),
    width=st.sampled_from([None, 4]),
)
def test_cuts_at_the_grain_change_nothing(
    seed: int, length: int, cuts: list[int], union: str, width: int | None
) -> None:
    made = call(seed, (4, 2), length, 0)
    times, strong = [1e9, 2.0][seed % 2], [0.1, 1.0][seed // 2 % 2]
    pipeline = sp.build("rowmax", eps=0.05, times=times, every=2, block=16, union=union, width=width, strong=strong)
    assert (16, "group" if strong < 1 else union) == (pipeline.grain, pipeline.head_scope)
    whole = run(pipeline, made).mask.to_dense()
    bounds = [0, *sorted(cut * 16 for cut in cuts if cut * 16 < length), length]
    for first, last in pairwise(bounds):
        part = sp.AttentionCall(made["q"][:, :, first:last], made["k"][:, :, :last], made["v"][:, :, :last])
        assert torch.equal(whole[:, :, first:last, :last], pipeline.run(part).mask.to_dense())


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 99), front=st.integers(0, 40), back=st.integers(0, 40))
def test_padding_changes_nothing(seed: int, front: int, back: int) -> None:
    alone = call(seed, (2, 1), 90, 0)
    times, width = [1e9, 2.0][seed // 2 % 2], [None, 4][seed % 2]
    pipeline = sp.build("rowmax", eps=0.05, times=times, every=3, block=24, union="head", width=width)
    mask = run(pipeline, alone).mask.to_dense()
    padded = {x: torch.nn.functional.pad(alone[x], (0, 0, front, back), value=7.0) for x in "qkv"}
    rows = {"starts": [front], "lengths": [90]}
    found = run(pipeline, {**padded, "q_offset": 0, **rows}).mask.to_dense()
    inside = slice(front, front + 90)
    assert torch.equal(mask, found[:, :, inside, inside])


def test_one_row_that_looks_far_back_is_enough() -> None:
    """A row of 64 gives one key a fifth of its softmax: a mean over the tile's rows would not see it."""
    q, k = torch.zeros(1, 1, 512, 16), torch.zeros(1, 1, 512, 16)
    q[0, 0, 480, 0], k[0, 0, 101, 0] = 20.0, 1.0
    found = estimator(0.2, 1, 64).kept(sp.AttentionCall(q, k, k))
    assert [1] == found[0, 0, 7].nonzero().flatten().tolist()
    missed = estimator(0.2, 32, 64).kept(sp.AttentionCall(q, k, k))
    assert [] == missed[0, 0, 7].nonzero().flatten().tolist()  # rows 455 and 487 are looked at


def test_what_is_no_number_is_kept() -> None:
    one = drawn(5)
    one.k[:, 0, 60, 0] = torch.inf  # logits of both signs
    kept, tile = estimator(0.9, 1).kept(one), 60 // 24
    for h in range(2):
        for row in range(3, kept.shape[2]):
            seen = one.q[0, h, row * 24 - 16 : row * 24 + 8, 0]
            assert bool(kept[0, h, row, tile]) == bool((seen > 0).any())


# What is left for others.


def test_shares_are_left_as_priority_and_made_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    find = RowMaxEstimator.shares

    def counted(self: RowMaxEstimator, call: sp.AttentionCall) -> Tensor:
        asked.append(call)
        found: Tensor = find(self, call)
        return found

    monkeypatch.setattr(RowMaxEstimator, "shares", counted)
    one = drawn(4)
    for union, width in (("head", None), ("group", None), ("group", 8)):
        made = sp.build("rowmax", eps=0.05, every=4, block=24, union=union, width=width)
        plan = made.plan(one, sp.Memory())
        assert not asked
        assert plan.priority is not None
        scores = plan.priority.tile_scores(one, 24, 24) * 24
        assert 1 == len(asked)
        assert (1, 4, 7, 8) == tuple(scores.shape)
        shares = estimator(0.05, 4, union=union, width=width).shares(one)
        shares = shares if union == "head" else shares.repeat_interleave(2, 1)
        if width is not None:  # what the columns of a tile have together
            shares = torch.nn.functional.pad(shares, (0, -shares.shape[3] % 3)).unflatten(3, (-1, 3)).sum(4)
        torch.testing.assert_close(shares, scores)
        asked.clear()


def test_on_a_device_without_eight_bits_auto_is_exact() -> None:
    exact, auto = (sp.build("rowmax", precision=word).run(drawn(0)) for word in ("exact", "auto"))
    assert torch.equal(exact.out, auto.out)


def test_the_bound_of_its_memory_grows_with_what_it_holds() -> None:
    small, large = (
        estimator(0.05, 4).workspace(evolve(drawn(0), q_offset=0, q=drawn(0).q[:, :, :n])) for n in (30, 130)
    )
    assert 0 < small < large < estimator(0.05, 4, width=2).workspace(evolve(drawn(0), q_offset=0))
