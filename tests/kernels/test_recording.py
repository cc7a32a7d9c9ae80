"""A call that is recorded once and repeated for other tensors is the call itself, bit for bit; or there is a reason."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import sparseprefill as sp
from helpers.examples import part
from kernels.device import CUDA, DEVICE
from sparseprefill.kernels import recording
from sparseprefill.kernels.launch import enqueue
from sparseprefill.kernels.recording import ALIGNMENT, record
from sparseprefill.kernels.repeat import Launch, Operator, Place, Step
from sparseprefill.mask.recorded import RECORDING, OfLayer, apart

Run = Callable[..., Sequence[Tensor]]
ROOM = 1 << 24
FUSED = {"BLOCK": 16, "enable_fp_fusion": True}


@triton.jit(do_not_specialize=("word",))
def scale_kernel(x_ptr, y_ptr, word, count, BLOCK: tl.constexpr):
    """y = x * word."""
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < count) * word, mask=i < count)


@triton.jit
def special_kernel(x_ptr, y_ptr, word, count, BLOCK: tl.constexpr):
    """The same, compiled for the number's value."""
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < count) * word, mask=i < count)


@triton.jit
def count_kernel(x_ptr, BLOCK: tl.constexpr):
    """x += 1."""
    i = tl.arange(0, BLOCK)
    tl.store(x_ptr + i, tl.load(x_ptr + i) + 1)


def scaled(x: Tensor, word: int = 3, into: Tensor | None = None) -> Tensor:
    """x times a number, by a kernel."""
    y = torch.empty_like(x) if into is None else into
    enqueue(scale_kernel, (1,), x, y, word, x.numel(), **FUSED)
    return y


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.to(DEVICE, dtype)


def made(run: Run, *slots: Tensor) -> Step:
    """The step of a call, which is recorded without changing what it gives."""
    copies = like(slots)
    found, step = record(lambda: run(*slots), slots, ROOM)
    assert isinstance(step, Step), step
    for one, other in zip(found, run(*copies), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(slots, copies, strict=True):
        assert torch.equal(one, other)
    assert RECORDING.get() is None
    return step


def like(slots: Sequence[Tensor], seed: int | None = None) -> list[Tensor]:
    """Tensors of the same sizes, strides and places in common storages, with other numbers where there is a seed."""
    storages: dict[int, Any] = {}
    found = []
    for x in slots:
        whole = x.untyped_storage()
        if whole._cdata not in storages:
            flat = torch.empty(0, dtype=torch.uint8, device=x.device).set_(whole).clone()
            if seed is not None and x.is_floating_point():
                numbers = torch.empty(0, dtype=x.dtype, device=x.device).set_(flat.untyped_storage())
                numbers.copy_(drawn(numbers.numel(), seed=seed + len(storages)))
            storages[whole._cdata] = flat.untyped_storage()
        base = torch.empty(0, dtype=x.dtype, device=x.device)
        found.append(base.set_(storages[whole._cdata], x.storage_offset(), x.shape, x.stride()))
    return found


def holds(run: Run, *slots: Tensor, step: Step | None = None) -> Step:
    """The step, repeated for other numbers, gives what the call itself does, in results and slots; thrice."""
    step = step or made(run, *slots)
    for seed in (1, 2, 3):
        mine, plain = like(slots, seed), like(slots, seed)
        assert step.slots.fit(mine)
        for one, other in zip(step.run(mine, 0), run(*plain), strict=True):
            assert torch.equal(other, one)
            assert (other.dtype, other.shape, other.stride()) == (one.dtype, one.shape, one.stride())
        for one, other in zip(mine, plain, strict=True):
            assert torch.equal(other, one)
    return step


def refused(run: Run, *slots: Tensor) -> str:
    """The reason for which a call is not recorded; it gives what it gives all the same."""
    copies = like(slots)
    found, why = record(lambda: run(*slots), slots, ROOM)
    assert isinstance(why, str), [one.func for one in why.work if isinstance(one, Operator)]
    for one, other in zip(found, run(*copies), strict=True):
        assert torch.equal(one, other)
    assert RECORDING.get() is None
    return why


def _name(func: Any) -> str:
    """Of an operator, or of the function that stands for it."""
    return str(func._schema.name[6:] if hasattr(func, "_schema") else func.__name__)


def names(step: Step) -> list[str]:
    return [_name(one.func) if isinstance(one, Operator) else "launch" for one in step.work]


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, device=DEVICE)


