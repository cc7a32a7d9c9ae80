"""Steps: the launches and operators of one layer's call, repeated for other tensors of the same sizes.

A `Step` holds no tensor of a layer. To run it takes one buffer of scratch from torch's allocator, which gets it back at
once, and then goes through a list: of each launch the compiled kernel with its arguments, into which the addresses of
this layer's tensors are put. Nothing is asked, chosen, or looked at on the way, but whether the tensors are of the sizes
that were recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import torch
import triton
from attrs import evolve, field, frozen
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from sparseprefill.mask.recorded import OfLayer

SEVERAL = frozenset((list, tuple))
NUMBERS = frozenset((int, float, bool, type(None)))
"""Types of a launch's arguments that are the same in every layer."""
DESCRIPTORS = 64
"""Descriptors of one launch that are kept, by address: a model's layers have a cache each."""
SHORT = {torch.ops.aten.empty.memory_format: torch.empty, torch.ops.aten.zeros.default: torch.zeros}
"""Functions that do what an operator does, at a third of the host's time."""
STREAM = 3
"""Place of the stream in a launch's line, behind the grid."""
STRAIGHT = "3.6."
"""Versions of Triton whose own launcher is known well enough to be called without what it does first: it encodes the
descriptors of every launch anew, which takes the host as long as the launch itself."""


class Place(NamedTuple):
    """Place of a tensor: bytes behind the address of a root (a slot, the scratch, or what an operator made)."""

    root: int
    offset: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, root: Tensor) -> Tensor:
        """The tensor there."""
        same = self.offset == 0 and root.dtype == self.dtype and root.shape == self.size
        if same and root.stride() == self.stride:
            return root
        storage = root.untyped_storage()
        made = torch.empty(0, dtype=self.dtype, device=root.device)
        begin = (root.storage_offset() * root.element_size() + self.offset) // made.element_size()
        return made.set_(storage, begin, self.size, self.stride)


class _Address:
    """Stands for the tensor of a descriptor: Triton asks it for its address."""

    __slots__ = ("at", "dtype")

    def __init__(self, at: int, dtype: torch.dtype) -> None:
        self.at, self.dtype = at, dtype

    def data_ptr(self) -> int:
        return self.at


@frozen(eq=False)
class Descriptor:
    """A tensor descriptor over a place. like: one of the same shape. encode: what the launch takes in its place; None
    for itself."""

    like: Any
    base: Any
    encode: Callable[[Any], Any] | None = None
    _known: dict[int, Any] = field(factory=dict, init=False)

    def at(self, address: int) -> Any:
        """Argument of a launch for the descriptor of the tensor at an address."""
        found = self._known.get(address)
        if found is None:
            found = self.over(_Address(address, self.base.dtype))
            found = found if self.encode is None else self.encode(found)
            if len(self._known) >= DESCRIPTORS:
                self._known.clear()
            self._known[address] = found
        return found

    def over(self, base: Any) -> Any:
        """The same over another tensor; what a descriptor checks when it is made holds for it."""
        made = object.__new__(type(self.like))
        vars(made).update(vars(self.like), base=base)
        return made


def bound(descriptor: Any, argument: Callable[[Any], Any]) -> Any:
    """A launch's descriptor by the place of its tensor; itself where that is a constant."""
    base = argument(descriptor.base)
    if not isinstance(base, Place):
        return descriptor
    empty = Descriptor(descriptor, base).over(None)  # holds no tensor
    return Descriptor(empty, base)


def mapped(change: Callable[[Any], Any], x: Any) -> Any:
    """An operator's arguments, each changed, those in lists too."""
    if type(x) in SEVERAL:
        return type(x)(mapped(change, one) for one in x)
    return change(x)


