"""Launch settings of kernels over `group_products`: a pure table, like that of the attention kernels.

block_m and block_n are the query and key groups of a tile.
"""

from __future__ import annotations

from sparseprefill.kernels.settings import Settings

LONG = 32
"""Tokens of a group from which its products take long beside the rest of a tile."""


def group_settings(capability: tuple[int, int], itemsize: int) -> Settings:
    """Settings by compute capability, (0, 0) for the interpreter, and bytes per element of q and k."""
    hopper = capability[0] >= 9
    if itemsize == 4:
        return Settings(64, 64, 8, 3, tma=hopper, block_k=16)
    if hopper:
        # Bytes from L2 per product decide: two warp groups of 64 x 256, one program per multiprocessor.
        return Settings(128, 256, 8, 4, tma=True, block_k=64)
    return Settings(128, 128, 8, 3, block_k=32)


def paged_settings(capability: tuple[int, int], itemsize: int, size: int) -> Settings:
    """The same where keys are read from their pages: by pointers on any device, q as elsewhere. size: of a group.

    By measurement: pointers take registers and a thread's time, so that long sums do better with small tiles.
    """
    if capability[0] < 9 or itemsize == 4:
        return group_settings(capability, itemsize)
    if size >= LONG:
        return Settings(128, 128, 4, 5, tma=True, block_k=64)
    return Settings(128, 256, 8, 3, tma=True, block_k=64)
