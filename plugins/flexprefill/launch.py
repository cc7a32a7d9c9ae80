"""The launches of FlexPrefill's kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparseprefill.kernels.settings import FUSED

from . import kernels

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall


def tile_softmax(call: AttentionCall, products: Tensor, first_row: int, block: int) -> Tensor:
    """Turns products ``[B, Hq, r, C]``, float32 and contiguous, of the query tiles from `first_row` on into scores."""
    batch, heads, rows, columns = products.shape
    numbers, flags = _arguments(call, block)
    kernels.tile_softmax_kernel[(rows, batch * heads)](
        products, *numbers, first_row, columns, call.window or 0, heads, WIDTH=512, **flags, num_warps=4
    )
    return products


def distance(call: AttentionCall, products: Tensor, true: Tensor, count: int, block: int) -> Tensor:
    """float32 ``[B, Hq]``, in nats, of ``[B, Hq, C]`` each. count: sampled queries, the call's last ones."""
    batch, heads, columns = products.shape
    far = torch.empty(batch, heads, dtype=torch.float32, device=products.device)
    numbers, flags = _arguments(call, block)
    kernels.distance_kernel[(batch * heads,)](
        products, true.contiguous(), far, *numbers, count, columns, call.window or 0, heads,
        WIDTH=1024, **flags, num_warps=8,
    )  # fmt: skip
    return far


def _arguments(call: AttentionCall, block: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    geometry = call.geometry
    numbers = (
        geometry.starts, geometry.lengths, call.softmax_scale, call.softcap or 0.0,
        geometry.q_offset, geometry.q_len, geometry.kv_len,
    )  # fmt: skip
    flags = {
        "BLOCK": block,
        "WINDOW": geometry.window is not None,
        "SOFTCAP": call.softcap is not None,
        **FUSED,
    }
    return numbers, flags
