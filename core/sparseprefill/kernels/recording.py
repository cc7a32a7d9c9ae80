"""Recording of what one layer's call does on its device, so that other layers can repeat it without asking again.

A call's launches and torch operators follow from its sizes, once its stages say so (``repeats``, see `stages`): layers of
a model differ in tensors alone. `record` runs a call and writes down each launch and operator, with where each tensor
lies: in one that the caller handed over (a slot), in scratch, or in what an operator made. The outcome is a `Step`.

What a recording cannot tell apart from a constant is refused, with its reason: values read on the host, sizes that
values decide, random numbers. What it cannot see at all are launches that are not made by `enqueue`, and who writes to
tensors that were there before: hence the stages' own word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from sparseprefill.kernels.repeat import NUMBERS, Launch, Operator, Place, Step, bound, mapped, odd_of, tensors_of
from sparseprefill.mask.recorded import RECORDING, OfLayer

MODES: Any = torch._C
ALIGNMENT = 512
"""Bytes at whose multiples tensors begin in scratch, as in what torch's own allocator gives."""
EMPTY = frozenset(("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"))
"""Operators that make room, and write nothing there."""
INDEXING = frozenset(("index", "index_put_", "index_put", "_unsafe_index", "_index_put_impl_"))
"""Operators whose sizes follow from values only where an index is a mask."""
MOVING = ("set_", "resize_")
"""Beginnings of the names of operators that give a tensor other memory."""
DROPOUT = "dropout_p"
"""The argument of operators that draw numbers only where it is not zero."""
TRANSFORM = "a dispatch mode or a transform is on"
CAPTURE = "a CUDA graph is being captured"
GRADIENTS = "gradients are recorded"
EMPTY_SLOT = "a tensor that was handed over has no elements"
ODD = "{name} has to do with a tensor that is not plain: {kind}"
MOVED = "{name} gives a tensor other memory"
APART = "requests that share a launch have tensors in different storages"
BEYOND = "it goes beyond the tensors that were handed over"
READ = "{name} reads a value of the device on the host"
SIZED = "{name} makes a tensor whose size depends on values"
RANDOM = "{name} draws random numbers"
CONSTANT = "{name} writes to a tensor that was there before"
ROOM = "it holds more than {room:,} bytes"
FOREIGN = "a launch of {name} cannot be repeated: {why}"


def record(run: Callable[[], Sequence[Tensor]], slots: Sequence[Tensor], room: int) -> tuple[list[Tensor], Step | str]:
    """Results of `run`, and the step that does the same for other tensors in the place of `slots`; or why there is none.

    slots: all tensors that differ from layer to layer, outputs among them; the recording knows their views. room: bytes
    that the call may hold while it is recorded, for nothing is freed until its end. Errors of `run` pass through.
    Nothing is recorded within a dispatch mode, and while a CUDA graph is captured.
    """
    if why := unrecordable(slots[0].device) or _unfit(slots):
        return list(run()), why
    recording = Recording(slots, room)
    token = RECORDING.set(recording)
    try:
        with recording:
            found = list(run())
    finally:
        RECORDING.reset(token)
    return found, recording.step(found)


def unrecordable(device: torch.device) -> str:
    """Reason for which nothing is recorded now, whatever it is; empty where there is none."""
    if MODES._len_torch_dispatch_stack() or MODES._functorch.maybe_current_level() is not None:
        return TRANSFORM
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return CAPTURE
    return ""


def _unfit(slots: Sequence[Tensor]) -> str:
    """Reason for which these cannot be slots; empty where there is none."""
    if any(x.numel() == 0 for x in slots):
        return EMPTY_SLOT
    return GRADIENTS if torch.is_grad_enabled() and any(x.requires_grad for x in slots) else ""


@frozen(eq=False)
class _Kind:
    """Facts of an operator, asked once. decomposes: into others. views: it returns nothing but one view. reads: a value of
    the device on the host. sized: its result, by values. random: it draws numbers. moves: it turns a tensor into a view."""

    name: str
    decomposes: bool
    writes: bool
    views: bool
    reads: bool
    sized: bool
    random: bool
    moves: bool

    @classmethod
    def of(cls, func: Any) -> _Kind:
        """Those of an operator of torch."""
        schema, tags, name = func._schema, func.tags, func._schema.name.rpartition("::")[2]
        looks = all(one.alias_info is not None for one in schema.returns)
        return cls(
            name,
            decomposes=func._can_decompose(),
            writes=schema.is_mutable,
            views=not schema.is_mutable and [str(one.type) for one in schema.returns] == ["Tensor"] and looks,
            reads=torch.Tag.data_dependent_output in tags,
            sized=torch.Tag.dynamic_output_shape in tags,
            random=torch.Tag.nondeterministic_seeded in tags,
            moves=torch.Tag.inplace_view in tags,
        )


