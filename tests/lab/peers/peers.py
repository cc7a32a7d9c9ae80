"""Other kernels that attend densely or by blocks, each called as its makers mean it, with its lists from our mask."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from attrs import frozen
from sparseprefill.plugins.libraries.causal import causal
from sparseprefill.plugins.libraries.flash_attention_4 import FLASH_ATTENTION_4
from sparseprefill.plugins.libraries.flashinfer import FLASHINFER
from torch import Tensor

from lab.bench.baseline import APART, FLASH4, dense_of
from lab.bench.case import Part
from lab.bench.dense import ANY, KERNELS
from sparseprefill.call import AttentionCall
from sparseprefill.errors import UnsupportedCallError
from sparseprefill.executors.auto import AutoExecutor
from sparseprefill.executors.triton import TritonExecutor
from sparseprefill.kernels.family.choose import afresh
from sparseprefill.kernels.family.record import Family, Wanted
from sparseprefill.mask.lists import IndexLists
from sparseprefill.mask.mask import SparseMask
from sparseprefill.plan import Plan

OURS = "sparseprefill"
FP8_APART = 0.1
"""How far the output of an fp8 kernel may be off, as a share of its norm: its inputs have three bits of mantissa."""
FULL = (Part("full"),)
RECOMPILED = 64
"""Kernels that PyTorch may compile of FlexAttention in one process: one for each length and kind of mask."""

Mask = tuple[SparseMask, tuple[Part, ...]]


@frozen(eq=False, kw_only=True)
class Work:
    """One kernel's work on one mask, with everything that it reads on the device.

    run: what is timed. out: its output ``[B, Hq, N, D]`` of what `run` gives. plan: makes the kernel's lists from our
    mask's maps; None where there are none to make. keep: bool ``[B, Hq, n, N]``, the pairs that it computes for some
    query rows. pairs: of these, those that count.
    """

    run: Callable[[], Any]
    out: Callable[[Any], Tensor]
    keep: Callable[[Tensor], Tensor]
    pairs: int
    plan: Callable[[], Any] | None = None


@frozen(kw_only=True)
class Features:
    """What a kernel can do on Hopper, in a word or two each."""

    causal: str = "yes"
    gqa: str = "yes"
    paged: str = "no"
    lse: str = "yes"
    stripes: str = "no"
    fp8: str = "no"


def _nothing() -> None:
    """For what comes with PyTorch."""


@frozen(kw_only=True)
class Peer:
    """A kernel. device: the type that it runs on, empty for any. dense: whether it knows the full mask alone.

    make: its work on a mask; UnsupportedCallError or MaskError for what it cannot take. load: imports what it needs.
    install: how to get that. within: how far its output may be off.
    """

    name: str
    features: Features
    make: Callable[[AttentionCall, Mask], Work]
    load: Callable[[], object] = _nothing
    device: str = "cuda"
    dense: bool = False
    install: str = ""
    within: float = APART

    def missing(self, device: torch.device) -> str:
        """Why it cannot run here, empty where it can."""
        if self.device not in ("", device.type):
            return "needs a CUDA device" if self.device == "cuda" else "stands in where there is no CUDA device"
        return _failure(self.load)


@cache
def _failure(load: Callable[[], object]) -> str:
    try:
        load()
    except Exception as error:
        # Packages of others fail to import in their own ways, such as for a library of CUDA that is not there.
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
    return ""


def _ours(call: AttentionCall, mask: Mask) -> Work:
    ours, parts = mask
    plan, executor = Plan(ours), AutoExecutor()
    return Work(
        run=lambda: executor.execute(call, plan).out,
        out=lambda found: found,
        keep=ours.to_dense,
        pairs=int(ours.pairs().sum()),
        plan=None if parts == FULL else partial(_our_lists, call, ours),
    )


def _our_lists(call: AttentionCall, mask: SparseMask) -> list[IndexLists | None]:
    found = [None if mask.stripes is None else IndexLists.from_map(mask.stripe_map())]
    if mask.has_tiles:
        found.append(SparseMask.from_tiles(call, mask.tile_map(), (mask.tile_q, mask.tile_k), diagonal=False).tiles)
    return found


def _record(family: Family, call: AttentionCall, mask: Mask) -> Work:
    """A library's kernel as the executor launches it, lists, LSE and the look at its output included."""
    ours, _ = mask
    plan, executor, wanted = Plan(ours), TritonExecutor(kernels=(family,)), Wanted()
    reason = family.features.lacking(call, ours, wanted) or family.objection(call, ours, wanted)
    if reason is not None:
        raise UnsupportedCallError([reason])

    def run() -> Tensor:
        with afresh():
            return executor.execute(call, plan).out

    return Work(run=run, out=lambda found: found, keep=ours.to_dense, pairs=int(ours.pairs().sum()))


