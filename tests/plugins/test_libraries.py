"""Kernels of FlashAttention-4 and FlashInfer: what they are given, and what they have against a call.

Where the libraries are not installed, PyTorch plays their parts, from the lists that they are given and nothing else.
"""

from __future__ import annotations

import importlib.util
import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from attrs import evolve
from sparseprefill.plugins.libraries import common, flash_attention_4, flashinfer, sparseprefill_kernels
from sparseprefill.plugins.libraries.causal import causal
from sparseprefill.plugins.libraries.flash_attention_4 import FLASH_ATTENTION_4
from sparseprefill.plugins.libraries.flashinfer import FLASHINFER
from torch import Tensor

import sparseprefill as sp
from helpers.families import only, refused
from helpers.modules import as_module
from sparseprefill.executors.triton import TritonExecutor
from sparseprefill.kernels.family.record import Family
from sparseprefill.plan import Kernel
from sparseprefill.testing import tensors
from sparseprefill.testing.kernels import check_kernel
from sparseprefill.testing.truth import difference

HERE = {"flash-attention-4": "flash_attn.cute", "flashinfer": "flashinfer"}


class BlockSparseTensorsTorch(NamedTuple):
    """The fields of flash-attn-4's class, in its order."""

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor
    full_block_idx: Tensor
    cu_total_m_blocks: Tensor | None = None
    cu_block_idx_offsets: Tensor | None = None
    block_size: tuple[int, int] | None = None