_kind: Callable[[Any], _Kind] = cache(_Kind.of)


class _Maker:
    """Of what an operator makes. constant: its inputs are, so its results are as long as nobody writes to them. needed:
    it has to be repeated, since they change, or since a kernel got them, of which nobody can tell whether it writes."""

    __slots__ = ("constant", "needed")

    def __init__(self, constant: bool) -> None:
        self.constant, self.needed = constant, not constant


NEEDED = _Maker(False)
"""Of launches, and of operators that write."""


@frozen(eq=False)
class Table:
    """See `Recording.told`. entries: number, the two places (or tensors from outside), and bytes of an element."""

    made: Tensor
    numbers: list[int]
    entries: list[tuple[int, Any, Any, int]]

    @property
    def read(self) -> list[Any]:
        """Places, or tensors from outside, that a launch with the table reads."""
        return [x for _, *both, _ in self.entries for x in both]

    def of(self, settled: Callable[[Any], Any]) -> Tensor | None:
        """The table for final places; None where two that it tells of lie in different tensors."""
        numbers = list(self.numbers)
        for i, one, other, size in self.entries:
            a, b = settled(one), settled(other)
            if isinstance(a, Tensor) and isinstance(b, Tensor):
                numbers[i] = (a.data_ptr() - b.data_ptr()) // size
                continue
            if isinstance(a, Tensor) or isinstance(b, Tensor) or a.root != b.root or (a.offset - b.offset) % size:
                return None
            numbers[i] = (a.offset - b.offset) // size
        return torch.tensor(numbers, dtype=self.made.dtype, device=self.made.device).view_as(self.made)