def _dense(kernel: str, call: AttentionCall, mask: Mask) -> Work:
    ours, parts = mask
    if parts != FULL:
        raise UnsupportedCallError([f"{kernel} computes every pair"])
    dense = dense_of(kernel, call)
    turned = kernel == FLASH4
    return Work(
        run=dense.run,
        out=lambda found: torch.cat([one.transpose(1, 2) if turned else one for one in found], 1),
        keep=ours.to_dense,
        pairs=int(ours.pairs().sum()),
    )


def _by_token(call: AttentionCall) -> list[Tensor]:
    """q, k and v as ``[B, N, H, D]``."""
    return [x.transpose(1, 2).contiguous() for x in (call.q, call.k, call.v)]


def _flash4(call: AttentionCall, mask: Mask) -> Work:
    ours, _ = mask
    made = ours.to_fa4()
    # Lists of one head would make it compile another kernel.
    each = (x.expand(-1, call.q.shape[1], *x.shape[2:]).contiguous() for x in made[:4])
    tensors = import_module("flash_attn.cute.block_sparsity").BlockSparseTensorsTorch
    lists = tensors(*each, block_size=made.block_size)
    q, k, v = _by_token(call)
    attend = partial(
        import_module("flash_attn.cute").flash_attn_func,
        softmax_scale=call.softmax_scale,
        mask_mod=causal(),
        pack_gqa=False,
        block_sparse_tensors=lists,
    )
    return Work(
        run=lambda: attend(q, k, v),
        out=lambda found: (found[0] if isinstance(found, tuple) else found).transpose(1, 2),
        keep=ours.to_dense,
        pairs=int(ours.pairs().sum()),
        plan=ours.to_fa4,
    )


def _flash_sparse(call: AttentionCall, mask: Mask) -> Work:
    ours, parts = mask
    if parts != FULL:
        raise UnsupportedCallError(["flash-sparse-attn skips by a threshold, and takes no mask"])
    q, k, v = _by_token(call)
    attend = import_module("flash_sparse_attn").flash_dense_attn_func
    return Work(
        run=lambda: attend(q, k, v, is_causal=True, softmax_scale=call.softmax_scale),
        out=lambda found: found.transpose(1, 2),
        keep=ours.to_dense,
        pairs=int(ours.pairs().sum()),
    )


def _flex(call: AttentionCall, mask: Mask) -> Work:
    ours, _ = mask
    block = ours.to_flex()
    attend = _compiled() if call.q.device.type == "cuda" else _uncompiled()

    def run() -> Tensor:
        found: Tensor = attend(
            call.q, call.k, call.v, block_mask=block, scale=call.softmax_scale, enable_gqa=call.group > 1
        )
        return found

    return Work(run=run, out=lambda found: found, keep=ours.to_dense, pairs=int(ours.pairs().sum()), plan=ours.to_flex)


@cache
def _compiled() -> Callable[..., Tensor]:
    config: Any = import_module("torch._dynamo.config")
    function = import_module("torch.nn.attention.flex_attention").flex_attention
    compiled: Callable[..., Tensor] = torch.compile(function, fullgraph=True, dynamic=False)

    def attend(*tensors: Tensor, **options: Any) -> Tensor:
        with config.patch(recompile_limit=RECOMPILED):
            return compiled(*tensors, **options)

    return attend


@cache
def _uncompiled() -> Callable[..., Tensor]:
    function = import_module("torch.nn.attention.flex_attention").flex_attention

    def attend(*tensors: Tensor, **options: Any) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is not compiled, which the table says
            found: Tensor = function(*tensors, **options)
        return found

    return attend


def _tile_pairs(keep: Tensor, tile: tuple[int, int], columns: int, rows: Tensor) -> Tensor:
    """bool ``[B, H, n, N]``: every pair of the tiles of a map, for some query rows; what lies ahead included."""
    return keep[:, :, torch.div(rows, tile[0], rounding_mode="floor")].repeat_interleave(tile[1], -1)[..., :columns]


def _bsa() -> Any:
    return import_module("cudnn.block_sparse_attention").BSA


def _no_stripes(mask: SparseMask) -> None:
    if mask.stripes is not None:
        raise UnsupportedCallError(["cuDNN's block-sparse attention only takes blocks"])


def _cudnn(call: AttentionCall, mask: Mask) -> Work:
    ours, _ = mask
    _no_stripes(ours)
    keep, tile = ours.tile_map(), (ours.tile_q, ours.tile_k)
    q, k, v = (x.contiguous() for x in (call.q, call.k, call.v))

    def lists() -> tuple[Tensor, Tensor]:
        made = SparseMask.from_tiles(call, keep, tile, diagonal=False).tiles
        if made is None:
            raise UnsupportedCallError(["the mask has no tiles"])
        entry, index = made.padded(keep.shape[-1])
        return made.counts.contiguous(), torch.where(entry, index, 0).to(torch.int32)

    counts, index = lists()
    attend = partial(
        _bsa().block_sparse_attention_forward,
        softmax_scale=call.softmax_scale,
        q2k_block_nums=counts,
        sparse_block_size=tile[0],
    )
    return Work(
        run=lambda: attend(q, k, v, index),
        out=lambda found: found["o_tensor"],
        keep=partial(_tile_pairs, keep, tile, call.kv_len),
        pairs=int(ours.pairs().sum()),
        plan=lists,
    )