X = drawn(4, 4)
PROGRAMS: dict[str, tuple[Run, list[str] | None]] = {
    "an operator": (lambda x: [x + 1], ["add"]),
    "constants are folded": (lambda x: [x * (torch.arange(4, device=DEVICE) * 2 + 1)], ["mul"]),
    "of constants alone, made anew": (lambda x: [torch.arange(4, device=DEVICE) + 1], ["add"]),
    "a factory that is written to": (lambda x: [torch.zeros(4, 4, device=DEVICE).add_(x)], ["zeros", "add_"]),
    "a factory read before it is written to": (
        lambda x: [(t := torch.ones(4, 4, device=DEVICE)) * 2, t.mul_(x)],
        ["ones", "mul", "mul_"],
    ),
    "a factory that a kernel gets": (lambda x: [scaled(x, into=torch.zeros(4, 4, device=DEVICE))], ["zeros", "launch"]),
    "a slot is written to": (lambda x: [x.mul_(2)], ["mul_"]),
    "a part of a slot is written to": (lambda x: [x[1:, ::2].add_(1)], ["add_"]),
    "a slot itself": (lambda x: [x], []),
    "a view of a slot": (lambda x: [x.t()[1:]], []),
    "views of results": (lambda x: [(x + 1).t()[1:].mul_(2), (x * 2).view(16)[3:5]], None),
    "a result and its view": (lambda x: [y := x + 1, y[1:]], ["add"]),
    "reshape that copies": (lambda x: [x.t().reshape(16) + 1], None),
    "reshape that does not": (lambda x: [x.reshape(16) + 1], ["add"]),
    "contiguous": (lambda x: [x.contiguous() + 1, x.t().contiguous()], None),
    "to another type and to the same": (lambda x: [x.to(torch.float64), x.to(torch.float32) + 1], None),
    "several results": (lambda x: [*x.max(0), *torch.sort(x, 1), *x.split(2)], None),
    "lists of tensors": (lambda x: [torch.cat([x, x * 2, torch.ones(1, 4, device=DEVICE)]), torch.stack([x, x])], None),
    "list operators in place": (lambda x: [*vars(torch)["_foreach_add"]([x, x.t()], 1.0), x], None),
    "by keyword": (lambda x: [torch.clamp(x, min=x.t()), torch.where(x > 0, input=x, other=x.t())], None),
    "out": (lambda x: [torch.add(x, 1, out=torch.empty(4, 4, device=DEVICE))], None),
    "out of a slot": (lambda x: [torch.add(x, 1, out=x)], ["add"]),
    "two outs": (
        lambda x: list(
            torch.max(
                x, 0, out=(torch.empty(4, device=DEVICE), torch.empty(4, dtype=torch.int64, device=DEVICE))
            )
        ),
        None,
    ),
    "numbers of the host": (lambda x: [x + numbers(1.0, 2, 3, 4)], ["add"]),
    "numbers of the host that are written to": (
        lambda x: [numbers(1.0, 2, 3, 4).add_(x[0]), numbers(0.0).add_(1)],
        ["clone", "add_", "clone", "add_"],
    ),
    "numbers of the host that a kernel counts up": (lambda x: [counted(numbers(*[0.0] * 16)), x], None),
    "an index": (lambda x: [x[numbers(2, 0)], (x > 0)[:, numbers(1)]], None),
    "an index is written to": (lambda x: [x.index_put_((numbers(2, 0),), x[:2] + 1)], None),
    "attention": (lambda x: [torch.nn.functional.scaled_dot_product_attention(*[x[None, None]] * 3)], None),
    "products": (lambda x: [x @ x, torch.einsum("ij,kj->ik", x, x), torch.bmm(x[None], x[None])], None),
    "a kernel": (lambda x: [scaled(x)], None),
    "a kernel into a part of a slot": (lambda x: [scaled(x[0], into=x[1])], ["launch"]),
    "a chain": (lambda x: [scaled(scaled(scaled(x) + 1) * 2)], None),
    "no elements": (lambda x: [x[:0] + 1, torch.cat([x[:, :0], x], 1), x[4:]], None),
    "an axis turned around": (lambda x: [(x + 1).t_().mul_(2), x.flip(0)], None),
    "a type read otherwise": (lambda x: [(x * 2).view(torch.int32) & 0xFF, x.view(torch.int16)[:, 1:] + 1], None),
    "complex numbers": (lambda x: [torch.view_as_real(torch.view_as_complex(x.view(4, 2, 2)) * 2j)], None),
}  # fmt: skip


