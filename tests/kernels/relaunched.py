"""What a repeated launch hands to a GPU's driver, without a GPU: ``python relaunched.py``.

Compiles a kernel for an H100, with a fake driver that notes each launch. Draws arguments of all kinds, records a launch
of each, and holds what its step launches for other tensors to what Triton launches for them. Prints, as JSON, how many
were compared, how many could not be recorded, and those that differed. Run it without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.offline import Loading, pretend
from sparseprefill.kernels.launch import enqueue
from sparseprefill.kernels.recording import record
from sparseprefill.kernels.repeat import Step

LAUNCHED: list[tuple[Any, ...]] = []
BUFFER, OTHER = torch.zeros(4096), torch.ones(4096)
ROOM = 1 << 20


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
    """Note a launch: packed metadata, the launch's own, and two hooks come before the arguments."""
    LAUNCHED.append(((x, y, z), stream, function, rest[0], tuple(map(_shown, rest[4:]))))


def _shown(x: Any) -> Any:
    """An argument as the driver takes it: a tensor by its address, which is all that a step hands over."""
    if isinstance(x, torch.Tensor):
        x = x.data_ptr()
    if hasattr(x, "block_shape"):
        return x.base.data_ptr(), tuple(x.shape), tuple(x.block_shape)
    return type(x).__name__, x


def drawn(draw: random.Random) -> tuple[tuple[int, ...], Callable[[torch.Tensor], tuple[Any, ...]], dict[str, Any]]:
    """A grid, arguments by the buffer that they lie in, and options."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    def tensor() -> Callable[[torch.Tensor], torch.Tensor]:
        kind = draw.choice([torch.float32, torch.float32, torch.float16, torch.bfloat16])
        begin = draw.choice([0, 4, 16, 32, 64])
        return lambda whole: whole.view(torch.uint8)[begin : begin + 4096].view(kind)

    first, second, third = tensor(), draw.choice([None, tensor()]), draw.choice([None, 1, 2])
    numbers = (
        draw.choice([0, 1, 2, 16, 17, 48, 1 << 31, (1 << 31) + 16]),
        draw.choice([0, 1, 1.0, 16, 5, True, 1 << 40]),
        draw.choice([1.0, 0.5, 1, 2]),
    )
    options = {"FLAG": draw.choice([True, False]), "BLOCK": draw.choice([16, 32]), "num_warps": draw.choice([1, 4])}
    if draw.random() < 0.5:
        options["KIND"] = draw.choice([3, 1])

    def args(whole: torch.Tensor) -> tuple[Any, ...]:
        rows = None if third is None else TensorDescriptor.from_tensor(whole[:1024].view(32, 32), [third, 32])
        return first(whole), None if second is None else second(whole), rows, *numbers

    return draw.choice([(3,), (3, 2), (4, 1, 2)]), args, {**options, "enable_fp_fusion": True}


def launch(grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> list[torch.Tensor]:
    """A call that returns nothing."""
    enqueue(mixed_kernel, grid, *args, **options)
    return []


def main() -> None:
    pretend(Loading(note))
    draw = random.Random(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    cases = [drawn(draw) for _ in range(60)]
    unlike, refused, compared = list[str](), list[str](), 0
    for grid, args, options in (draw.choice(cases) for _ in range(150)):
        _, step = record(partial(launch, grid, args(BUFFER), options), [BUFFER], ROOM)
        if not isinstance(step, Step):
            refused.append(step)
            continue
        for whole in (OTHER, BUFFER, OTHER):
            LAUNCHED.clear()
            mixed_kernel[grid](*args(whole), **options)
            step.run([whole], 0)
            compared += 1
            if len(LAUNCHED) != 2 or LAUNCHED[1] != LAUNCHED[0]:
                unlike.append(str(LAUNCHED))
    found = {"compared": compared, "refused": sorted(set(refused)), "unlike": unlike[:3]}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
