"""Launch settings of kernels over `group_products`: a pure table, like that of the attention kernels."""

from __future__ import annotations

from typing import Any

from attrs import frozen

LONG = 32
"""Tokens of a group from which its products take long beside the rest of a tile."""


@frozen
class GroupSettings:
    """block_m, block_n: query and key groups per tile. block_k: entries per step. warps, stages, tma, maxnreg."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    tma: bool
    maxnreg: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Launch options."""
        cap = {} if self.maxnreg is None else {"maxnreg": self.maxnreg}
        return {"num_warps": self.warps, "num_stages": self.stages, **cap}


def group_settings(capability: tuple[int, int], itemsize: int) -> GroupSettings:
    """Settings by compute capability, (0, 0) for the interpreter, and bytes per element of q and k."""
    hopper = capability[0] >= 9
    if itemsize == 4:
        return GroupSettings(64, 64, 16, 8, 3, tma=hopper)
    if hopper:
        # Bytes from L2 per product decide: two warp groups of 64 x 256, one program per multiprocessor.
        return GroupSettings(128, 256, 64, 8, 4, tma=True)
    return GroupSettings(128, 128, 32, 8, 3, tma=False)


def paged_settings(capability: tuple[int, int], itemsize: int, size: int) -> GroupSettings:
    """The same where keys are read from their pages: by pointers on any device, q as elsewhere. size: of a group.

    By measurement: pointers take registers and a thread's time, so that long sums do better with small tiles.
    """
    if capability[0] < 9 or itemsize == 4:
        return group_settings(capability, itemsize)
    if size >= LONG:
        return GroupSettings(128, 128, 64, 4, 5, tma=True)
    return GroupSettings(128, 256, 64, 8, 3, tma=True)
