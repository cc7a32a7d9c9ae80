"""Small calls for the unit tests."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from attrs import evolve

from sparseprefill.call import AttentionCall
from sparseprefill.mask.mask import SparseMask
from sparseprefill.testing import tensors


def make(
    q_len: int = 40, kv_len: int | None = None, *, batch: int = 1, heads: int = 2, kv_heads: int = 1, **fields: Any
) -> AttentionCall:
    """An AttentionCall with head dimension 8; `fields` are its keyword fields, or `kind`, `seed`, `dtype`."""
    kinds = {"kind": "random", "seed": 0, "dtype": torch.float32}
    kind, seed, dtype = (fields.pop(name, default) for name, default in kinds.items())
    q, k, v = tensors(
        kind,
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        q_len=q_len,
        kv_len=q_len if kv_len is None else kv_len,
        head_dim=8,
        seed=seed,
        dtype=dtype,
    )
    return AttentionCall(q, k, v, **fields)


def one_lookup(q_len: int, row: int, key: int) -> AttentionCall:
    """A call of two heads whose rows attend to the first key alone, but `row` of the second head: to `key` alone."""
    q, k = torch.zeros(1, 2, q_len, 8), torch.zeros(1, 1, q_len, 8)
    q[..., 0] = k[..., 0, 0] = k[..., key, 1] = 20.0
    q[0, 1, row, :2] = torch.tensor([0.0, 20.0])
    return AttentionCall(q, k, k.clone())


def int32(*values: int) -> torch.Tensor:
    """Starts or lengths of batch rows."""
    return torch.tensor(values, dtype=torch.int32)


def nested(*parts: torch.Tensor, layout: torch.layout = torch.strided) -> torch.Tensor:
    """A nested tensor, of which torch warns that it is a prototype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.nested.nested_tensor(list(parts), layout=layout)


def among(kv_len: int, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a call whose starts and lengths, where there are any, are cut to what lies among its keys."""
    made = dict(fields)
    if "starts" in made:
        made["starts"] = made["starts"].clamp(max=kv_len)
    if "lengths" in made:
        made["lengths"] = torch.minimum(made["lengths"], kv_len - made.get("starts", torch.zeros_like(made["lengths"])))
    return made


def random_mask(
    call: AttentionCall, kind: str, tile: tuple[int, int], group: int, seed: int, width: int = 1
) -> SparseMask:
    """A mask without its diagonal. kind: "tiles", "stripes" or "both". width: of stripes."""
    g, source = call.geometry, torch.Generator().manual_seed(seed)
    shape = (g.batch, g.heads)
    chosen = torch.rand(*shape, g.tile_rows(tile[0]), g.tile_columns(tile[1]), generator=source) < 0.4
    columns = torch.rand(*shape, g.tile_rows(tile[0] * group), g.tile_columns(width), generator=source) < 0.2
    tiles = SparseMask.from_tiles(call, chosen, tile, diagonal=False)
    stripes = SparseMask.from_stripes(call, columns, group, tile, width=width, diagonal=False)
    if kind == "both":
        return evolve(stripes, tiles=tiles.tiles)
    return tiles if kind == "tiles" else stripes
