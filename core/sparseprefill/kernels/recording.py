"""Recording of what one layer's call does on its device, so that other layers can repeat it without asking again.

A call's launches and torch operators follow from its sizes, once its stages say so (``repeats``, see `stages`): layers of
a model differ in tensors alone. `record` runs a call and writes down each launch and operator, with where each tensor
lies: in one that the caller handed over (a slot), in scratch, or in what an operator made. The outcome is a `Step`.

What a recording cannot tell apart from a constant is refused, with its reason: values read on the host, sizes that
values decide, random numbers. What it cannot see at all are launches that are not made by `enqueue`: hence the stages'
own word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from sparseprefill.kernels.repeat import Launch, Operator, Place, Step, bound, mapped
from sparseprefill.mask.recorded import RECORDING

MODES: Any = torch._C
ALIGNMENT = 512
"""Bytes at whose multiples tensors begin in scratch, as in what torch's own allocator gives."""
EMPTY = frozenset(("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"))
"""Operators that make room, and write nothing there."""
INDEXING = frozenset(("index", "index_put_", "index_put", "_unsafe_index", "_index_put_impl_"))
"""Operators whose sizes follow from values only where an index is a mask."""
SEEDED = ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "_cudnn_attention")
"""Operators that draw numbers only where there is dropout."""
TRANSFORM = "a dispatch mode or a transform is on"
CAPTURE = "a CUDA graph is being captured"
READ = "{name} reads a value of the device on the host"
SIZED = "{name} makes a tensor whose size depends on values"
RANDOM = "{name} draws random numbers"
CONSTANT = "{name} writes to a tensor that was there before"
ROOM = "it holds more than {room:,} bytes"
FOREIGN = "a launch of {name} cannot be repeated: {why}"


def record(run: Callable[[], Sequence[Tensor]], slots: Sequence[Tensor], room: int) -> tuple[list[Tensor], Step | str]:
    """What `run` returns, and the step that does the same for other tensors in the place of `slots`; or why there is none.

    slots: all tensors that differ from layer to layer, outputs among them; the recording knows their views. room: bytes
    that the call may hold while it is recorded, for nothing is freed until its end. Errors of `run` pass through.
    Nothing is recorded within a dispatch mode, and while a CUDA graph is captured.
    """
    if why := unrecordable(slots[0].device):
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


class _Maker:
    """Of what an operator makes. constant: its inputs are, so its results are as long as nobody writes to them. needed:
    it has to be repeated, since they change, or since a kernel got them, of which nobody can tell whether it writes."""

    __slots__ = ("constant", "needed")

    def __init__(self, constant: bool) -> None:
        self.constant, self.needed = constant, not constant


NEEDED = _Maker(False)
"""Of launches, and of operators that write."""