def tensors_of(x: Any) -> Iterator[Tensor]:
    """Tensors among an operator's arguments or results, in their order."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, list | tuple):
        for one in x:
            yield from tensors_of(one)
    elif isinstance(x, dict):
        yield from tensors_of(list(x.values()))


Encode = Callable[[Any], Any]


def straight(compiled: Any) -> tuple[Callable[..., Any], tuple[Any, ...], list[Encode] | None]:
    """Launcher of a compiled kernel, its arguments between the stream and the kernel's own where nobody listens, and what
    encodes descriptors in their order; None where the launcher does."""
    head = compiled.function, compiled.packed_metadata, None, None, None
    run = compiled.run
    if not triton.__version__.startswith(STRAIGHT) or run.global_scratch_size or run.profile_scratch_size:
        return run, head, None
    inner = getattr(run.launch, "__closure__", None)
    cells = {} if inner is None else dict(zip(run.launch.__code__.co_freevars, inner, strict=True))
    metas = cells["tensordesc_meta"].cell_contents if cells else []
    if not all(metas):  # kernels that take no map of the copy engine's
        return run, head, None
    from triton.backends.nvidia.driver import make_tensordesc_arg  # pyright: ignore[reportMissingImports]

    def encoder(meta: Any) -> Encode:
        return lambda descriptor: make_tensordesc_arg(descriptor, meta)[0]

    launch = cells["launcher"].cell_contents if cells else run.launch
    whole = (head[0], run.launch_cooperative_grid, run.launch_pdl, None, None, *head[1:])
    return launch, whole, [encoder(meta) for meta in metas]


@frozen(eq=False)
class Launch:
    """A launch. run: of Triton's interpreter on its grid; on a GPU of `line`. arguments: as the kernel takes them,
    `Place`s and `Descriptor`s among them; odd: where those that are no plain numbers stand. options: of the interpreter; None on a GPU. compiled, grid: there; line: what
    `run` takes there, with gaps for the stream and what differs by layer. others: what it reads by the numbers of an
    argument, which are kept for it: places, or tensors from outside."""

    run: Callable[..., Any]
    arguments: tuple[Any, ...]
    odd: tuple[int, ...]
    options: dict[str, Any] | None = None
    compiled: Any = None
    grid: tuple[int, ...] = ()
    others: tuple[Any, ...] = ()
    line: tuple[Any, ...] = ()
    numbers: tuple[tuple[int, Callable[[int], int]], ...] = ()
    pointers: tuple[tuple[int, int, int], ...] = ()
    descriptors: tuple[tuple[int, int, int, Descriptor], ...] = ()

    @classmethod
    def of(
        cls, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any], made: Any
    ) -> Self | str:
        """Of what `enqueue` launched; the reason where it cannot be bound."""
        if not isinstance(kernel, JITFunction):
            return cls(kernel[grid], args, odd_of(args), options)
        if not _ran(made):
            return "Triton does not tell the compiled kernel"
        last = kernel.arg_names[len(args) :]
        if not all(name in options for name in last):
            return "some of its arguments have defaults"
        given = (*args, *(options[name] for name in last))
        return cls(made.run, given, odd_of(given), compiled=made, grid=(*grid, 1, 1)[:3])

    @property
    def places(self) -> list[Place]:
        """Those of its tensors."""
        odd = [self.arguments[i] for i in self.odd]
        given = [x.base if isinstance(x, Descriptor) else x for x in odd]
        return [x for x in (*given, *self.others) if isinstance(x, Place)]

    def beside(self, *others: Any) -> Self:
        """A launch that reads these, too."""
        return evolve(self, others=others) if others else self

    def placed(self, settled: Callable[[Any], Any]) -> Self:
        """With final places."""

        given = list(self.arguments)
        for i in self.odd:
            x = given[i]
            if isinstance(x, Descriptor):
                base = settled(x.base)
                given[i] = Descriptor(x.like, base) if isinstance(base, Place) else x.over(base)
            else:
                given[i] = settled(x)
        more = tuple(map(settled, self.others))
        line = {} if self.options is not None else _line_of(self.compiled, self.grid, given, self.odd)
        fields = {"run": self.run, "options": self.options, "compiled": self.compiled, "grid": self.grid, **line}
        return type(self)(arguments=tuple(given), odd=self.odd, others=more, **fields)

    def there(self, layer: int, place: Callable[[Place], Any], descriptor: Callable[[Descriptor], Any]) -> list[Any]:
        """The arguments of a layer, as Triton's own launch takes them."""

        def of(x: Any) -> Any:
            if type(x) is OfLayer:
                return x.of(layer)
            if isinstance(x, Descriptor):
                return descriptor(x)
            return place(x) if isinstance(x, Place) else x

        return list(map(of, self.arguments))

    def interpreted(self, roots: Sequence[Tensor], layer: int) -> None:
        """In Triton's interpreter, which takes tensors."""
        given = self.there(layer, lambda x: x.of(roots[x.root]), lambda x: x.over(x.base.of(roots[x.base.root])))
        self.run(*given, **(self.options or {}))

    def told(self, addresses: Sequence[int], layer: int, stream: Any) -> None:
        """Launch where somebody listens to that, as a profiler does."""

        def at(x: Place) -> int:
            return addresses[x.root] + x.offset

        given = self.there(layer, at, lambda x: x.over(_Address(at(x.base), x.base.dtype)))
        self.compiled[self.grid](*given, stream=stream)


