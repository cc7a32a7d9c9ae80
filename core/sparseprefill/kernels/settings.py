"""Launch settings: pure tables by a chip's facts, head dimension, dtype and tile. No autotuning at run time."""

from __future__ import annotations

from functools import cache, cached_property

from attrs import frozen

from sparseprefill.errors import UnsupportedCallError
from sparseprefill.kernels.family.chips import Chip

HEAD_DIMS = frozenset((dim, dim) for dim in (64, 80, 96, 128, 192, 256, 512)) | {(192, 128)}
"""Head dimensions of the portable kernel: those of queries and keys, beside those of values."""
HALVES_ALONE = 256
"""Head dimensions beyond it are for types of 16 bits: a step of float32 does not fit into shared memory."""
SMALLEST = 16
FUSED = {"enable_fp_fusion": True}
"""For every launch: a product and the sum it goes into round once. Triton 3.9 warns where nobody says so."""


@frozen
class Settings:
    """block_m, block_n: rows of a product's two sides, such as queries and keys, per step or tile of a launch.

    warps, stages: of the program. tma: whether it reads by tensor descriptors. maxnreg: cap on registers per thread, or
    None. block_k: entries per step, where a product is summed in several; 0 elsewhere.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    tma: bool = False
    maxnreg: int | None = None
    block_k: int = 0

    @cached_property
    def options(self) -> dict[str, int | bool]:
        """Options of a launch: warps, stages and the cap, which the interpreter and the uncapped case do without."""
        cap: dict[str, int] = {} if self.maxnreg is None else {"maxnreg": self.maxnreg}
        return {"num_warps": self.warps, "num_stages": self.stages, **cap, **FUSED}


@cache
def settings(chip: Chip, block_d: int, itemsize: int, tile_q: int, tile_k: int) -> Settings:
    """Settings for one launch.

    block_d: head dimension, rounded up to a power of two. itemsize: bytes per element of q, k and v. tile_q, tile_k: of
    the mask.
    Raises UnsupportedCallError for tiles that the kernel cannot run.
    """
    for name, tile in (("tile_q", tile_q), ("tile_k", tile_k)):
        if tile < SMALLEST or tile & (tile - 1):
            raise UnsupportedCallError(
                [
                    f"Triton executor: mask {name} is {tile}; use a power of two >= {SMALLEST}, by the method's block or "
                    "tile (and multiples of it as anchor-attention's init_tokens)"
                ]
            )
    wide, full_precision, large = block_d > 128, itemsize == 4, chip.large
    if block_d > HALVES_ALONE:
        # 32 rows: with 64, whose products are wgmma, registers spill (compiled for 9.0 and 8.6, not measured).
        return Settings(min(tile_q, 32), min(tile_k, 32 if large else 16), 8, 2, tma=large)
    if wide and not large:
        # What fits into 99 KB; in 16 bits no register spills (compiled for 8.6, not measured).
        return Settings(min(tile_q, 32 if full_precision else 64), min(tile_k, 16), 8, 2)
    block_m = min(tile_q, 64 if full_precision else 128)
    block_n = min(tile_k, (16 if wide else 32) if full_precision else (32 if wide else 64))
    # Two programs per multiprocessor decide on an H100: 8 warps with at most 128 registers, 3 stages within 114 KB.
    pair = large and block_m == 128 and not wide and not full_precision
    warps = 8 if block_m == 128 and (wide or pair) else 4
    stages = 2 if full_precision or wide or not large else 3
    return Settings(block_m, block_n, warps, stages, tma=large, maxnreg=chip.registers if pair else None)


def cdiv(x: int, y: int) -> int:
    """x / y, rounded up. Triton's own counts as device code, and on the host takes as long as half a launch."""
    return -(-x // y)


@cache
def power_of_two(x: int) -> int:
    """The smallest power of two that is not below x, which is at least 1."""
    return 1 << (x - 1).bit_length()


def block(size: int) -> int:
    """Size of a product's side that holds `size` rows or dimensions."""
    return max(16, power_of_two(size))