class Recording(TorchDispatchMode):
    """Watches one call; see `record`."""

    def __init__(self, slots: Sequence[Tensor], room: int) -> None:
        super().__init__()
        self._slots, self._room, self._why = tuple(slots), room, ""
        self._device = slots[0].device
        self._roots: dict[int, int] = {}  # by storage
        self._bases: list[int] = []  # addresses of roots
        self._held: list[Tensor] = []  # their tensors: a storage must not be given to others meanwhile
        self._makers: dict[int, _Maker] = {}
        self._scratch: dict[int, int] = {}  # bytes of what was made room for
        self._entries: list[tuple[Launch | Operator, _Maker, range]] = []
        for slot in slots:
            self._begins(slot)
        self._own = len(self._bases)

    def _begins(self, x: Tensor) -> bool:
        """Make a tensor's storage a root; False where it is one already."""
        key = x.untyped_storage()._cdata
        if key in self._roots:
            return False
        self._roots[key] = len(self._bases)
        self._bases.append(x.data_ptr())
        self._held.append(x)
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if self._why:
            return found
        name = func._schema.name.rpartition("::")[2]
        given, made = list(_tensors((args, kwargs))), list(_tensors(found))
        self._object(func, name, given, made)
        if not self._why:
            self._note(func, name, args, kwargs, given, made)
        return found

    def _object(self, func: Any, name: str, given: list[Tensor], made: list[Tensor]) -> None:
        tags, here = func.tags, any(x.device == self._device for x in given)
        if torch.Tag.data_dependent_output in tags and here:
            self.refuse(READ.format(name=name))
        elif torch.Tag.dynamic_output_shape in tags:
            if name not in INDEXING or any(x.dtype in (torch.bool, torch.uint8) for x in given):
                self.refuse(SIZED.format(name=name))
        elif torch.Tag.nondeterministic_seeded in tags and not name.startswith(SEEDED):
            self.refuse(RANDOM.format(name=name))
        elif here and any(x.device != self._device for x in made):
            self.refuse(READ.format(name=name))

    def _note(self, func: Any, name: str, args: Any, kwargs: Any, given: list[Tensor], made: list[Tensor]) -> None:
        """Write an operator down, unless it only looks at a tensor otherwise."""
        first, writes = len(self._bases), func._schema.is_mutable
        place = self._place_of
        template = mapped(place, args), {key: mapped(place, value) for key, value in kwargs.items()}
        maker = _Maker(not writes and all(map(self._is_constant, given)))
        fresh = tuple([i for i, x in enumerate(made) if self._begins(x)])
        if not fresh and not writes:
            return
        for x in _written(func, args, kwargs) if writes else ():
            if self._roots.get(x.untyped_storage()._cdata, first) >= first:
                self.refuse(CONSTANT.format(name=name))
            self._need(x)
        inside = range(first, len(self._bases))
        self._entries.append((Operator(func, *template, fresh), maker, inside))
        if name in EMPTY and made[0].device == self._device:
            self._scratch[first] = made[0].untyped_storage().nbytes()
            if sum(self._scratch.values()) > self._room:
                self.refuse(ROOM.format(room=self._room))
        self._makers.update(dict.fromkeys(inside, maker))

    def _is_constant(self, x: Tensor) -> bool:
        root = self._roots.get(x.untyped_storage()._cdata)
        if root is None:
            return True
        return root >= self._own and root not in self._scratch and self._makers[root].constant

    def _need(self, x: Tensor) -> None:
        """What made a tensor is repeated: somebody may write to it."""
        root = self._roots.get(x.untyped_storage()._cdata, -1)
        if root in self._makers and root not in self._scratch:
            maker = self._makers[root]
            maker.needed, maker.constant = True, False

    def launched(
        self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any], made: Any
    ) -> None:
        """A kernel was launched: told by `enqueue`. made: the compiled kernel, where Triton says."""
        if self._why:
            return
        with _disable_current_modes():
            launch = Launch.of(kernel, grid, tuple(map(self._argument, args)), options, made)
        if isinstance(launch, str):
            self.refuse(FOREIGN.format(name=getattr(kernel, "__name__", "a kernel"), why=launch))
        else:
            self._entries.append((launch, NEEDED, range(0)))

    def _argument(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            self._need(x)
            return self._place(x)
        return bound(x, self._argument) if hasattr(x, "block_shape") else x

    def _place_of(self, x: Any) -> Any:
        return self._place(x) if isinstance(x, Tensor) else x

    def _place(self, x: Tensor) -> Any:
        """Where a tensor lies; itself where it is a constant from outside."""
        root = self._roots.get(x.untyped_storage()._cdata)
        if root is None:
            return x
        return Place(root, x.data_ptr() - self._bases[root], x.dtype, tuple(x.shape), x.stride())

    def refuse(self, why: str) -> None:
        """What runs now cannot be repeated."""
        self._why = self._why or why

    def step(self, found: Sequence[Tensor]) -> Step | str:
        """What was recorded. found: what every run returns, in tensors of its own."""
        if self._why:
            return self._why
        for x in found:
            root = self._roots.get(x.untyped_storage()._cdata, -1)
            self._scratch.pop(root, None)  # the caller's
            self._need(x)
        # What makes room is no work; of the rest, what may change from layer to layer.
        left = [one for one in self._entries if one[1].needed and not (one[2] and one[2][0] in self._scratch)]
        ways, size = self._laid_out([what for what, _, _ in left])
        numbers = {root: self._own + 1 + n for n, root in enumerate(root for *_, inside in left for root in inside)}

        def settled(x: Any) -> Any:
            if not isinstance(x, Place) or x.root < self._own:
                return x
            if x.root in ways:
                return x._replace(root=self._own, offset=ways[x.root] + x.offset)
            return x._replace(root=numbers[x.root]) if x.root in numbers else x.of(self._held[x.root])

        work = [what.placed(settled) for what, _, _ in left]
        return Step.of(self._slots, size, work, [settled(self._place(x)) for x in found])

    def _laid_out(self, work: Sequence[Launch | Operator]) -> tuple[dict[int, int], int]:
        """Where each tensor of scratch begins, and how many bytes all of them take: what is over makes room."""
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


def _tensors(x: Any) -> Iterator[Tensor]:
    """Tensors among an operator's arguments or results."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, list | tuple):
        for one in x:
            yield from _tensors(one)
    elif isinstance(x, dict):
        yield from _tensors(list(x.values()))


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensors that an operator writes to."""
    for i, one in enumerate(func._schema.arguments):
        if one.alias_info is not None and one.alias_info.is_write:
            yield from _tensors(args[i] if i < len(args) else kwargs.get(one.name))
