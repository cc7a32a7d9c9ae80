"""Which pages the Hopper kernel reads, and what happens to the others; no GPU is needed to say so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve

from helpers.families import chosen, only, refused
from kernels.caches import LAYOUTS, in_fp8, paged, untouched
from sparseprefill import AttentionCall, Plan, ReferenceExecutor, SparseMask, output_error
from sparseprefill.executors.triton import TritonExecutor
from sparseprefill.kernels.attention import launch as attention
from sparseprefill.kernels.family.known import known
from sparseprefill.kernels.hopper.record import HOPPER
from sparseprefill.pages import Pages
from sparseprefill.testing import tensors

launch = pytest.importorskip("sparseprefill.kernels.hopper.launch")
from sparseprefill.kernels.source import Source  # noqa: E402 - behind what may skip all of it


def call(dtype: torch.dtype = torch.float16, width: int = 64, **more: Any) -> AttentionCall:
    q, k, v = tensors("random", batch=1, heads=4, kv_heads=2, q_len=200, kv_len=200, head_dim=width, dtype=dtype)
    return AttentionCall(q, k, v, **more)


def pages_of(given: AttentionCall) -> Pages:
    assert given.pages is not None
    return given.pages


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_takes_pages_of_powers_of_two(dtype: torch.dtype, page: int, layout: str) -> None:
    given = paged(call(dtype, 128), page, layout)
    assert refused(HOPPER, given, SparseMask.full(given, 128)) is None
    narrow = pages_of(given).narrow(slice(1, 2), 150)
    part = evolve(given, q=given.q[:, 2:, :100], k=narrow, v=narrow)
    assert refused(HOPPER, part, SparseMask.full(part, 128)) is None
    assert untouched(given)


def apart(given: AttentionCall) -> AttentionCall:
    """K and V in caches of their own, of unlike strides."""
    pages = pages_of(given)
    return AttentionCall.of_pages(given.q, evolve(pages, v=pages.v.contiguous()))


def shifted(given: AttentionCall) -> AttentionCall:
    """Rows that begin four bytes behind a multiple of sixteen."""
    pages = pages_of(given)
    wide = torch.zeros(*pages.k.shape[:3], 72, dtype=pages.k.dtype)[..., 2:66]
    return AttentionCall.of_pages(given.q, evolve(pages, k=wide, v=wide))


def as_float32(given: AttentionCall) -> AttentionCall:
    """Pages of float32 that are read as halves."""
    pages = pages_of(given)
    return AttentionCall.of_pages(given.q, evolve(pages, k=pages.k.float(), v=pages.v.float(), dtype=given.q.dtype))


STARTS = torch.tensor([5], dtype=torch.int32)
REFUSED = {
    "float32": (as_float32(paged(call(), 16)), "pages of torch.float32"),
    "48 tokens": (paged(call(), 48), "pages of 48 tokens"),
    "8 tokens": (paged(call(), 8), "pages of 8 tokens"),
    "padding": (paged(call(starts=STARTS), 16), "padding"),
    "unlike strides": (apart(paged(call(), 16)), "differ in strides"),
    "unaligned": (shifted(paged(call(), 16)), "16 bytes"),
}


@pytest.mark.parametrize("page", [16, 128])
@pytest.mark.parametrize("fp8", launch.FORMATS, ids=str)
def test_takes_fp8_unless_steps_may_be_left_out(fp8: torch.dtype, page: int) -> None:
    given = in_fp8(call(), page, stored=fp8)
    mask = SparseMask.full(given, 128)
    assert refused(HOPPER, given, mask) is None
    assert "float8" in refused(HOPPER, given, mask, skips=True)


@pytest.mark.parametrize(("given", "reason"), REFUSED.values(), ids=REFUSED)
def test_refuses_others_with_the_reason(given: AttentionCall, reason: str) -> None:
    assert reason in refused(HOPPER, given, SparseMask.full(given, 128))


def test_what_it_would_serve_as_tensors_is_copied_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, HOPPER)
    taken, mask = paged(call(), 16), SparseMask.full(call(), 128)
    assert chosen(taken, mask).call is taken
    assert untouched(taken)
    given = as_float32(paged(call(), 16))
    choice = chosen(given, mask)
    copy = choice.call
    assert (choice.family.name, choice.reason) == ("hopper", "")
    assert copy.pages is None
    assert torch.equal(copy.k, given.k)
    assert refused(HOPPER, copy, mask) is None
    assert {"k", "v"} == pages_of(given).gathered


LONG = launch.LONG


def long(rows: int, keys: int) -> AttentionCall:
    fields: dict[str, Any] = {"batch": 1, "heads": 1, "kv_heads": 1, "q_len": rows, "kv_len": keys, "head_dim": 64}
    return AttentionCall(*tensors("random", dtype=torch.float16, **fields))


@pytest.mark.parametrize(
    ("rows", "keys", "page", "tiles", "copied"),
    [
        (LONG // 8, LONG, 16, True, True),
        (LONG // 8, LONG, 64, True, True),
        (LONG // 8 - 1, LONG, 16, True, False),
        (LONG // 8, LONG - 1, 16, True, False),
        (LONG // 8, LONG, 128, True, False),
        (LONG // 8, LONG, 16, False, False),
    ],
    ids=["few rows", "larger pages", "fewer rows", "short", "pages of a step", "stripes alone"],
)
def test_small_pages_of_long_prompts_are_copied_for_it(
    rows: int, keys: int, page: int, tiles: bool, copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, HOPPER)
    given = paged(long(rows, keys), page)
    nothing = torch.zeros(1, dtype=torch.bool)
    made = SparseMask.from_tiles(given, nothing, 128), SparseMask.from_stripes(given, nothing, 64, diagonal=False)
    mask = made[0] if tiles else made[1]
    choice = chosen(given, mask)
    assert choice.family.name == "hopper"
    assert (choice.call.pages is None) is copied
    assert (pages_of(given).gathered == {"k", "v"}) is copied
    assert untouched(given) is not copied


@pytest.mark.parametrize(("rows", "copied"), [(LONG // 64, True), (LONG // 64 - 1, False)])
def test_where_every_key_is_read_a_copy_pays_sooner(rows: int, copied: bool) -> None:
    given = paged(long(rows, LONG), 16)
    assert launch.better_copied(given, SparseMask.full(given, 128)) is copied
    one = torch.ones(1, dtype=torch.bool)
    assert not launch.better_copied(given, SparseMask.from_tiles(given, one, 128)), "of other masks nobody knows"


@pytest.mark.parametrize(("kind", "rows"), [("full", 8), ("tiles", 16), ("stripes", 32)])
@pytest.mark.parametrize("page", [16, 128])
def test_an_fp8_cache_is_copied_where_its_keys_are_read_often(page: int, kind: str, rows: int) -> None:
    one = torch.ones(1, dtype=torch.bool)
    for count in (rows, rows - 1):
        given = in_fp8(long(count, 512), page)
        masks = {
            "full": lambda given: SparseMask.full(given, 128),
            "tiles": lambda given: SparseMask.from_tiles(given, one, 128),
            "stripes": lambda given: SparseMask.from_stripes(given, one, 64, diagonal=False),
        }
        assert launch.better_copied(given, masks[kind](given)) is (count == rows)


@pytest.mark.parametrize("given", [in_fp8(long(64, 512), 16), *(given for given, _ in REFUSED.values())])
def test_pages_that_may_not_be_copied_are_read_in_place(given: AttentionCall, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, HOPPER)
    mask = SparseMask.full(given, 128)
    choice = chosen(given, mask)
    assert (choice.family.name, choice.call.pages) == ("hopper", None), "copied, if they may be"
    pages = evolve(pages_of(given), copies=False)
    kept = evolve(given, k=pages, v=pages)
    choice = chosen(kept, mask)
    assert choice.call is kept
    assert choice.family.name == ("portable" if choice.reason else "hopper")
    assert attention.shares(kept, mask, known())
    assert untouched(kept)


def test_a_large_fp8_cache_is_never_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    given = in_fp8(long(512, 512), 16)
    assert launch.better_copied(given, SparseMask.full(given, 128))
    monkeypatch.setattr(launch, "COPY", 2 * 2 * 512 * 64 - 1)
    assert not launch.better_copied(given, SparseMask.full(given, 128))


def test_more_than_a_gigabyte_is_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    given = paged(long(LONG // 8, LONG), 16)
    mask = SparseMask.full(given, 128)
    assert launch.better_copied(given, mask)
    monkeypatch.setattr(launch, "COPY", 2 * 2 * LONG * 64 - 1)
    assert not launch.better_copied(given, mask)


@pytest.mark.parametrize("more", [{"window": 50}, {"softcap": 3.0}])
def test_what_it_would_not_serve_anyway_is_read_in_place(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, HOPPER)
    given = in_fp8(call(**more), 16)
    mask = SparseMask.full(given, 128)
    choice = chosen(given, mask)
    assert choice.call is given
    assert choice.family.name == "portable"
    assert choice.reason == "hopper: a sliding window or softcap"
    found = TritonExecutor().execute(given, Plan(mask))
    assert untouched(given)
    assert output_error(found.out, ReferenceExecutor().execute(given, Plan(mask)).out) <= 2e-3


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("page", "rows", "columns"), [(16, 16, 64), (64, 64, 64), (128, 128, 128), (256, 128, 128)])
def test_blocks_of_the_copy_engine_lie_within_a_page(page: int, rows: int, columns: int, layout: str) -> None:
    source = Source.of(paged(call(width=128), page, layout))
    for one, x in zip(launch.cache_descriptors(source, 128), (source.k, source.v), strict=True):
        assert [1, 1, rows, columns] == one.block_shape
        assert one.base.data_ptr() == x.data_ptr()
        assert torch.equal(one.base[1, 1, 3], x[1, 3, 1]) or bool(x[1, 3, 1].isnan().any())
        assert (list(one.base.shape), list(one.base.stride())) == (one.shape, one.strides)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_key_is_found_by_rows(layout: str) -> None:
    """As the producer of the kernel does it: row ``page * rows of a page + slot`` of a head."""
    given = paged(call(), 16, layout)
    source, table = Source.of(given), pages_of(given).table
    per_page, head, row = launch.page_strides(source.k)
    for key in (0, 15, 16, 77, 199):
        at = (int(table[key // 16]) * per_page + key % 16) * row + 1 * head
        found = source.k.as_strided((64,), (1,), source.k.storage_offset() + at)
        assert torch.equal(found, pages_of(given).keys()[0, 1, key])