def counted(x: Tensor) -> Tensor:
    enqueue(count_kernel, (1,), x, **FUSED)
    return x


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference mode"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_step_repeats_the_call(name: str, inference: bool) -> None:
    run, work = PROGRAMS[name]
    with torch.inference_mode(inference):
        step = holds(run, X.clone())
    if work is not None:
        assert work == names(step)


def test_slots_that_share_a_storage() -> None:
    whole = drawn(3, 8)
    step = holds(lambda q, k, out: [out.copy_(q + k)], whole[:, :4], whole[:, 4:], drawn(3, 4))
    apart_ = drawn(3, 8, seed=5)
    assert not step.slots.fit([apart_[:, 4:], apart_[:, :4], drawn(3, 4)]), "the other way round"
    assert not step.slots.fit([apart_[:, :4], whole[:, 4:], drawn(3, 4)]), "of two storages"
    assert step.slots.fit([apart_[:, :4], apart_[:, 4:], drawn(3, 4)])


def test_slots_that_are_one_tensor() -> None:
    x = drawn(4, 4)
    holds(lambda a, b: [a.add_(1), b.mul_(2)], x, x)


def test_a_step_fits_tensors_like_those_that_were_recorded() -> None:
    step = made(lambda x: [x + 1], drawn(4, 8))
    assert step.slots.fit([drawn(4, 8, seed=3)])
    whole = drawn(5, 8)
    others = {
        "another number": [],
        "more": [drawn(4, 8), drawn(4, 8)],
        "another shape": [drawn(8, 4)],
        "longer": [whole],
        "other strides": [drawn(8, 4).t()],
        "another type": [drawn(4, 8).to(torch.int32)],
        "another alignment": [torch.empty(33, device=DEVICE)[1:].view(4, 8)],
    }
    assert [] == [name for name, slots in others.items() if step.slots.fit(slots)]
    if CUDA:
        assert not step.slots.fit([drawn(4, 8).cpu()])


def test_a_step_holds_no_tensor_of_a_layer() -> None:
    slots = [drawn(4, 4), drawn(4, 4)]
    step = made(lambda x, y: [y.copy_(scaled(x)), x.t() @ y], *slots)
    seen = [weakref.ref(x) for x in slots]
    slots.clear()
    gc.collect()  # the first dispatch of a process leaves frames behind
    assert [None, None] == [one() for one in seen]
    assert step.work


def test_scratch_is_shared_by_those_that_are_never_alive_together() -> None:
    def chain(x: Tensor) -> list[Tensor]:
        for _ in range(6):
            x = scaled(x)
        return [x]

    step = holds(chain, drawn(4, 4))
    assert 2 * ALIGNMENT == step.scratch
    assert 6 == step.launches


def test_results_outlive_the_scratch() -> None:
    step = made(lambda x: [scaled(scaled(x)), scaled(x) + 1], drawn(4, 4))
    first = step.run([drawn(4, 4, seed=1)], 0)
    kept = [x.clone() for x in first]
    for seed in range(2, 6):
        step.run([drawn(4, 4, seed=seed)], 0)
    assert all(map(torch.equal, kept, first))
    assert 1 == sum(type(one) is Place and one.root > 1 for one in step.results[:1])


