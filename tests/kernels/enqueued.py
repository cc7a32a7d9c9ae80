"""What `enqueue` hands to a GPU's driver, without a GPU: ``python enqueued.py``.

Compiles a kernel for an H100, with a fake driver that notes each launch. Draws arguments of all kinds, launches each
by Triton's own way and twice by ours, and prints, as JSON, how many were compared, how many of ours were remembered,
those that differed, and what became of launches that the driver refused. Run it without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.compiler import CompiledKernel

from kernels.offline import Loading, pretend, replace
from sparseprefill.kernels import launch as ours

LAUNCHED: list[tuple[Any, ...]] = []
REFUSED: list[Exception] = []
"""What the driver raises at the next launches."""
BUFFER = torch.zeros(4096)


@triton.jit(do_not_specialize=("plain",), do_not_specialize_on_alignment=("loose_ptr",))
def mixed_kernel(
    x_ptr, loose_ptr, desc, number, plain, scale, FLAG: tl.constexpr, BLOCK: tl.constexpr,
    KIND: tl.constexpr = 3,  # pyright: ignore[reportArgumentType]
):  # fmt: skip
    """Reads what it is told of all its arguments."""
    row = tl.program_id(0) * number + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row, mask=row < number) * scale
    if loose_ptr is not None:
        x += tl.load(loose_ptr + row)
    if desc is not None:
        x += tl.sum(tl.sum(desc.load([0, 0]), 0), 0)
    if FLAG:
        x += plain + KIND
    tl.store(x_ptr + row, x)


def note(x: int, y: int, z: int, stream: int, function: Any, *rest: Any) -> None:
    """Note a launch: packed metadata, the launch's own, and two hooks come before the arguments. Or refuse it."""
    if REFUSED:
        raise REFUSED.pop()
    LAUNCHED.append(((x, y, z), stream, function, rest[0], tuple(map(_shown, rest[4:]))))


def _shown(x: Any) -> Any:
    kept = (x.data_ptr(), x.dtype) if isinstance(x, torch.Tensor) else x
    if not isinstance(x, torch.Tensor) and hasattr(x, "block_shape"):
        kept = (x.base.data_ptr(), tuple(x.shape), tuple(x.block_shape))
    return type(x).__name__, kept


def drawn(draw: random.Random) -> tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]:
    """A grid, arguments and options."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    def tensor() -> torch.Tensor:
        kind = draw.choice([torch.float32, torch.float32, torch.float16, torch.bfloat16])
        return BUFFER.view(torch.uint8)[(begin := draw.choice([0, 4, 16, 32, 64])) : begin + 4096].view(kind)

    descriptor = TensorDescriptor.from_tensor(BUFFER[:1024].view(32, 32), [draw.choice([1, 2]), 32])
    args = (
        tensor(),
        draw.choice([None, tensor()]),
        draw.choice([None, descriptor]),
        draw.choice([0, 1, 2, 16, 17, 48, 1 << 31, (1 << 31) + 16]),
        draw.choice([0, 1, 1.0, 16, 5, True, 1 << 40]),
        draw.choice([1.0, 0.5, 1, 2]),
    )
    options = {"FLAG": draw.choice([True, False]), "BLOCK": draw.choice([16, 32]), "num_warps": draw.choice([1, 4])}
    if draw.random() < 0.5:
        options["KIND"] = draw.choice([3, 1])
    return draw.choice([(3,), (3, 2), (4, 1, 2)]), args, {**options, "enable_fp_fusion": True}


def main() -> None:
    pretend(Loading(note))
    draw, unlike = random.Random(int(sys.argv[1]) if len(sys.argv) > 1 else 0), []
    cases = [drawn(draw) for _ in range(60)]
    cases = [draw.choice(cases) for _ in range(150)]
    for grid, args, options in cases:
        LAUNCHED.clear()
        mixed_kernel[grid](*args, **options)
        ours.enqueue(mixed_kernel, grid, *args, **options)
        ours.enqueue(mixed_kernel, grid, *args, **options)
        if len(LAUNCHED) != 3 or LAUNCHED[1] != LAUNCHED[0] or LAUNCHED[2] != LAUNCHED[0]:
            unlike.append(str(LAUNCHED))
    ((_, known),) = ours._KNOWN.values()
    found = {"compared": len(cases), "remembered": len(known), "unlike": unlike[:3], "failed": list(ours.FAILED)}
    replace(ours, MOST=len(known))
    grid, args, options = next(one for one in cases if "KIND" in one[2])
    ours.enqueue(mixed_kernel, grid, *args[:3], 7, *args[4:], **options)
    found["beyond the most"] = len(known)

    def launch() -> str:
        try:
            ours.enqueue(mixed_kernel, grid, *args[:3], 7, *args[4:], **options)
        except (RuntimeError, ValueError) as error:
            return str(error)
        return ""

    compiled, *_ = mixed_kernel.device_caches[0]
    before, knobs.runtime.debug = len(compiled), True
    launch()
    found["compiled for debugging"], knobs.runtime.debug = len(compiled) - before, False
    REFUSED.append(RuntimeError("Triton Error [CUDA]: out of memory"))
    LAUNCHED.clear()
    found["the device's error"] = [launch(), len(LAUNCHED), len(ours.FAILED)]
    REFUSED.extend([ValueError("no CUDA tensor")] * 2)
    found["the caller's error"] = [launch(), len(LAUNCHED), len(ours.FAILED)]

    def refuse(*_: Any) -> None:
        raise TypeError("another interface")

    replace(CompiledKernel, __getitem__=refuse)
    LAUNCHED.clear()
    for _ in range(2):
        launch()
    (error,) = ours.FAILED
    found |= {"launched": len(LAUNCHED), "error": str(error), "frames": error.__traceback__ is not None}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