def odd_of(arguments: Sequence[Any]) -> tuple[int, ...]:
    """Places of arguments that are no plain numbers: a few of many."""
    return tuple([i for i, x in enumerate(arguments) if type(x) not in NUMBERS])


def _line_of(compiled: Any, grid: tuple[int, ...], arguments: Sequence[Any], odd: Sequence[int]) -> dict[str, Any]:
    """Fields of a launch on a GPU, by what it is launched with."""
    run, head, encoders = straight(compiled)
    line: list[Any] = [*grid, None, *head]
    numbers = list[tuple[int, Callable[[int], int]]]()
    pointers, descriptors = list[tuple[int, int, int]](), list[tuple[int, int, int, Descriptor]]()
    each, done = iter(encoders or ()), 0
    for i in odd:
        line += arguments[done:i]
        x, done = arguments[i], i + 1
        here, encode = len(line), next(each) if encoders is not None and _is_descriptor(x) else None
        if isinstance(x, Place):
            pointers.append((here, x.root, x.offset))
        elif isinstance(x, Descriptor):
            descriptors.append((here, x.base.root, x.base.offset, Descriptor(x.like, x.base, encode)))
        elif type(x) is OfLayer:
            numbers.append((here, x.of))
        line.append(x if encode is None or isinstance(x, Descriptor) else encode(x))
        if encode is not None:
            like = x.like if isinstance(x, Descriptor) else x
            line += [*like.shape, *like.strides]
    line += arguments[done:]
    return {
        "run": run,
        "line": tuple(line),
        "numbers": tuple(numbers),
        "pointers": tuple(pointers),
        "descriptors": tuple(descriptors),
    }


def _ran(made: Any) -> bool:
    """True if a launch gave the compiled kernel that ran, on a GPU whose compiler looks at nothing else."""
    if not isinstance(made, CompiledKernel) or made.module is None:
        return False
    return bool(made.metadata.target.backend == "cuda")


def _is_descriptor(x: Any) -> bool:
    return isinstance(x, Descriptor) or hasattr(x, "block_shape")