def test_a_number_of_the_layer_is_that_of_each_layer() -> None:
    def run(x: Tensor, layer: int = 0) -> list[Tensor]:
        return [scaled(x, OfLayer.at(layer, lambda i: 7 * i + 1)), scaled(x, OfLayer.at(layer, int).then(lambda i: -i))]

    step = made(run, drawn(4, 4))
    for layer in (0, 1, 16, 5):
        x = drawn(4, 4, seed=layer)
        assert all(map(torch.equal, run(x, layer), step.run([x], layer)))


def test_nothing_is_recorded_of_what_runs_apart() -> None:
    def table() -> Tensor:
        return torch.full((4,), float(torch.arange(5, device=DEVICE).sum()), device=DEVICE)

    step = holds(lambda x: [x + apart(table)], drawn(4, 4))
    assert ["add"] == names(step)


def test_in_autocast_nothing_is_cast_twice() -> None:
    x = drawn(4, 4)
    step = made(lambda x: [x @ x], x)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        (found,) = step.run([x], 0)
        rounded = made(lambda x: [x @ x], x)
    assert torch.equal(x @ x, found)
    (again,) = rounded.run([x], 0)
    assert torch.bfloat16 == again.dtype


KNOWN = torch.zeros(4, device=DEVICE)

REFUSED: dict[str, tuple[Run, str]] = {
    "item": (lambda x: [x * x.sum().item()], "_local_scalar_dense reads a value"),
    "bool": (lambda x: [x if (x > 0).any() else -x], "_local_scalar_dense reads a value"),
    "a number": (lambda x: [x[int(x.argmax()) % 4]], "_local_scalar_dense reads a value"),
    "equal": (lambda x: [x + float(torch.equal(x, x))], "equal reads a value"),
    "allclose": (lambda x: [x + float(torch.allclose(x, x))], "allclose reads a value"),
    "nonzero": (lambda x: [x.nonzero()], "nonzero makes a tensor whose size depends on values"),
    "where": (lambda x: [*torch.where(x > 0)], "nonzero makes a tensor whose size"),
    "a mask": (lambda x: [x[x > 0]], "index makes a tensor whose size"),
    "masked_select": (lambda x: [torch.masked_select(x, x > 0)], "masked_select makes a tensor whose size"),
    "unique": (lambda x: [torch.unique(x)], "_unique2 makes a tensor whose size"),
    "repeat_interleave": (
        lambda x: [x.repeat_interleave(torch.ones(4, dtype=torch.int64, device=DEVICE), 0)],
        "repeat_interleave makes a tensor whose size",
    ),
    "another tensor is written to": (lambda x: [KNOWN.copy_(x[0])], "copy_ writes to a tensor that was there before"),
    "another is out": (lambda x: [torch.sum(x, 0, out=KNOWN)], "sum writes to a tensor that was there before"),
    "out of another size": (lambda x: [torch.add(x, 1, out=torch.empty(0, device=DEVICE))], "add gives a tensor other"),
    "resize": (lambda x: [torch.empty(0, device=DEVICE).resize_(3).fill_(1)], "resize_ gives a tensor other memory"),
    "set": (lambda x: [torch.empty(0, device=DEVICE).set_(x + 1)], "set_ gives a tensor other memory"),
    "beyond a slot": (lambda x: [x.as_strided((5,), (4,)) + 1], "it goes beyond the tensors that were handed over"),
    "sparse": (lambda x: [(x * 1).to_sparse().to_dense()], "has to do with a tensor that is not plain"),
    "too much room": (lambda x: [torch.empty(ROOM, device=DEVICE).fill_(0)[:1]], "it holds more than"),
    "too much in results": (lambda x: [torch.zeros(ROOM // 4, device=DEVICE)[:4] + 1], "it holds more than 16,777,216"),
}  # fmt: skip


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference mode"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_repeated_has_a_reason(name: str, inference: bool) -> None:
    run, why = REFUSED[name]
    with torch.inference_mode(inference):
        assert why in refused(run, drawn(8, 4)[:4])


@pytest.mark.parametrize(
    "run",
    [
        lambda x: [torch.rand(4, device=DEVICE)],
        lambda x: [x.clone().normal_()],
        lambda x: [torch.randperm(4, device=DEVICE)],
        lambda x: [torch.nn.functional.dropout(x, 0.5)],
        lambda x: [x.bernoulli(0.5)],
        lambda x: [torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5)],
    ],
)
@pytest.mark.parametrize("inference", [False, True])
def test_random_numbers_are_refused(run: Run, inference: bool) -> None:
    with torch.inference_mode(inference):
        x = drawn(4, 4)
        assert "draws random numbers" in str(record(lambda: run(x), [x], ROOM)[1])


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_within_a_mode_or_a_transform_nothing_is_recorded() -> None:
    with Passing():
        assert recording.TRANSFORM == refused(lambda x: [x + 1], drawn(4))
    seen: list[object] = []

    def mapped(x: Tensor) -> Tensor:
        found, why = record(lambda: [x + 1], [x], ROOM)
        seen.append(why)
        return found[0]

    torch.func.vmap(mapped)(drawn(4, 4))
    assert [recording.TRANSFORM] == seen


def test_a_recording_within_another_is_part_of_it() -> None:
    inner: list[object] = []

    def run(x: Tensor) -> list[Tensor]:
        found, why = record(lambda: [x + 1], [x], ROOM)
        inner.append(why)
        return [found[0] * 2]

    assert ["add", "mul"] == names(holds(run, drawn(4)))
    assert recording.TRANSFORM == inner[0]


def test_gradients_and_empty_slots_are_refused() -> None:
    x = drawn(4).requires_grad_()
    found, why = record(lambda: [x * 2], [x], ROOM)
    assert (recording.GRADIENTS, True) == (why, found[0].requires_grad)
    with torch.no_grad():
        assert isinstance(record(lambda: [x * 2], [x], ROOM)[1], Step)
    assert recording.EMPTY_SLOT == refused(lambda x: [x + 1], drawn(0))


def test_an_error_passes_through_and_leaves_no_recording() -> None:
    def fails(x: Tensor) -> list[Tensor]:
        scaled(x)
        raise ZeroDivisionError("mine")

    x = drawn(4)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="mine"):
            record(lambda: fails(x), [x], ROOM)
        assert RECORDING.get() is None
        assert 0 == torch._C._len_torch_dispatch_stack()
    holds(lambda x: [x + 1], x)


def test_after_a_refusal_nothing_is_held() -> None:
    seen: list[weakref.ref[Tensor]] = []

    def run(x: Tensor) -> list[Tensor]:
        seen.append(weakref.ref(big := x + 1))
        float(x.sum())
        del big
        assert seen[-1]() is None
        later = x + 2
        seen.append(weakref.ref(later))
        del later
        assert seen[-1]() is None
        return [x]

    x = drawn(4)
    assert "reads a value" in str(record(lambda: run(x), [x], ROOM)[1])


@pytest.mark.parametrize(
    ("launch", "why"),
    [
        (lambda x, y: enqueue(scale_kernel, (1,), x, word=2, y_ptr=y, count=4, **FUSED), "is given by its name"),
        (lambda x, y: enqueue(scale_kernel, (OfLayer.at(1, int),), x, y, 2, 4, **FUSED), "decides how it is compiled"),
        (
            lambda x, y: enqueue(scale_kernel, (1,), x, y, 2, 4, BLOCK=OfLayer.at(4, int), enable_fp_fusion=True),
            "decides how it is compiled",
        ),
    ],
)  # fmt: skip
def test_launches_that_would_be_the_same_for_others_are_refused(launch: Any, why: str) -> None:
    def run(x: Tensor, y: Tensor) -> list[Tensor]:
        launch(x, y)
        return [y]

    x = drawn(4)
    assert why in str(record(lambda: run(x, torch.zeros_like(x)), [x, drawn(4)], ROOM)[1])


@pytest.mark.gpu
def test_a_kernel_compiled_for_the_layers_number_is_refused() -> None:
    x, y = drawn(4), drawn(4)

    def run() -> list[Tensor]:
        enqueue(special_kernel, (1,), x, y, OfLayer.at(1, int), 4, **FUSED)
        return [y]

    assert "name it in do_not_specialize" in str(record(run, [x, y], ROOM)[1])


def test_a_tensor_from_outside_that_a_kernel_got_is_read_anew() -> None:
    """Nobody can tell whether the kernel writes to it."""
    table = torch.zeros(4, device=DEVICE)

    def run(x: Tensor) -> list[Tensor]:
        scaled(x, into=table)
        return [table * 2]

    holds(run, drawn(4))


def test_an_operator_that_launches_is_repeated_and_its_launches_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    @torch.library.custom_op("sparseprefill_tests::scaled", mutates_args=())
    def operator(x: Tensor) -> Tensor:
        return scaled(x)

    step = holds(lambda x: [operator(x) + 1], drawn(4))
    assert [True, True] == [isinstance(one, Operator) for one in step.work]
    assert not any(isinstance(one, Launch) for one in step.work)


def test_threads_record_apart() -> None:
    """Each its own call, at the same time."""
    gate, found = threading.Barrier(4, timeout=60), dict[int, Any]()

    def work(n: int) -> None:
        def run(x: Tensor) -> list[Tensor]:
            for _ in range(n):
                gate.wait()
                x = x + n
            for _ in range(4 - n):
                gate.wait()
            return [x]

        x = drawn(4, 4, seed=n)
        (plain,), step = record(lambda: run(x), [x], ROOM)
        found[n] = plain, step, x

    workers = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for one in workers:
        one.start()
    for one in workers:
        one.join()
    assert RECORDING.get() is None
    for n, (plain, step, x) in found.items():
        assert isinstance(step, Step), step
        assert n == len(step.work)
        assert torch.equal(plain, step.run([x], 0)[0])


def test_a_step_may_run_in_threads_at_the_same_time() -> None:
    step = made(lambda x: [scaled(scaled(x) + 1)], drawn(4, 4))
    found: dict[int, bool] = {}

    def work(n: int) -> None:
        x = drawn(4, 4, seed=n)
        found[n] = all(torch.equal(3 * (3 * x + 1), step.run([x], 0)[0]) for _ in range(5))

    if CUDA:
        workers = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for one in workers:
            one.start()
        for one in workers:
            one.join()
    else:  # Triton's interpreter is one for all threads
        for n in range(4):
            work(n)
    assert dict.fromkeys(range(4), True) == found


Action = tuple[str, int, int, int]
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["add", "mul_", "launch", "launch into", "view", "t", "empty", "fill", "arange", "cat", "max", "foreach_",
             "tensor", "copy_", "slot_", "reshape", "out"]
        ),
        st.integers(0, 30),
        st.integers(0, 30),
        st.integers(1, 3),
    ),
    min_size=1,
    max_size=14,
)  # fmt: skip


