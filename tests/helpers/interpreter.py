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
    call_straight(interpreter)
    unwrap_at_a_glance(interpreter.tl)
    check_types_once(interpreter)


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
    """Each sum and product of integers is made again in 64 bits for an assertion, which only debugging reads.

    The size of each value is looked at once more, after each operation has made it that of its type.
    """
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter.TensorHandle.__post_init__ = lambda self: None


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
    known: set[int] = set()  # which objects `shapes` holds
    types: dict[tuple[int, str], dict[str, Any]] = {}
    values: dict[int, dict[str, Any]] = {}

    def typed_once(self: Any, element_ty: Any, shape: Any) -> None:
        if id(shape) not in known:
            sizes = tuple(shape)
            if {int} != set(map(type, sizes)):
                typed(self, element_ty, shape)
                return
            if sizes not in shapes:
                typed(self, element_ty, shape)
                shapes[sizes] = self.shape
                known.add(id(self.shape))
            shape = shapes[sizes]
        key = id(shape), str(element_ty)
        if key not in types:
            typed(self, element_ty, shape)
            self.shape = shape
            types[key] = dict(vars(self))
        vars(self).update(types[key])
        self.element_ty = element_ty

    def made_once(self: Any, handle: Any, kind: Any) -> None:
        key = id(kind.shape) if kind.is_block() else 0
        if key not in values:
            made(self, handle, kind)
            if key and key not in known:
                return
            values[key] = {name: x for name, x in vars(self).items() if name not in ("handle", "type", "dtype")}
        vars(self).update(values[key])
        self.handle, self.type, self.dtype = handle, kind, kind.scalar

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> Any:
        one, other = lhs.type, rhs.type
        if one.is_block() and other.is_block() and one.shape is other.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    tl.block_type.__init__, tl.tensor.__init__ = typed_once, made_once
    patched: Any = TritonSemantic
    patched.broadcast_impl_value = broadcast_others


def call_straight(interpreter: Any) -> None:
    """Behind each function of the language stands one that copies its arguments, and one that looks for what that adds.

    One that adds it takes the place of both.
    """
    checks = interpreter.tl.core.builtin(lambda: None).__code__
    semantic = interpreter.interpreter_semantic

    def patch(place: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = member.__wrapped__ if getattr(member, "__code__", None) is checks else member

        def called(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(place, name, called)

    interpreter._patch_attr = patch


def unwrap_at_a_glance(tl: Any) -> None:
    """Nearly all that a function of the language looks into for a constant is none, or is one itself."""
    unwrap: Callable[[Any], Any] = tl.core._unwrap_if_constexpr
    kinds = (tl.tensor, tl.dtype, tl.block_type, tl.pointer_type, int, float, bool, str, type(None))
    plain = frozenset(kinds)

    def unwrapped(x: Any) -> Any:
        kind = x.__class__
        return x if kind in plain else x.value if kind is tl.constexpr else unwrap(x)

    tl.core._unwrap_if_constexpr = unwrapped


def check_types_once(interpreter: Any) -> None:
    """Each operation on two operands works out their common type, and makes a number a scalar and the scalar a block.

    Two values of one type have that type, and the same number beside the same type is the same scalar, and block.
    """
    from triton.language.semantic import TritonSemantic

    if not hasattr(TritonSemantic, "_cast_to_computation_type"):
        return  # Triton before 3.9 works otherwise, and only slower
    tensor = interpreter.tl.tensor
    check: Callable[..., Any] = TritonSemantic.binary_op_type_checking_impl
    launch: Callable[..., Any] = interpreter.GridExecutor.__call__
    whole = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)) | {"int1", "fp32", "fp64"}
    halves = frozenset(("fp16", "bf16"))  # a quotient of which is fp32
    numbers: dict[Any, Any] = {}

    def beside(self: Any, x: Any, number: Any, dividing: bool) -> Any:
        """The number as the other operand of x; None where x would have to change, or where equal numbers differ."""
        name = x.dtype.name
        if name not in whole or number.__class__ not in (int, float) or (not number and number.__class__ is float):
            return None
        key = name, id(x.type.shape) if x.type.is_block() else 0, number.__class__, number, dividing
        if key not in numbers:
            common = self.computation_type_impl(x.dtype, False, self.to_tensor_type(number), True, dividing)
            if common.name != name:
                return None
            scalar = self._cast_to_computation_type(number, common)
            numbers[key] = x.type, self.broadcast_impl_value(x, scalar)[1]  # the type holds its shape, and so the key
        return numbers[key][1]

    def checked(
        self: Any, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True, div_or_mod: bool = False,
    ) -> Any:  # fmt: skip
        one, other = lhs.__class__ is tensor, rhs.__class__ is tensor
        if one and other:
            name, same = lhs.dtype.name, lhs.dtype.name == rhs.dtype.name
            if same and (name in whole or (name in halves and not div_or_mod)):
                return self.broadcast_impl_value(lhs, rhs)
            if allow_lhs_ptr and lhs.dtype.is_ptr() and rhs.dtype.is_int():
                return self.broadcast_impl_value(lhs, rhs)
        elif one and arithmetic_check:
            made = beside(self, lhs, rhs, div_or_mod)
            if made is not None:
                return lhs, made
        elif other and arithmetic_check:
            made = beside(self, rhs, lhs, div_or_mod)
            if made is not None:
                return made, rhs
        return check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        numbers.clear()
        return launch(self, *args, **kwargs)

    patched: Any = TritonSemantic
    patched.binary_op_type_checking_impl, interpreter.GridExecutor.__call__ = checked, launched