class Recording(TorchDispatchMode):
    """Watches one call; see `record`."""

    def __init__(self, slots: Sequence[Tensor], room: int) -> None:
        super().__init__()
        self._slots, self._room, self._why = tuple(slots), room, ""
        self._device = slots[0].device
        self._roots: dict[int, int] = {}  # by storage
        self._bases: list[int] = []  # bytes before roots in their storage
        # Their storages, which must not be given to others meanwhile. Of a tensor that it holds torch makes another.
        self._held: list[torch.UntypedStorage] = []
        self._sizes: list[tuple[int, int]] = []  # address and bytes of their storage
        self._ends: dict[int, tuple[int, int]] = {}  # of slots, the first byte and the one behind the last
        self._makers: dict[int, _Maker] = {}
        self._scratch: dict[int, int] = {}  # bytes of what was made room for
        self._touched: set[int] = set()  # storages from outside that a kernel got
        self._outside: list[Tensor] = []  # their tensors
        self._tables: dict[int, Table] = {}  # by storage
        self._entries: list[tuple[Callable[[], Launch | Operator], _Maker, range]] = []  # few are made in the end
        self._taken = 0  # bytes
        for slot in slots:
            self._begins(slot)
            root, first = self._roots[_storage(slot)], _before(slot)
            low, high = self._ends.get(root, (first, first))
            self._ends[root] = min(low, first), max(high, first + _reach(slot))
        self._own = len(self._bases)

    def _begins(self, x: Tensor) -> bool:
        """Make a tensor's storage a root; False where it is one already."""
        storage = x.untyped_storage()
        key = int(storage._cdata)
        if key in self._roots:
            return False
        self._roots[key] = len(self._bases)
        self._bases.append(_before(x))
        self._held.append(storage)
        self._sizes.append(_memory(storage))
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, kind = kwargs or {}, _kind(func)
        if kind.decomposes:  # in inference mode it comes as it is, and what it does would not be seen
            with self:
                return func.decompose(*args, **kwargs)
        if kind.views or kind.name == "empty":
            found = func(*args, **kwargs)
        else:
            token = RECORDING.set(None)  # what an operator launches is repeated with it
            try:
                found = func(*args, **kwargs)
            finally:
                RECORDING.reset(token)
        if self._why or (kind.views and _storage(found) in self._roots and not _odd(found)):
            return found  # it lies where its tensor does
        if kind.name == "empty" and not _odd(found):
            self._made_room(func, args, kwargs, found)
            return found
        given, made = list(tensors_of((args, kwargs))), list(tensors_of(found))
        odd = next(filter(None, map(_odd, (*given, *made))), "")
        why = ODD.format(name=kind.name, kind=odd) if odd else self._objection(func, kind, args, kwargs, given, made)
        if why:
            self.refuse(why)
        elif kind.name == "lift_fresh":
            found = self._lifted(found)
        else:
            self._note(func, kind, args, kwargs, given, made)
        return found

    def _objection(
        self, func: Any, kind: _Kind, args: Any, kwargs: Any, given: list[Tensor], made: list[Tensor]
    ) -> str | None:
        if not given and not kind.random:
            return None
        name, here = kind.name, any(x.device == self._device or not self._is_constant(x) for x in given)
        if kind.reads and here:
            return READ.format(name=name)
        if kind.sized and (
            name not in INDEXING or any(x.dtype in (torch.bool, torch.uint8) for x in tensors_of(args[1:]))
        ):
            return SIZED.format(name=name)
        if kind.random:  # the state that attention gives back may be the host's
            return None if _argument(func, DROPOUT, args, kwargs) == 0 else RANDOM.format(name=name)
        if here and any(x.device != self._device for x in made):
            return READ.format(name=name)
        return None

    def _lifted(self, x: Tensor) -> Tensor:
        """A tensor of numbers from the host, which nobody has written to yet: each run gets a copy of its own, and so
        does this one."""
        with _disable_current_modes():
            mine = x.clone()
        maker, first = _Maker(True), len(self._bases)
        self._begins(mine)
        self._keep(partial(Operator, torch.ops.aten.clone.default, (x,), {}, (0,)), maker, first)
        return mine

    def _note(self, func: Any, kind: _Kind, args: Any, kwargs: Any, given: list[Tensor], made: list[Tensor]) -> None:
        """Write an operator down, unless it only looks at a tensor otherwise."""
        first, name = len(self._bases), kind.name
        written = list(_written(func, args, kwargs)) if kind.writes else []
        if name.startswith(MOVING) or any(map(self._is_moved, written)):
            self.refuse(MOVED.format(name=name))
            return
        if kind.moves:
            return
        template: tuple[Any, dict[str, Any]] = (args, kwargs)
        if given:
            place = self._place_of
            template = mapped(place, args), {key: mapped(place, value) for key, value in kwargs.items()}
        maker = _Maker(not kind.writes and all(map(self._is_constant, given)))
        fresh = tuple([i for i, x in enumerate(made) if self._begins(x)])
        if self._why or not (fresh or kind.writes):
            return
        for x in written:
            if self._roots.get(_storage(x), first) >= first:
                self.refuse(CONSTANT.format(name=name))
                return
            self._need(self._roots.get(_storage(x), -1))
        if name in EMPTY and made[0].device == self._device:
            self._scratch[first] = made[0].untyped_storage().nbytes()
        self._keep(partial(Operator, func, *template, fresh), maker, first)

    def _made_room(self, func: Any, args: Any, kwargs: Any, found: Tensor) -> None:
        """Write down what is most of a recording: a tensor without values."""
        first = len(self._bases)
        self._begins(found)
        if found.device == self._device:
            self._scratch[first] = self._sizes[first][1]
        self._keep(partial(Operator, func, args, kwargs, (0,)), _Maker(True), first)

    def _keep(self, what: Callable[[], Operator], maker: _Maker, first: int) -> None:
        """Write an operator down that has made the roots from `first` on."""
        inside = range(first, len(self._bases))
        self._entries.append((what, maker, inside))
        self._makers.update(dict.fromkeys(inside, maker))
        self._taken += sum(self._sizes[i][1] for i in inside if self._held[i].device == self._device)
        if self._taken > self._room:
            self.refuse(ROOM.format(room=self._room))

    def _is_moved(self, x: Tensor) -> bool:
        """True if an operator has given a root other memory, as `out=` does where the size is another."""
        root = self._roots.get(_storage(x))
        return root is not None and self._sizes[root] != _memory(self._held[root])

    def _is_constant(self, x: Tensor) -> bool:
        root = self._roots.get(_storage(x))
        if root is None:
            return _storage(x) not in self._touched
        return root >= self._own and root not in self._scratch and self._makers[root].constant

    def _need(self, root: int) -> None:
        """Have what made a root repeated: somebody may write to it."""
        if root in self._makers and root not in self._scratch:
            maker = self._makers[root]
            maker.needed, maker.constant = True, False

    def launched(
        self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any], made: Any
    ) -> None:
        """A kernel was launched: told by `enqueue`. made: the compiled kernel, where Triton says."""
        if self._why:
            return
        given, odd = list(args), odd_of(args)
        why = _fixed(kernel, grid, args, odd, options)
        for i in () if why else odd:
            given[i] = self._argument(args[i])
        launch = why or Launch.of(kernel, grid, tuple(given), options, made)
        if isinstance(launch, str):
            self.refuse(FOREIGN.format(name=getattr(kernel, "__name__", "a kernel"), why=launch))
        elif not self._why:
            among = args if self._tables else ()
            tables = [self._tables.get(_storage(x)) for x in among if isinstance(x, Tensor)]
            beside = tuple(x for one in tables if one for x in one.read)
            self._entries.append((partial(launch.beside, *beside), NEEDED, range(0)))

    def gathered(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Tensors of which a table is to say how far they lie apart, so that this is the same in every step: those
        that would not be are copied to scratch."""
        if self._why or len({_storage(x) for x in tensors if x is not None}) < 2:
            return list(tensors)
        lie = [x if x is None or self._roots.get(_storage(x)) in self._scratch else None for x in tensors]
        each = zip(tensors, lie, strict=True)
        return [torch.empty_like(x).copy_(x) if found is None and x is not None else found for x, found in each]

    def told(self, table: Tensor, numbers: Sequence[int], entries: Sequence[tuple[int, Tensor, Tensor]]) -> None:
        """A table of int64 ``numbers``, some of which say by how many elements one tensor begins behind another: each
        step has the distances of its own. entries: the number of each, and its two tensors, which launches that get
        the table read."""
        if self._why:
            return
        with _disable_current_modes():
            for _, *both in entries:
                for x in both:
                    self._need(self._roots.get(_storage(x), -1))
            placed = [(i, self._place(a), self._place(b), a.element_size()) for i, a, b in entries]
            self._tables[_storage(table)] = Table(table, list(numbers), placed)

    def _argument(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            key = _storage(x)
            root = self._roots.get(key)
            if root is None:
                self._touched.add(key)
                self._outside.append(x)
                return x
            self._need(root)
            return self._placed(x, root)
        return bound(x, self._argument) if hasattr(x, "block_shape") else x

    def _place_of(self, x: Any) -> Any:
        return self._place(x) if isinstance(x, Tensor) else x

    def _place(self, x: Tensor) -> Any:
        """Place of a tensor; itself where it is a constant from outside."""
        root = self._roots.get(_storage(x))
        return x if root is None else self._placed(x, root)

    def _placed(self, x: Tensor, root: int) -> Place:
        first, ends = _before(x), self._ends.get(root)
        if ends is not None and x.numel() and not ends[0] <= first <= first + _reach(x) <= ends[1]:
            self.refuse(BEYOND)
        return Place(root, first - self._bases[root], x.dtype, tuple(x.shape), x.stride())

    def refuse(self, why: str) -> None:
        """Say why what runs now cannot be repeated; nothing is held for it any more."""
        self._why = self._why or why
        self._entries.clear()
        self._held.clear()
        self._outside.clear()
        self._tables.clear()

    def step(self, found: Sequence[Tensor]) -> Step | str:
        """The step that was recorded, or why there is none. found: what every run returns, in tensors of its own."""
        if self._why:
            return self._why
        for x in found:
            if why := _odd(x):
                return ODD.format(name="a result", kind=why)
            root = self._roots.get(_storage(x), -1)
            self._scratch.pop(root, None)  # the caller's
            self._need(root)
        # What makes room is no work; of the rest, what may change from layer to layer.
        kept = [one for one in self._entries if one[1].needed and not (one[2] and one[2][0] in self._scratch)]
        left = [(make(), inside) for make, _, inside in kept]
        ways, size = self._laid_out([what for what, _ in left])
        numbers = {root: self._own + 1 + n for n, root in enumerate(root for _, inside in left for root in inside)}

        tables = dict[int, Tensor]()

        def settled(x: Any) -> Any:
            if isinstance(x, Tensor):
                return tables.get(_storage(x), x)
            if not isinstance(x, Place) or x.root < self._own:
                return x
            if x.root in ways:
                return x._replace(root=self._own, offset=ways[x.root] + x.offset)
            if x.root in numbers:
                return x._replace(root=numbers[x.root])
            return x.of(_root(self._held[x.root], self._bases[x.root]))

        for key, table in self._tables.items():
            again = table.of(settled)
            if again is None:
                return APART
            tables[key] = again
        results = [settled(self._place(x)) for x in found]
        if self._why:
            return self._why
        return Step.of(self._slots, size, [what.placed(settled) for what, _ in left], results)

    def _laid_out(self, work: Sequence[Launch | Operator]) -> tuple[dict[int, int], int]:
        """Byte at which each tensor of scratch begins, and bytes that all of them take: what is over makes room."""
        uses: dict[int, list[int]] = {}
        for i, what in enumerate(work):
            for place in what.places:
                if place.root in self._scratch:
                    uses.setdefault(place.root, []).append(i)
        ways: dict[int, int] = {}
        alive: list[tuple[int, int, int]] = []  # begin, behind, last use
        size = 0
        for root, times in uses.items():  # by first use
            need = -(-self._scratch[root] // ALIGNMENT) * ALIGNMENT
            alive = sorted(one for one in alive if one[2] >= times[0])
            begin = 0
            for taken, behind, _ in alive:
                if taken - begin >= need:
                    break
                begin = max(begin, behind)
            ways[root] = begin
            alive.append((begin, begin + need, times[-1]))
            size = max(size, begin + need)
        return ways, size


def _storage(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _before(x: Tensor) -> int:
    """Bytes before a tensor in its storage: the address of one without elements tells nothing."""
    return int(x.storage_offset()) * x.element_size()


def _reach(x: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if x.is_contiguous():
        return x.numel() * x.element_size()
    return (sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) + 1) * x.element_size()


def _root(storage: torch.UntypedStorage, begin: int) -> Tensor:
    """A tensor without elements at a byte of a storage, of which `Place` makes others."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, begin, (0,), (1,))


def _memory(storage: torch.UntypedStorage) -> tuple[int, int]:
    return storage.data_ptr(), storage.nbytes()


def _odd(x: Tensor) -> str:
    """The kind of a tensor that is more than numbers in a storage; empty of a plain one."""
    if x.layout != torch.strided or x.is_nested:
        return "nested" if x.is_nested else str(x.layout)
    return "quantised" if x.is_quantized else "a view by its sign" if x.is_conj() or x.is_neg() else ""


def _fixed(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], odd: tuple[int, ...], options: dict[str, Any]
) -> str:
    """Reason for which a launch would be the same for other tensors, or another layer; empty where there is none.

    odd: where arguments stand that are no plain numbers.
    """
    named = [x for x in (*grid, *options.values()) if type(x) not in NUMBERS]
    if any(isinstance(x, Tensor) or hasattr(x, "block_shape") for x in named):
        return "a tensor is given by its name: pass tensors in the order of the signature"
    rest = [args[i] for i in odd]
    if any(isinstance(x, list | tuple | dict) for x in rest):
        return "a tuple is among its arguments: pass them one by one"
    if any(isinstance(x, OfLayer) for x in named):
        return "a number of the layer decides how it is compiled, or its grid"
    of_layer = any(type(x) is OfLayer for x in rest)
    for param, x in zip(getattr(kernel, "params", ()) if of_layer else (), args, strict=False):
        if isinstance(x, OfLayer) and not getattr(param, "do_not_specialize", True):
            return f"it is compiled for the value of {param.name}, a number of the layer: name it in do_not_specialize"
    return ""


def _argument(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """An operator's argument by name; None where it has none of that name."""
    for i, one in enumerate(func._schema.arguments):
        if one.name == name:
            return args[i] if i < len(args) else kwargs.get(name, one.default_value)
    return None


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensors that an operator writes to."""
    for i, one in enumerate(func._schema.arguments):
        if one.alias_info is not None and one.alias_info.is_write:
            yield from tensors_of(args[i] if i < len(args) else kwargs.get(one.name))
