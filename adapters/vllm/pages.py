"""One request's keys and values where vLLM keeps them: pages of a layer's cache, by way of a block table."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor


@frozen(eq=False)
class Pages:
    """What a kernel needs to read K and V in place. Nothing here is read on the host.

    k, v: ``[pages, page, Hkv, D]``, views of the whole cache. Layouts differ in their strides, of which only the last
    is 1: heads may stand side by side within a token (LBNHC) or a head's tokens together (LBHNC), and K beside V.
    Offsets of pages need 64 bits.
    table: int32 ``[n]``, n * page >= length; key j of the request is slot ``j % page`` of page ``table[j // page]``.
    length: keys of the request, on the host. k_scale, v_scale: float32 of one element on the device, factors on what
    an fp8 cache holds; None where the cache holds the numbers themselves.
    """

    k: Tensor
    v: Tensor
    table: Tensor
    length: int
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @classmethod
    def of(
        cls,
        cache: Tensor,
        head_size: int,
        table: Tensor,
        length: int,
        *,
        fp8: torch.dtype | None = None,
        scales: tuple[Tensor, Tensor] | None = None,
    ) -> Pages:
        """cache: ``[pages, Hkv, page, 2 * D]`` as vLLM hands it to a layer, K before V in the last dimension.

        fp8: the type of its numbers, where it is stored as bytes; scales then go with it.
        """
        k, v = cache.transpose(1, 2).split(head_size, dim=-1)
        if fp8 is None or scales is None:
            return cls(k, v, table, length)
        return cls(k.view(fp8), v.view(fp8), table, length, *scales)

    @property
    def page(self) -> int:
        """Tokens of a page."""
        return int(self.k.shape[1])

    def gather(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Copies ``[1, Hkv, length, D]`` of K and V in `dtype`."""
        if self.k.device.type == "cuda":
            from .kernels import gather_pages

            scales = None if self.k_scale is None or self.v_scale is None else (self.k_scale, self.v_scale)
            return gather_pages(self.k, self.v, self.table, self.length, scales, dtype)
        pages = self.table[: -(-self.length // self.page)]
        return self._copy(self.k, self.k_scale, pages, dtype), self._copy(self.v, self.v_scale, pages, dtype)

    def _copy(self, x: Tensor, scale: Tensor | None, pages: Tensor, dtype: torch.dtype) -> Tensor:
        raw = x.view(torch.uint8) if scale is not None else x  # fp8 has no indexing everywhere
        taken = raw.index_select(0, pages)
        if scale is not None:
            taken = (taken.view(x.dtype).to(torch.float32) * scale).to(dtype)
        return taken.to(dtype).flatten(0, 1)[None, : self.length].transpose(1, 2)