def _cudnn_fp8(call: AttentionCall, mask: Mask) -> Work:
    """Lists of its own, since those of a row must be as long as all others: as many pairs, tiles drawn among all."""
    ours, _ = mask
    _no_stripes(ours)
    g, tile = call.geometry, ours.tile_q
    given = {
        f"head_dim is {call.q.shape[-1]}: pass 128": call.q.shape[-1] != 128,
        f"length is {g.kv_len}: pass a multiple of {tile}": g.kv_len % tile != 0,
        f"dtype is {call.q.dtype}: pass bfloat16, which it rounds itself": call.q.dtype != torch.bfloat16,
    }
    reasons = [reason for reason, wrong in given.items() if wrong]
    if reasons:
        raise UnsupportedCallError(reasons)
    rows, columns, heads = g.tile_rows(tile), g.tile_columns(tile), g.batch * g.heads
    count = min(columns, max(1, round(int(ours.pairs().sum()) / (heads * rows * tile * tile))))
    source = torch.Generator(g.device).manual_seed(count)
    drawn = torch.rand(g.batch, g.heads, rows, columns, generator=source, device=g.device)
    index = drawn.topk(count, -1).indices.sort(-1).values.to(torch.int32)
    keep = torch.zeros_like(drawn, dtype=torch.bool).scatter_(-1, index.long(), True)
    q, k, v = call.q.contiguous(), *(x.repeat_interleave(call.group, 1) for x in (call.k, call.v))
    attend = _bsa().block_sparse_attention_fp8_forward
    return Work(
        run=lambda: attend(q, k, v, index, softmax_scale=call.softmax_scale, sparse_block_size=tile),
        out=lambda found: found["o_tensor"],
        keep=partial(_tile_pairs, keep, (tile, tile), call.kv_len),
        pairs=heads * rows * count * tile * tile,
    )


def _load(*modules: str) -> None:
    for module in modules:
        import_module(module)


_FLASH4 = 'pip install --pre "flash-attn-4[cu13]"'
_FLASHINFER = "pip install flashinfer-python"
_CUDNN = 'pip install "nvidia-cudnn-frontend[cutedsl]"'
_FLASH_SPARSE = (
    'pip install flash-sparse-attn "triton_kernels @ '
    'git+https://github.com/triton-lang/triton.git@v3.6.0#subdirectory=python/triton_kernels"'
)

PEERS: Sequence[Peer] = (
    Peer(name=OURS, features=Features(paged="yes", stripes="yes", fp8="caches"), make=_ours, device=""),
    Peer(name=ANY, features=Features(lse="no"), make=partial(_dense, ANY), device="cpu", dense=True),
    *(Peer(name=kernel, features=Features(lse="no"), make=partial(_dense, kernel), dense=True) for kernel in KERNELS),
    Peer(
        name=FLASH4,
        features=Features(paged="yes"),
        make=partial(_dense, FLASH4),
        load=partial(_load, "flash_attn.cute"),
        dense=True,
        install=_FLASH4,
    ),
    Peer(
        name=f"{FLASH4} block-sparse",
        features=Features(),
        make=_flash4,
        load=partial(_load, "flash_attn.cute", "flash_attn.cute.block_sparsity", "cutlass.cute"),
        install=_FLASH4,
    ),
    Peer(
        name=f"{FLASH4}, launched by {OURS}",
        features=Features(),
        make=partial(_record, FLASH_ATTENTION_4),
        load=partial(_load, "flash_attn.cute", "cutlass.cute"),
        install=_FLASH4,
    ),
    Peer(
        name=f"FlashInfer, launched by {OURS}",
        features=Features(gqa="one mask a KV head"),
        make=partial(_record, FLASHINFER),
        load=partial(_load, "flashinfer"),
        install=_FLASHINFER,
    ),
    Peer(
        name="cuDNN block-sparse",
        features=Features(causal="by tile"),
        make=_cudnn,
        load=partial(_load, "cudnn.block_sparse_attention.api", "cutlass.cute"),
        install=_CUDNN,
    ),
    Peer(
        name="cuDNN block-sparse fp8",
        features=Features(causal="by tile", gqa="no", lse="no", fp8="yes"),
        make=_cudnn_fp8,
        load=partial(_load, "cudnn.block_sparse_attention.api", "cutlass.cute"),
        install=_CUDNN,
        within=FP8_APART,
    ),
    Peer(
        name="FlexAttention",
        features=Features(paged="experimental", stripes="whole tiles"),
        make=_flex,
        load=partial(_load, "torch.nn.attention.flex_attention"),
        device="",
    ),
    Peer(
        name="flash-sparse-attn",
        features=Features(paged="yes", fp8="yes"),
        make=_flash_sparse,
        load=partial(_load, "flash_sparse_attn"),
        dense=True,
        install=_FLASH_SPARSE,
    ),
)
"""In the order of a table: ours, dense kernels, block-sparse ones."""