def program(actions: Sequence[Action], results: Sequence[int], *slots: Tensor) -> list[Tensor]:
    """Operators and launches over tensors [4, 4] that were made before, chosen by number."""
    known = list(slots)
    for what, i, j, n in actions:
        x, y = known[i % len(known)], known[j % len(known)]
        place: dict[str, Any] = {"device": DEVICE, "dtype": x.dtype}
        if what == "add":
            known.append(x + n * y)
        elif what == "mul_":
            x.mul_(y * 0.5)
        elif what == "launch":
            known.append(scaled(x.contiguous(), n))
        elif what == "launch into":
            if x.is_contiguous() and y.is_contiguous():
                scaled(x, n, y)
        elif what == "view":
            known.append(x.flatten().roll(n).view(4, 4))
        elif what == "t":
            known.append(x.t())
        elif what == "empty":
            known.append(scaled(x.contiguous(), n, torch.empty(4, 4, **place)))
        elif what == "fill":
            known.append(torch.full((4, 4), float(n), **place))
        elif what == "arange":
            known.append(torch.arange(16, **place).view(4, 4) / 8 * n)
        elif what == "cat":
            known.append(torch.cat([x[:n], y[n:]]))
        elif what == "max":
            values, where = x.max(n % 2, keepdim=True)
            known.append(values.expand(4, 4) + where)
        elif what == "foreach_":
            vars(torch)["_foreach_add_"]([x, y], 0.25 * n)
        elif what == "tensor":
            known.append(torch.tensor([[0.5 * n] * 4] * 4, **place))
        elif what == "copy_":
            x[:n].copy_(y[:n].clone())
        elif what == "slot_":
            slots[i % len(slots)].add_(y.clone())
        elif what == "reshape":
            known.append(x.t().reshape(2, 8).reshape(4, 4))
        else:
            known.append(torch.sub(x, y, out=torch.empty(4, 4, **place)))
    return [known[i % len(known)] for i in results]


