"""Hypothesis strategies for calls and masks. Sizes are drawn and shrink; tensors come from a drawn seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from attrs import evolve
from hypothesis import strategies as st

from sparseprefill.call import AttentionCall
from sparseprefill.mask.mask import SparseMask
from sparseprefill.testing.inputs import KINDS, tensors
from sparseprefill.testing.rotary import FLOATS

# What a search tries most comes first: several tiles before the smallest lengths.
LENGTHS = (17, 64, 97, 129, 31, 128, 127, 16, 5, 3, 2, 1)
PADDING = ("none", "left", "right", "both")
MASKS = ("both", "stripes", "tiles", "union", "full")


@st.composite
def calls(
    draw: st.DrawFn,
    *,
    max_batch: int = 3,
    max_kv_heads: int = 2,
    groups: Sequence[int] = (1, 2, 4, 8),
    max_heads: int = 8,
    head_dims: Sequence[int | tuple[int, int]] = (8, 16, 64),
    max_len: int = 131,
    min_len: int = 1,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    kinds: Sequence[str] = KINDS,
    padding: Sequence[str] = PADDING,
    prefix: bool = True,
    features: bool = True,
    device: torch.device | str = "cpu",
) -> AttentionCall:
    """AttentionCalls of up to `max_batch` rows, `max_heads` query heads and `max_len` keys.

    groups: query heads per KV head. head_dims: of q, k and v, or of q and k beside that of v. padding: kinds of padding
    that may occur. prefix: queries may be fewer than the keys and stand anywhere among them. features: window, softcap,
    sinks and a scale may occur.
    """
    some = list(dict.fromkeys(n for n in (*LENGTHS, max_len) if min_len <= n <= max_len))
    lengths = st.one_of(st.sampled_from(some), st.integers(min_len, max_len))
    kv_len = draw(lengths, label="kv_len")
    q_len = draw(st.one_of(st.just(kv_len), st.integers(1, kv_len)), label="q_len") if prefix else kv_len
    q_offset = draw(st.one_of(st.none(), st.integers(0, kv_len - q_len)), label="q_offset")
    group = draw(st.sampled_from([g for g in groups if g <= max_heads] or [1]), label="group")
    kv_heads = draw(st.integers(1, max(1, min(max_kv_heads, max_heads // group))), label="kv_heads")
    batch = draw(st.integers(1, max_batch), label="batch")
    kind, head_dim = (
        draw(st.sampled_from(list(kinds)), label="kind"),
        draw(st.sampled_from(list(head_dims)), label="head_dim"),
    )
    same: dict[str, Any] = {
        "batch": batch,
        "heads": group * kv_heads,
        "kv_heads": kv_heads,
        "q_len": q_len,
        "kv_len": kv_len,
        "q_offset": q_offset,
        "seed": draw(st.integers(0, 2**63 - 1), label="seed"),
        "strided": draw(st.booleans(), label="strided"),
        "device": device,
        "dtype": draw(st.sampled_from(list(dtypes)), label="dtype"),
    }
    width, values = (head_dim, head_dim) if isinstance(head_dim, int) else head_dim
    q, k, v = tensors(kind, head_dim=width, **same)
    v = v if values == width else tensors(kind, head_dim=values, **same)[2]
    fields: dict[str, Any] = draw(_padding(draw(st.sampled_from(list(padding))), batch, kv_len))
    if features:
        fields |= draw(_features(group * kv_heads, kv_len))
    rows: dict[str, Any] = {
        name: torch.tensor(values, dtype=torch.int32, device=device)
        for name, values in fields.items()
        if name in ("starts", "lengths")
    }
    if fields.get("sinks") is not None:
        rows["sinks"] = torch.tensor(fields["sinks"], dtype=torch.float32, device=device)
    return AttentionCall(q, k, v, q_offset=q_offset, **(fields | rows))


@st.composite
def _padding(draw: st.DrawFn, kind: str, batch: int, kv_len: int) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    starts = [0] * batch
    if kind in ("left", "both"):
        starts = draw(st.lists(st.integers(0, kv_len - 1), min_size=batch, max_size=batch), label="starts")
        fields["starts"] = starts
    if kind in ("right", "both"):
        fields["lengths"] = [draw(st.integers(1, kv_len - start), label="length") for start in starts]
    return fields


@st.composite
def _features(draw: st.DrawFn, heads: int, kv_len: int) -> dict[str, Any]:
    sinks = st.lists(st.floats(-4, 4, width=32), min_size=heads, max_size=heads)
    return {
        "window": draw(st.one_of(st.none(), st.integers(1, kv_len + 1)), label="window"),
        "softcap": draw(st.sampled_from([None, 1.0, 30.0]), label="softcap"),
        "sinks": draw(st.one_of(st.none(), sinks), label="sinks"),
        "scale": draw(st.sampled_from([None, 0.05, 1.0]), label="scale"),
    }


@st.composite
def masks(
    draw: st.DrawFn,
    call: AttentionCall,
    *,
    kinds: Sequence[str] = MASKS,
    tiles: Sequence[int] = (8, 16, 24, 64),
    groups: Sequence[int] = (1, 2, 3),
    widths: Sequence[int] = (1, 16),
    diagonal: bool = True,
) -> SparseMask:
    """Masks for `call`: tiles, stripes, both in one mask (overlapping at random), a union on two grids, or full.

    tiles: sizes for ``tile_q`` and ``tile_k``, drawn apart. groups: query tiles that share a stripe. widths: tokens of
    a stripe, or their common divisor with ``tile_k``. diagonal: keep each row's own tile, so that no row is empty.
    """
    kind = draw(st.sampled_from(list(kinds)), label="mask")
    size = st.sampled_from(list(tiles))
    tile = (draw(size, label="tile_q"), draw(size, label="tile_k"))
    if kind == "full":
        return SparseMask.full(call, tile)
    group = draw(st.sampled_from(list(groups)), label="stripe group")
    source = torch.Generator("cpu").manual_seed(draw(st.integers(0, 2**63 - 1), label="mask seed"))
    share = draw(st.sampled_from([0.3, 0.1, 0.6, 0.0, 1.0]), label="share")
    g = call.geometry

    def random(rows: int, columns: int) -> torch.Tensor:
        drawn = torch.rand(g.batch, g.heads, rows, columns, generator=source, **FLOATS)
        return (drawn < share).to(g.device)

    chosen = random(g.tile_rows(tile[0]), g.tile_columns(tile[1]))
    by_tiles = SparseMask.from_tiles(call, chosen, tile, diagonal=diagonal)
    if kind == "tiles":
        return by_tiles
    other = (draw(size, label="other tile_q"), draw(size, label="other tile_k")) if kind == "union" else tile
    width = math.gcd(draw(st.sampled_from(list(widths)), label="stripe width"), other[1])
    columns = random(g.tile_rows(other[0] * group), g.tile_columns(width))
    own = diagonal and kind == "stripes"
    by_stripes = SparseMask.from_stripes(call, columns, group, other, width=width, diagonal=own)
    if kind == "stripes":
        return by_stripes
    if kind == "union":
        return by_tiles | by_stripes
    return evolve(by_stripes, tiles=by_tiles.tiles)