@frozen(eq=False)
class Operator:
    """An operator of torch. fresh: which of the tensors that it returns begin a root. spots: places among its arguments
    by position; deep: whether others stand in lists, or behind names."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fresh: tuple[int, ...]
    places: list[Place] = field(init=False)
    spots: tuple[tuple[int, Place], ...] = field(init=False)
    deep: bool = field(init=False)

    def __attrs_post_init__(self) -> None:
        found = list[Place]()
        mapped(lambda x: found.append(x) if isinstance(x, Place) else None, [*self.args, *self.kwargs.values()])
        spots = tuple((i, x) for i, x in enumerate(self.args) if isinstance(x, Place))
        named = (
            ("places", found),
            ("spots", spots),
            ("deep", len(spots) < len(found)),
            ("func", SHORT.get(self.func, self.func)),
        )
        for name, value in named:
            object.__setattr__(self, name, value)

    def placed(self, settled: Callable[[Any], Any]) -> Self:
        """With final places."""
        kwargs = {name: mapped(settled, x) for name, x in self.kwargs.items()}
        return type(self)(self.func, mapped(settled, self.args), kwargs, self.fresh)

    def given(self, roots: list[Tensor]) -> tuple[Any, dict[str, Any]]:
        """Its arguments with tensors in the place of places."""

        def there(x: Any) -> Any:
            return x.of(roots[x.root]) if type(x) is Place else x

        return mapped(there, self.args), {name: mapped(there, x) for name, x in self.kwargs.items()}

    def made(self, found: Any) -> list[Tensor]:
        """Of what it returns, what begins a root."""
        made = list(tensors_of(found))
        return [made[i] for i in self.fresh]


Fact = tuple[torch.dtype, torch.Size, tuple[int, ...], int, int]


def _fact(x: Tensor) -> Fact:
    return x.dtype, x.shape, x.stride(), x.data_ptr() % 16, x.get_device()


@frozen(eq=False)
class Slots:
    """Facts of tensors in whose place a layer has others.

    facts: of each, what it must be like. ways: of each the root that it lies in, and how many bytes behind that root's
    first slot; first: those.
    """

    facts: tuple[Fact, ...]
    ways: tuple[tuple[int, int], ...]
    first: tuple[int, ...]

    @classmethod
    def of(cls, slots: Sequence[Tensor]) -> Self:
        """Those that share a storage are one root."""
        known: dict[int, int] = {}
        ways, first = list[tuple[int, int]](), list[int]()
        for i, slot in enumerate(slots):
            root = known.setdefault(slot.untyped_storage()._cdata, len(known))
            if root == len(first):
                first.append(i)
            ways.append((root, slot.data_ptr() - slots[first[root]].data_ptr()))
        return cls(tuple(map(_fact, slots)), tuple(ways), tuple(first))

    def fit(self, slots: Sequence[Tensor]) -> bool:
        """True for tensors of the same sizes, strides, types, alignment and device, that lie in each other likewise."""
        if len(slots) != len(self.facts):
            return False
        for x, fact in zip(slots, self.facts, strict=True):
            if (x.dtype, x.shape, x.stride(), x.data_ptr() % 16, x.get_device()) != fact:
                return False
        if len(self.first) == len(slots):
            return True
        each = zip(slots, self.ways, strict=True)
        return all(x.data_ptr() - slots[self.first[root]].data_ptr() == behind for x, (root, behind) in each)


@frozen(eq=False)
class Step:
    """Work of a call on its device. See the module.

    device: where. slots: what it may run with. scratch: bytes. work: launches and operators, in order. results:
    places of what a run returns.
    """

    device: torch.device
    slots: Slots
    scratch: int
    work: tuple[Launch | Operator, ...]
    results: tuple[Any, ...]

    @classmethod
    def of(
        cls, slots: Sequence[Tensor], scratch: int, work: Sequence[Launch | Operator], results: Sequence[Any]
    ) -> Self:
        """slots: that it was recorded with."""
        return cls(slots[0].device, Slots.of(slots), scratch, tuple(work), tuple(results))

    @property
    def launches(self) -> int:
        """Kernels that a run launches, those of torch's operators left out."""
        return sum(isinstance(one, Launch) for one in self.work)

    def run(self, slots: Sequence[Tensor], layer: int) -> list[Tensor]:
        """Do for these tensors, which fit `slots`, what was recorded. layer: its index, for what hashes depend on. Launches come
        on the current stream; nobody waits."""
        kind = self.device.type
        if torch.is_autocast_enabled(kind):  # what was cast then is cast by an operator of its own
            with torch.autocast(kind, enabled=False):
                return self.run(slots, layer)
        if kind != "cuda" or self.device.index == torch.cuda.current_device():
            return self._run(slots, layer)
        with torch.cuda.device(self.device):
            return self._run(slots, layer)

    def _run(self, slots: Sequence[Tensor], layer: int) -> list[Tensor]:
        roots = [slots[i] for i in self.slots.first]
        roots.append(torch.empty(self.scratch, dtype=torch.uint8, device=self.device))
        addresses = [x.data_ptr() for x in roots]
        stream: Any = None
        told = False
        for one in self.work:
            if isinstance(one, Operator):
                args: Sequence[Any] = one.args
                kwargs = one.kwargs
                if one.spots:
                    args = filled = [*args]
                    for i, place in one.spots:
                        filled[i] = place.of(roots[place.root])
                if one.deep:
                    args, kwargs = one.given(roots)
                found = one.func(*args, **kwargs)
                if one.fresh:
                    made = [found] if isinstance(found, Tensor) else one.made(found)
                    roots += made
                    addresses += [x.data_ptr() for x in made]
                continue
            if one.options is not None:
                one.interpreted(roots, layer)
                continue
            if stream is None:
                active = driver.active
                stream = active.get_current_stream(active.get_current_device())
                enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
                told = bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))  # a chain may be empty
            if told:
                one.told(addresses, layer, stream)
                continue
            given = list(one.line)
            given[STREAM] = stream
            for i, of in one.numbers:
                given[i] = of(layer)
            for i, root, offset in one.pointers:
                given[i] = addresses[root] + offset
            for i, root, offset, descriptor in one.descriptors:
                given[i] = descriptor.at(addresses[root] + offset)
            one.run(*given)
        return [x.of(roots[x.root]) if type(x) is Place else x for x in self.results]
