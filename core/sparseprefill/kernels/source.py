"""Where a launch reads K and V: two tensors, or a request's pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen
from torch import Tensor

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall


@frozen(eq=False)
class Source:
    """What kernels take for the keys and values of a call.

    k, v: ``[B, Hkv, N, D]``, or of pages ``[pages, page, Hkv, D]``. table, k_scale, v_scale: of `Pages`, else None.
    page: tokens of a page, 0 where K and V are tensors.
    """

    k: Tensor
    v: Tensor
    table: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    page: int = 0

    @classmethod
    def of(cls, call: AttentionCall) -> Source:
        """The call's; nothing is copied."""
        pages = call.pages
        if pages is None:
            return cls(call.k, call.v)
        return cls(pages.k, pages.v, pages.table, pages.k_scale, pages.v_scale, pages.page)

    @property
    def extra(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The arguments that only pages need."""
        return self.table, self.k_scale, self.v_scale

    def strides(self, x: Tensor) -> tuple[int, int, int]:
        """Of k or v: batch (or page), head and row."""
        return (x.stride(0), x.stride(2), x.stride(1)) if self.page else strides(x)


@frozen(eq=False)
class Keys:
    """What kernels that look at keys alone, as estimators do, take for those of a call.

    k: ``[B, Hkv, N, D]``, or of pages ``[pages, page, Hkv, D]``, whose last stride is 1. table: of `Pages`, else None.
    page: tokens of a page, 0 where k is a tensor.
    """

    k: Tensor
    table: Tensor | None = None
    page: int = 0

    @classmethod
    def of(cls, call: AttentionCall) -> Keys:
        """The call's, in their pages unless a copy is there, or they have to be converted.

        Passes that read keys several times would convert each as often, which takes longer than the copy.
        """
        pages = call.pages
        if pages is not None and not pages.converted and "k" not in pages.gathered:
            return cls(pages.k, pages.table, pages.page)
        return cls(call.k if call.k.stride(-1) == 1 else call.k.contiguous())

    @classmethod
    def of_values(cls, call: AttentionCall) -> Keys:
        """The call's values instead of its keys, for kernels that look at these alone."""
        pages = call.pages
        if pages is not None and not pages.converted and "v" not in pages.gathered:
            return cls(pages.v, pages.table, pages.page)
        return cls(call.v if call.v.stride(-1) == 1 else call.v.contiguous())

    @property
    def strides(self) -> tuple[int, int, int]:
        """Of k: batch (or page), head and row."""
        k = self.k
        return (k.stride(0), k.stride(2), k.stride(1)) if self.page else strides(k)


def strides(x: Tensor) -> tuple[int, int, int]:
    """Batch, head and row strides; that of a single batch row is never used and would only force a new compilation."""
    return (0 if x.shape[0] == 1 else x.stride(0)), x.stride(1), x.stride(2)
