"""Pages: what they yield, what they share, what they refuse; and calls made of them."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve

import sparseprefill as sp
from helpers.build import int32, make
from kernels.caches import copied, in_fp8, paged, untouched
from sparseprefill.breakeven.points import DeviceKind
from sparseprefill.breakeven.table import BreakEven
from sparseprefill.call import over
from sparseprefill.errors import InvalidCallError
from sparseprefill.executors.dense import dense
from sparseprefill.pages import Pages
from sparseprefill.parts.split import Part

K, V = torch.zeros(5, 16, 2, 8), torch.zeros(5, 16, 2, 6)
TABLE = int32(3, 0, 4)


def pages_of(call: sp.AttentionCall) -> Pages:
    assert call.pages is not None
    return call.pages


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC"])
@pytest.mark.parametrize("page", [1, 7, 16, 64])
def test_keys_and_values_are_those_of_the_cache(page: int, layout: str) -> None:
    plain = make(20, 41, heads=4, kv_heads=2)
    call = paged(plain, page, layout)
    pages = pages_of(call)
    assert (page, (1, 2, 41, 8), 8) == (pages.page, pages.shape, pages.value_dim)
    assert torch.equal(plain.k, call.k)
    assert torch.equal(plain.v, call.v)


def test_each_is_copied_once_when_it_is_asked_for() -> None:
    call = paged(make(20, 41), 16)
    pages = pages_of(call)
    assert frozenset() == pages.gathered
    k = call.k
    assert {"k"} == pages.gathered
    assert k is call.k
    assert k is evolve(call, layer=3).k
    assert {"k"} == pages.gathered
    assert call.v is pages.values()
    assert {"k", "v"} == pages.gathered


def test_a_copy_has_both() -> None:
    call = paged(make(20, 41, kv_heads=2), 16)
    k, v = pages_of(call).copy()
    assert (k is call.k, v is call.v) == (True, True)
    assert {"k", "v"} == pages_of(call).gathered


def test_the_call_of_another_layer_reads_other_pages() -> None:
    call, other = (paged(make(20, 41, kv_heads=2, seed=seed), 16) for seed in (0, 1))
    before, after = pages_of(call), pages_of(other)
    wanted, _ = call.k, call.geometry
    ways = {id(before.k): after.k, id(before.v): after.v, id(before.table): after.table, id(call.q): other.q}
    found = over(call, lambda x: ways[id(x)], 3)
    assert (3, False) == (found.layer, torch.equal(wanted, found.k))
    for one, mine in ((other.q, found.q), (other.k, found.k), (other.v, found.v)):
        assert torch.equal(one, mine)
    assert other.shape == found.shape == evolve(found).shape  # which checks it
    assert wanted is call.k


def test_parts_share_the_cache_and_the_copy() -> None:
    call = paged(make(20, 41, heads=6, kv_heads=3), 16)
    pages = pages_of(call)
    part = pages.narrow(slice(1, 3), 30)
    inner = part.narrow(slice(1, 2), 17)
    assert (1, 1, 17, 8) == inner.shape
    assert pages.k[:, :, 2].data_ptr() == inner.k.data_ptr()
    assert frozenset() == inner.gathered
    assert torch.equal(pages.keys()[:, 2:3, :17], inner.keys())
    assert inner.keys().data_ptr() == pages.keys()[:, 2:].data_ptr()
    assert {"k"} == part.gathered == inner.gathered
    assert torch.equal(inner.values(), pages.values()[:, 2:3, :17])


def test_a_part_of_a_call_is_one_of_pages() -> None:
    plain = make(40, 50, heads=6, kv_heads=3)
    call = paged(plain, 16)
    for part in (Part((2, 4), (0, 40)), Part((2, 4), (10, 25)), Part((3, 4), (0, 12))):
        found, expected = part.of(call), part.of(plain)
        assert untouched(call)
        assert untouched(found)
        assert expected.geometry.fits(found.geometry)
        assert (expected.kv_heads, expected.group) == (found.kv_heads, found.group)
        assert torch.equal(expected.k, evolve(pages_of(found)).keys())
        call = paged(plain, 16)


@pytest.mark.parametrize("fp8", [False, True])
def test_some_keys_and_values_are_read_alone(fp8: bool) -> None:
    plain = make(20, 41, heads=6, kv_heads=3)
    call = in_fp8(plain, 16) if fp8 else paged(plain, 16)
    for part in (call, Part((2, 6), (0, 15)).of(call)):
        index = torch.tensor([[0, 35, 17, 17, 16]])
        k, v = part.keys_at(index), part.values_at(index)
        assert untouched(call)
        there = copied(part)
        assert torch.equal(there.k[:, :, index[0]], k)
        assert torch.equal(there.v[:, :, index[0]], v)
        assert torch.equal(there.keys_at(index), k)


def test_sizes_are_known_without_a_copy() -> None:
    call = paged(make(20, 41, heads=4, kv_heads=2), 16)
    assert (2, 41, 8, 2) == (call.kv_heads, call.kv_len, call.value_dim, call.group)
    assert 21 == call.geometry.q_offset
    pipeline = sp.build("streaming", sink=4, window=8, block=8)
    assert () == pipeline.unsupported(call)
    pipeline.plan(call, sp.Memory())
    assert "no figures" in BreakEven(device=DeviceKind(type="cpu"), shapes=()).judge(call, "streaming").reason
    assert untouched(call)


def test_tensors_take_the_place_of_pages() -> None:
    plain = make(20, 41)
    call = paged(plain, 16)
    both = evolve(call, k=plain.k, v=plain.v)
    assert both.pages is None
    assert both.k is plain.k
    one = evolve(call, k=plain.k)
    assert one.pages is None
    assert one.k is plain.k
    assert frozenset() == pages_of(call).gathered
    assert torch.equal(plain.v, one.v)
    assert {"v"} == pages_of(call).gathered


@pytest.mark.parametrize("method", ["streaming", "bfla", "anchor-attention", "dense"])
def test_a_method_gives_what_it_gives_for_tensors(method: str) -> None:
    plain = make(70, 90, heads=4, kv_heads=2)
    call, pipeline = paged(plain, 16), sp.build(method)
    found, expected = pipeline.run(call), pipeline.run(plain)
    assert torch.equal(expected.out, found.out)
    assert torch.equal(expected.lse, found.lse)
    assert torch.equal(dense(plain, sp.AutoExecutor()).out, dense(call, sp.AutoExecutor()).out)


def test_numbers_of_an_fp8_cache_are_scaled() -> None:
    plain = make(20, 41, dtype=torch.float16)
    call = in_fp8(plain, 16)
    assert torch.float16 == call.k.dtype == call.v.dtype
    for expected, found in ((plain.k, call.k), (plain.v, call.v)):
        assert torch.allclose(expected, found, rtol=0.07, atol=0.01)
        assert not torch.equal(expected, found)


BAD_PAGES: dict[str, tuple[tuple[Any, ...], dict[str, Any], str, str, str]] = {
    "rank": ((K[0], V, TABLE, 40), {}, "pages.k", "(16, 2, 8)", "four dimensions"),
    "empty": ((K, V[..., :0], TABLE, 40), {}, "pages.v", "(5, 16, 2, 0)", "none of them empty"),
    "bytes": ((K.byte(), V.byte(), TABLE, 40), {}, "pages.k", "uint8", "floating-point"),
    "last stride": ((K.transpose(0, 3).contiguous().transpose(0, 3), V, TABLE, 40), {}, "pages.k", "strides", "be 1"),
    "other pages": ((K, V[:4], TABLE, 40), {}, "pages.v", "(4, 16, 2, 6)", "k's"),
    "other type": ((K, V.half(), TABLE, 40), {}, "pages.v", "float16", "k's"),
    "fp8 to compute in": (
        (K.to(torch.float8_e5m2), V.to(torch.float8_e5m2), TABLE, 40), {}, "pages.dtype", "float8_e5m2", "of q",
    ),
    "k of a list": (([0.0], V, TABLE, 40), {}, "pages.k", "[0.0]", "torch.Tensor"),
    "no v": ((K, None, TABLE, 40), {}, "pages.v", "None", "torch.Tensor"),
    "table of a list": ((K, V, [3, 0, 4], 40), {}, "pages.table", "[3, 0, 4]", "torch.Tensor"),
    "type by name": ((K, V, TABLE, 40), {"dtype": "float32"}, "pages.dtype", "'float32'", "of q"),
    "no type": ((K, V, TABLE, 40), {"dtype": None}, "pages.dtype", "None", "of q"),
    "integers to compute in": ((K, V, TABLE, 40), {"dtype": torch.int8}, "pages.dtype", "int8", "of q"),
    "scale of a number": ((K, V, TABLE, 40), {"k_scale": 2.0}, "pages.k_scale", "2.0", "one float32"),
    "scale of float32": ((K, V, TABLE, 40), {"k_scale": torch.ones(1)}, "pages.k_scale", "not fp8", "pass None"),
    "scale of values": ((K, V, TABLE, 40), {"v_scale": torch.ones(1)}, "pages.v_scale", "not fp8", "pass None"),
    "padding in use": ((K, V, int32(3, -1, 4), 40), {}, "pages.table", "from -1 to 4", "from 0 to 4"),
    "padding in use at the end": ((K, V, int32(3, 0, -1), 33), {}, "pages.table", "from -1 to 3", "from 0 to 4"),
    "page behind the cache": ((K, V, int32(3, 5, 4), 40), {}, "pages.table", "from 3 to 5", "from 0 to 4"),
    "scale of a head": ((K, V, TABLE, 40), {"k_scale": torch.ones(2)}, "pages.k_scale", "(2,)", "one float32"),
    "scale of 16 bits": ((K, V, TABLE, 40), {"v_scale": torch.ones(1).half()}, "pages.v_scale", "float16", "float32"),
    "copies of a word": ((K, V, TABLE, 40), {"copies": "never"}, "pages.copies", "'never'", "False"),
    "table of int64": ((K, V, TABLE.long(), 40), {}, "pages.table", "int64", "int32"),
    "table with holes": ((K, V, int32(1, 2, 3, 4, 5, 6)[::2], 40), {}, "pages.table", "(3,)", "contiguous"),
    "table of two rows": ((K, V, TABLE[None], 40), {}, "pages.table", "(1, 3)", "[n]"),
    "table elsewhere": ((K, V, TABLE.to("meta"), 40), {}, "pages.table", "meta", "cpu"),
    "no key": ((K, V, TABLE, 0), {}, "pages.length", "0", "from 1 to 2147483647"),
    "more keys than pages": ((K, V, TABLE, 49), {}, "pages.table", "3 entries", "pass 4 or more"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_PAGES.values(), ids=BAD_PAGES)
def test_what_does_not_fit_is_named_with_value_and_remedy(case: tuple[Any, ...]) -> None:
    given, fields, field, value, remedy = case
    with pytest.raises(InvalidCallError) as caught:
        Pages(*given, **fields)
    assert field == caught.value.field
    assert value in str(caught.value)
    assert remedy in str(caught.value)


@pytest.mark.parametrize(
    ("q", "field", "remedy"),
    [
        (torch.zeros(2, 4, 6, 8), "k", "one by one"),
        (torch.zeros(1, 4, 6, 8).half(), "k", "one dtype"),
        (torch.zeros(1, 4, 6, 4), "k", "q has 4"),
        (torch.zeros(1, 3, 6, 8), "q", "multiple of the 2 KV heads"),
        (torch.zeros(1, 4, 41, 8), "k", "cover the 41"),
    ],
)
def test_calls_check_their_pages(q: torch.Tensor, field: str, remedy: str) -> None:
    with pytest.raises(InvalidCallError, match=remedy) as caught:
        sp.AttentionCall.of_pages(q, Pages(K, V, TABLE, 40))
    assert field == caught.value.field


def test_values_on_the_device_are_not_read() -> None:
    k, v, table = (x.to("meta") for x in (K, V, TABLE))
    call = sp.AttentionCall.of_pages(torch.zeros(1, 4, 6, 8, device="meta"), Pages(k, v, table, 40))
    assert (40, 6) == (call.kv_len, call.value_dim)
    index = torch.zeros(1, 3, dtype=torch.int64, device="meta")
    assert ((1, 2, 3, 8), (1, 2, 3, 6)) == (call.keys_at(index).shape, call.values_at(index).shape)


def test_a_table_may_be_padded_behind_the_pages_in_use() -> None:
    k = torch.randn(5, 16, 2, 8)
    padded, plain = (Pages(k, k, table, 32) for table in (int32(3, 0, -1, 7), int32(3, 0)))
    assert torch.equal(plain.keys(), padded.keys())
    assert torch.equal(plain.values(), padded.values())
    with pytest.raises(InvalidCallError, match="from -1 to 3"):
        evolve(padded, length=33)


@pytest.mark.parametrize("index", [[-1], [40], [0, 47], [39, 40]])
def test_keys_that_are_not_there_are_not_read(index: list[int]) -> None:
    """Slots of a page behind the last key hold what an earlier request left there."""
    pages, given = Pages(K, V, TABLE, 40), torch.tensor(index)
    for read in (pages.keys_at, pages.values_at):
        with pytest.raises(InvalidCallError, match="pass numbers from 0 to 39") as caught:
            read(given)
        assert "index" == caught.value.field
    assert (1, 2, 2, 8) == pages.keys_at(torch.tensor([0, 39])).shape


@pytest.mark.parametrize("given", [K.transpose(1, 2), None, "pages"])
def test_a_call_of_pages_is_made_of_pages(given: Any) -> None:
    with pytest.raises(InvalidCallError, match="pass Pages, which hold K and V") as caught:
        sp.AttentionCall.of_pages(torch.zeros(5, 4, 6, 8), given)
    assert "pages" == caught.value.field