def overlaps(step: Step) -> list[tuple[int, int]]:
    """Pairs of ranges of scratch, as the work uses them, that overlap and are not one tensor's."""
    uses: dict[tuple[int, int], tuple[int, int]] = {}
    own = len(step.slots.first)
    for i, one in enumerate(step.work):
        for place in one.places:
            if place.root == own:
                reach = sum((n - 1) * s for n, s in zip(place.size, place.stride, strict=True)) + 1
                assert 0 <= place.offset <= place.offset + reach * place.dtype.itemsize <= step.scratch
                key = place.offset // ALIGNMENT, i
                uses[key] = (place.offset, place.offset + reach * place.dtype.itemsize)
    return [(a[0], b[0]) for a, x in uses.items() for b, y in uses.items() if a[0] < b[0] and y[0] < x[1]]


@part(4)
@given(actions=ACTIONS, results=st.lists(st.integers(0, 40), max_size=3), inference=st.booleans())
def test_any_program_is_repeated(actions: list[Action], results: list[int], inference: bool) -> None:
    def run(*slots: Tensor) -> list[Tensor]:
        return program(actions, results, *slots)

    with torch.inference_mode(inference):
        whole = drawn(8, 4, seed=9) / 4
        step = holds(run, whole[:4], drawn(4, 4, seed=8) / 4, whole[4:])
    assert [] == overlaps(step)