def softmax(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Out and natural LSE over the pairs `keep`, float32; NaN out of rows without one, as a library may leave it."""
    logits = (q.float() @ k.float().mT * scale).masked_fill(~keep, -torch.inf)
    return torch.softmax(logits, -1) @ v.float(), torch.logsumexp(logits, -1)


def listed(counts: Tensor, index: Tensor, rows: int, keys: int, block: tuple[int, int]) -> Tensor:
    """bool ``[B, H, rows, keys]``: the pairs of the blocks that lists name."""
    entry = torch.arange(index.shape[-1]) < counts[..., None]
    maps = torch.zeros(*index.shape[:-1], -(-keys // block[1]) + 1, dtype=torch.bool)
    maps.scatter_(-1, torch.where(entry, index, maps.shape[-1] - 1).long(), True)
    return maps[..., :-1].repeat_interleave(block[0], 2)[:, :, :rows].repeat_interleave(block[1], 3)[..., :keys]


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Blocks as the lists say, and `mask_mod` inside the partial ones alone."""
    lists, block = options.pop("block_sparse_tensors"), None
    assert set(options) == {"softmax_scale", "mask_mod", "pack_gqa", "return_lse"}
    assert (options["pack_gqa"], options["return_lse"]) == (False, True)
    assert all(x.is_contiguous() for x in (q, k, v, *lists[:4]))
    assert all(x.dtype == torch.int32 and x.shape[:2] == (q.shape[0], q.shape[2]) for x in lists[:4])
    block, n, m = lists.block_size, q.shape[1], k.shape[1]
    assert block[0] % 128 == 0
    assert block[1] == 128
    assert lists.mask_block_idx.shape[2:] == (-(-n // block[0]), -(-m // 128))
    partial, full = (listed(lists[at], lists[at + 1], n, m, block) for at in (0, 2))
    info = SimpleNamespace(seqlen_q=n, seqlen_k=m)
    seen = options["mask_mod"](0, 0, torch.arange(n)[:, None], torch.arange(m)[None], info, None)
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    out, lse = softmax(q, k, v, full | (partial & seen), options["softmax_scale"])
    return out.to(q.dtype).transpose(1, 2), lse


class VariableBlockSparseAttentionWrapper:
    """Each block row over the keys of its blocks, one behind the other, and bottom-right causal among them."""

    def __init__(self, buffer: Tensor) -> None:
        assert (buffer.dtype, buffer.numel()) == (torch.uint8, flashinfer.WORKSPACE)

    def plan(
        self, maps: Tensor, rows: Tensor, columns: Tensor, heads: int, kv_heads: int, dim: int, **options: Any
    ) -> None:
        """What `run` goes by."""
        assert maps.shape == (kv_heads, rows.shape[1], columns.shape[1])
        assert (maps.dtype, rows.dtype, columns.dtype) == (torch.bool, torch.int32, torch.int32)
        self.maps, self.rows, self.columns, self.group, self.options = maps, rows, columns, heads // kv_heads, options

    def run(self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool) -> tuple[Tensor, Tensor]:
        """Out ``[Hq, N, D]`` and LSE ``[Hq, N]`` in base 2."""
        assert return_lse
        assert q.dtype == self.options["q_data_type"]
        assert q.shape[1] == int(self.rows[0].sum())
        assert k.shape[1] == int(self.columns[0].sum())
        out, lse = torch.empty(q.shape), torch.empty(q.shape[:2])
        for h in range(q.shape[0]):
            kv, begin = h // self.group, 0
            for r, count in enumerate(self.rows[kv].tolist()):
                of = self.maps[kv, r].repeat_interleave(self.columns[kv]).nonzero()[:, 0]
                x, place = q[h, begin : begin + count], torch.arange(len(of))
                last = len(of) - count + torch.arange(count)[:, None]
                keep = place <= last if self.options["causal"] else torch.ones(count, len(of), dtype=torch.bool)
                cap = self.options["logits_soft_cap"]
                logits = x.float() @ k[kv, of].float().T * self.options["sm_scale"]
                logits = logits if cap is None else cap * torch.tanh(logits / cap)
                logits = logits.masked_fill(~keep, -torch.inf)
                out[h, begin : begin + count] = torch.softmax(logits, -1) @ v[kv, of].float()
                lse[h, begin : begin + count] = torch.logsumexp(logits, -1) / math.log(2)
                begin += count
        return out.to(q.dtype), lse


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both libraries, played by PyTorch; a CuTe function is the Python function that it is written as."""
    monkeypatch.setattr(flash_attention_4, "missing", lambda *_: None)
    monkeypatch.setattr(flashinfer, "missing", lambda *_: None)
    as_module("cutlass", monkeypatch, Int32=int)
    as_module("cutlass.cute", monkeypatch, jit=lambda function: function)
    as_module("flash_attn.cute", monkeypatch, flash_attn_func=flash_attn_func)
    as_module("flash_attn.cute.utils", monkeypatch, scalar_to_ssa=lambda number, _: number)
    as_module("flash_attn.cute.block_sparsity", monkeypatch, BlockSparseTensorsTorch=BlockSparseTensorsTorch)
    wrapper = VariableBlockSparseAttentionWrapper
    as_module("flashinfer", monkeypatch, VariableBlockSparseAttentionWrapper=wrapper)
    for made in (causal, flashinfer._wrapper):
        made.cache_clear()


def call(q_len: int = 300, kv_len: int = 300, **more: Any) -> sp.AttentionCall:
    sizes: dict[str, Any] = {"batch": 1, "heads": 4, "kv_heads": 2, "head_dim": 64, **more.pop("sizes", {})}
    return sp.AttentionCall(*tensors("random", dtype=torch.float16, q_len=q_len, kv_len=kv_len, **sizes), **more)


def tiles(given: sp.AttentionCall, share: float, heads: int, tile: int = 128, diagonal: bool = True) -> sp.SparseMask:
    g = given.geometry
    shape = (g.batch, heads, g.tile_rows(tile), g.tile_columns(tile))
    keep = torch.rand(shape, generator=torch.Generator().manual_seed(5)) < share
    keep = keep.repeat_interleave(g.heads // heads, 1) if 1 < heads < g.heads else keep
    return sp.SparseMask.from_tiles(given, keep, tile, diagonal=diagonal)


def by_group(given: sp.AttentionCall, mask: sp.SparseMask) -> sp.SparseMask:
    """The union over the heads of each KV head, which the mask knows to be the same."""
    return evolve(mask, tiles=mask.as_map().united(given.group))


def held(family: Family, given: sp.AttentionCall, mask: sp.SparseMask, patch: pytest.MonkeyPatch) -> sp.Result:
    """The kernel's result, held against the reference."""
    only(patch, family)
    result = TritonExecutor().execute(given, sp.Plan(mask))
    assert result.kernels == (Kernel(family.name),)
    truth = sp.ReferenceExecutor().execute(given, sp.Plan(mask))
    assert difference(truth.out, result.out, torch.float16) is None
    assert difference(truth.lse, result.lse, torch.float16) is None
    return result


def test_the_plugin_offers_both() -> None:
    assert [one.name for one in sparseprefill_kernels()] == list(HERE)


def test_flash_attention_4_keeps_the_laws() -> None:
    report = check_kernel(evolve(FLASH_ATTENTION_4, rank=20), calls=[call(140, 268), call(), call(256, 384)])
    assert {"output == softmax over the mask", "NaN of an unselected key stays out", "pages == tensors"} <= set(
        report.cases
    )


@pytest.mark.parametrize("diagonal", [True, False])
@pytest.mark.parametrize("lengths", [(300, 300), (140, 268), (256, 512)])
@pytest.mark.parametrize("heads", [1, 4])
def test_flash_attention_4_computes_the_mask(
    heads: int, lengths: tuple[int, int], diagonal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = call(*lengths)
    result = held(FLASH_ATTENTION_4, given, tiles(given, 0.4, heads, diagonal=diagonal), monkeypatch)
    if not diagonal and lengths == (300, 300):
        assert bool((result.lse == -torch.inf).any()), "rows without a key are among them"


def test_flash_attention_4_takes_values_of_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    given = call(sizes={"head_dim": 192})
    given = evolve(given, v=given.v[..., :128].contiguous())
    held(FLASH_ATTENTION_4, given, tiles(given, 0.5, 4), monkeypatch)


@pytest.mark.parametrize("diagonal", [True, False])
@pytest.mark.parametrize("lengths", [(300, 300), (140, 268), (100, 333)])
@pytest.mark.parametrize("tile", [64, 128])
def test_flashinfer_computes_the_mask(
    tile: int, lengths: tuple[int, int], diagonal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = call(*lengths)
    mask = by_group(given, tiles(given, 0.3, 4, tile, diagonal))
    result = held(FLASHINFER, given, mask, monkeypatch)
    if not diagonal and lengths == (300, 300):
        assert bool((result.lse == -torch.inf).any()), "rows without a key are among them"


def test_flashinfer_serves_a_softcap_empty_masks_and_one_mask_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    given = call(softcap=2.0)
    held(FLASHINFER, given, sp.SparseMask.full(given), monkeypatch)
    held(FLASHINFER, given, sp.SparseMask.from_rules(given, 128, sink=1), monkeypatch)
    none = held(FLASHINFER, given, tiles(given, 0.0, 1, diagonal=False), monkeypatch)
    assert not bool(none.out.any())


def test_flashinfer_keeps_the_laws() -> None:
    one = call(sizes={"heads": 2, "kv_heads": 2})
    report = check_kernel(evolve(FLASHINFER, rank=20), calls=[one, evolve(one, softcap=5.0)])
    assert {"output == softmax over the mask", "NaN of an unselected key stays out", "pages == tensors"} <= set(
        report.cases
    )


def refusals() -> dict[str, tuple[Family, sp.AttentionCall, sp.SparseMask, str]]:
    plain = call()
    cases: dict[str, tuple[Family, sp.AttentionCall, Any, str]] = {}
    for family in (FLASH_ATTENTION_4, FLASHINFER):
        of = family.name
        early = call(128, 384, q_offset=128)
        cases[f"{of} end"] = (family, early, sp.SparseMask.full(early), "keys behind the last query row")
        columns = sp.SparseMask.from_stripes(plain, torch.ones(19, dtype=torch.bool), width=16)
        cases[f"{of} columns"] = (family, plain, columns, "columns of 16 keys in the mask")
        window = call(window=50)
        cases[f"{of} window"] = (family, window, sp.SparseMask.full(window), "a sliding window or softcap")
        sinks = call(sinks=torch.zeros(4))
        cases[f"{of} sinks"] = (family, sinks, sp.SparseMask.full(sinks), "sinks")
        padded = call(lengths=torch.tensor([200], dtype=torch.int32))
        cases[f"{of} padding"] = (family, padded, sp.SparseMask.full(padded), "padding")
        single = sp.AttentionCall(*(x.float() for x in (plain.q, plain.k, plain.v)))
        reason = "torch.float32 with head dimension 64"
        cases[f"{of} float32"] = (family, single, sp.SparseMask.full(single), reason)
    tile = sp.SparseMask.full(plain, 64)
    reason = "tiles of 64 x 64; it takes 128 x 128 on this chip"
    cases["flash-attention-4 tile"] = (FLASH_ATTENTION_4, plain, tile, reason)
    odd = call(100, 333)
    reason = "a first query row inside a tile"
    cases["flash-attention-4 first"] = (FLASH_ATTENTION_4, odd, sp.SparseMask.full(odd), reason)
    oblong, reason = sp.SparseMask.full(plain, (128, 64)), "tiles of 128 x 64; it takes equal sides"
    cases["flashinfer tile"] = (FLASHINFER, plain, oblong, reason)
    reason = "query heads of one KV head with tiles of their own"
    cases["flashinfer heads"] = (FLASHINFER, plain, tiles(plain, 0.5, 4), reason)
    two = call(sizes={"batch": 2})
    cases["flashinfer batch"] = (FLASHINFER, two, sp.SparseMask.full(two), "several batch rows")
    return cases


@pytest.mark.parametrize("name", refusals())
def test_a_refusal_has_its_reason(name: str) -> None:
    family, given, mask, reason = refusals()[name]
    assert refused(family, given, mask) == reason


@pytest.mark.parametrize("family", [FLASH_ATTENTION_4, FLASHINFER], ids=lambda one: str(one.name))
def test_what_a_launch_asks_beyond_attention_is_refused(family: Family) -> None:
    given = call()
    mask = sp.SparseMask.full(given)
    wants = ("skips", "carry", "state", "together")
    reasons = [refused(family, given, mask, **{one: True}) for one in wants]
    assert None not in reasons
    assert len(set(reasons)) == len(wants)
    assert refused(family, given, mask) is None


def test_from_capability_10_a_block_has_256_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention_4, "capability", lambda _: (10, 0))
    given, short = call(512, 512), call(100, 228)
    wanted = "tiles of 128 x 128; it takes 256 x 128 on this chip"
    assert refused(FLASH_ATTENTION_4, given, sp.SparseMask.full(given)) == wanted
    assert refused(FLASH_ATTENTION_4, given, sp.SparseMask.full(given, (256, 128))) is None
    assert refused(FLASH_ATTENTION_4, short, sp.SparseMask.full(short)) is None, "one program has them all"
    held(FLASH_ATTENTION_4, given, sp.SparseMask.full(given, (256, 128)), monkeypatch)


@pytest.mark.parametrize("module", [flash_attention_4, flashinfer], ids=lambda one: str(one.__name__))
def test_what_is_not_installed_says_how_to_get_it(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    family = next(one for one in sparseprefill_kernels() if one.launch is module.launch)
    package = HERE[family.name]

    def missing(name: str) -> None:
        if "." in name:
            raise ModuleNotFoundError(name)

    monkeypatch.setattr(module, "missing", common.missing)
    monkeypatch.setattr(common, "find_spec", missing)
    common.missing.cache_clear()
    given = call()
    wanted = f'{package} is not installed: pip install -e ".[{family.name}]" in a clone of sparseprefill'
    assert refused(family, given, sp.SparseMask.full(given)) == wanted
    common.missing.cache_clear()


@pytest.mark.parametrize(
    ("chip", "before"),
    [((9, 0), {"flash-attention-4": True, "flashinfer": False}), ((8, 0), {"flashinfer": True}),
     ((10, 0), {"flash-attention-4": True}), ((12, 0), {})],
)  # fmt: skip
def test_they_come_first_where_no_kernel_is_tuned(chip: tuple[int, int], before: dict[str, bool]) -> None:
    hopper, portable = (sp.default_registry().find("kernel", name) for name in ("hopper", "portable"))
    places = {one.name: one.place(chip) for one in sparseprefill_kernels()}
    assert before == {name: place > portable.rank for name, place in places.items() if place is not None}
    assert hopper.place(chip) is None or all(place is None or place < hopper.place(chip) for place in places.values())


@pytest.mark.gpu
# FlashAttention-4 4.0.0b36 hands CuTe a type of its own, of which CuTe warns.
@pytest.mark.filterwarnings("ignore:Argument aux_data")
@pytest.mark.parametrize("name", HERE)
def test_the_library_itself_keeps_the_laws(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On calls and masks as above, with the library in the place of its stand-in."""
    monkeypatch.undo()
    try:
        there = importlib.util.find_spec(HERE[name]) is not None
    except ModuleNotFoundError:
        there = False
    if not there:
        pytest.skip(f"{HERE[name]} is not installed")
    family = next(one for one in sparseprefill_kernels() if one.name == name)
    chip = torch.cuda.get_device_capability()
    if family.place(chip) is None:
        pytest.skip(f"{name} does not run on {chip}")
    for made in (causal, flashinfer._wrapper):
        made.cache_clear()
    # From capability 10.0 FlashAttention-4 takes tiles of 128 rows where one program has them all.
    lengths = ((1100, 1100), (300, 1068)) if chip[0] < 10 else ((100, 100), (100, 868))
    shape: dict[str, Any] = {"batch": 1, "heads": 4, "kv_heads": 4, "device": torch.device("cuda")}
    calls = []
    for dtype in (torch.float16, torch.bfloat16):
        for dim, values in sorted(family.features.dims):
            for q_len, kv_len in lengths:
                q, k, v = tensors("random", dtype=dtype, q_len=q_len, kv_len=kv_len, head_dim=dim, **shape)
                calls.append(sp.AttentionCall(q, k, v[..., :values].contiguous()))
    report = check_kernel(family, calls=calls)
    assert report.cases["output == softmax over the mask"] == len(calls)
