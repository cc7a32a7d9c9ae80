"""Triton's interpreter without its dear habits: about a fifth of the time for the very same results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any


def quicken() -> None:
    """For the life of this process; kernels that a GPU runs know nothing of it."""
    from triton.runtime import interpreter

    ask_for_fusion(interpreter)
    swap_once_per_launch(interpreter)
    drop_unread_checks(interpreter)
    remember_types(interpreter)
    remember_shapes(interpreter.tl)


def ask_for_fusion(interpreter: Any) -> None:
    """Whether products and sums are fused, the interpreter does not care; launches of the library say it all the same.

    Triton's own default differs from version to version.
    """
    launch: Callable[..., Any] = interpreter.GridExecutor.__call__

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = f"{self.fn.__globals__['__name__']}.{self.fn.__name__}"
        if kernel.startswith("sparseprefill.") and not isinstance(kwargs.get("enable_fp_fusion"), bool):
            raise AssertionError(f"a launch of {kernel} does not say enable_fp_fusion: pass **FUSED")
        return launch(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = launched


def swap_once_per_launch(interpreter: Any) -> None:
    """At a launch the interpreter swaps the functions of Triton's language for its own.

    It swaps them again at each call of a device function, which finds them swapped: nothing is swapped back before the
    launch ends.
    """
    tl = interpreter.tl
    swap: Callable[[Any], Any] = interpreter._patch_lang
    launch: Callable[..., Any] = interpreter.GridExecutor.__call__
    seen_by: dict[Any, frozenset[int]] = {}
    swapped: set[frozenset[int]] = set()

    def once(function: Any) -> Any:
        """A function's globals hold `tl`, `tl.core` or both; what it sees is what is swapped."""
        if function not in seen_by:
            seen_by[function] = frozenset(id(x) for x in function.__globals__.values() if x is tl or x is tl.core)
        if seen_by[function] in swapped:
            return None  # asked for at the launch alone, which swaps
        swapped.add(seen_by[function])
        return swap(function)

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        swapped.clear()
        return launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = once, launched


def drop_unread_checks(interpreter: Any) -> None:
    """Each sum and product of integers is made again in 64 bits for an assertion, which only debugging reads."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def remember_types(interpreter: Any) -> None:
    """NumPy's type for one of Triton's comes from a table that is made anew at each question."""
    find: Callable[[Any], Any] = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def remembered(dtype: Any) -> Any:
        name: str = dtype.scalar.name
        if name not in known:
            known[name] = find(dtype)
        return known[name]

    interpreter._get_np_dtype = remembered


def remember_shapes(tl: Any) -> None:
    """Each value and each type of a block checks and wraps its sizes anew, and each operation compares those of two.

    Now all blocks of the same sizes hold the very same object for them, and looking at that is enough to compare.
    """
    from triton.language.semantic import TritonSemantic

    typed: Callable[..., None] = tl.block_type.__init__
    made: Callable[..., None] = tl.tensor.__init__
    broadcast: Callable[..., Any] = TritonSemantic.broadcast_impl_value
    shapes: dict[tuple[int, ...], Any] = {}
    types: dict[tuple[tuple[int, ...], str], dict[str, Any]] = {}
    values: dict[tuple[int, ...], dict[str, Any]] = {}

    def typed_once(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(shape)
        if {int} != set(map(type, sizes)):
            typed(self, element_ty, shape)
            return
        key = sizes, str(element_ty)
        if key not in types:
            typed(self, element_ty, shape)
            self.shape = shapes.setdefault(sizes, self.shape)
            types[key] = dict(vars(self))
        vars(self).update(types[key])
        self.element_ty = element_ty

    def made_once(self: Any, handle: Any, kind: Any) -> None:
        sizes = tuple(kind.shape) if kind.is_block() else ()
        if sizes not in values:
            made(self, handle, kind)
            values[sizes] = {name: x for name, x in vars(self).items() if name not in ("handle", "type", "dtype")}
        vars(self).update(values[sizes])
        self.handle, self.type, self.dtype = handle, kind, kind.scalar

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> Any:
        one, other = lhs.type, rhs.type
        if one.is_block() and other.is_block() and one.shape is other.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    tl.block_type.__init__, tl.tensor.__init__ = typed_once, made_once
    patched: Any = TritonSemantic
    patched.broadcast_impl_value = broadcast_others