@pytest.mark.skipif(CUDA, reason="values are looked at on a CPU alone")
def test_rows_without_a_key_are_an_error_in_a_recorded_call_too() -> None:
    class Empty:
        def estimate(self, call: sp.AttentionCall, memory: sp.Memory) -> sp.Plan:
            keep = torch.ones(call.geometry.map_shape(16, 16), dtype=torch.bool)
            keep[:, -1] = False
            return sp.Plan(sp.SparseMask.from_tiles(call, keep, 16, diagonal=False))

    slots = [torch.randn(1, 2, 64, 16) for _ in range(3)]
    made = sp.Pipeline(Empty(), executor=sp.ReferenceExecutor(), name="mine")
    with pytest.raises(sp.StageError, match=r"^mine: Empty left query rows without a key"):
        record(lambda: [made.run(sp.AttentionCall(*slots)).out], slots, ROOM)
    assert RECORDING.get() is None


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_driver_gets_from_a_step_what_triton_gives_it(seed: int) -> None:
    script = Path(__file__).with_name("relaunched.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join(filter(None, [str(script.parents[1]), environment.get("PYTHONPATH")]))
    command = [sys.executable, "-P", str(script), str(seed)]
    done = subprocess.run(command, env={**environment, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("compared") > 150
    refused = "a launch of mixed_kernel cannot be repeated: some of its arguments have defaults"
    assert found == {"refused": [refused], "unlike": []}


def test_a_compiled_function_is_recorded_and_nothing_of_ours_is_compiled_for_it() -> None:
    from torch._dynamo.utils import counters

    @torch.compile(backend="eager")
    def wave(x: Tensor) -> Tensor:
        return (x * 2).sin() + 1

    x = drawn(100)
    wave(x)
    counters.clear()
    step = made(lambda x: [wave(x)], x)
    holds(lambda x: [wave(x)], x, step=step)
    assert not counters["frames"]
