"""Short ways through Triton's interpreter for what kernels do most; the rest goes the stock way.

Operands of one type and shape need neither conversion nor broadcasting: the interpreter spends most
of its time on finding that out, operation by operation. Results are the same.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

_RANK = {bool: 0, int: 1, float: 2}


# Sets an attribute of an object.
Replace = Callable[[Any, str, Any], None]


def replace_operations(interpreter: Any, replace: Replace) -> None:
    """Gives operations their short ways, once values of one shape have it in common.

    interpreter: Triton's module, with the shapes and types of ``quick_interpreter``.
    """
    core = interpreter.tl.core
    _unwrapping(interpreter, core, replace)
    _handles(interpreter, replace)
    _members(interpreter, replace)
    _operands(interpreter.TritonSemantic, core, replace)


def _unwrapping(interpreter: Any, core: Any, replace: Replace) -> None:
    """Most values are no ``constexpr``, and most types are compared with themselves."""
    constexpr, stock = core.constexpr, core._unwrap_if_constexpr
    plain = {core.tensor, core.dtype, core.block_type, core.pointer_type, int, float, bool, str}

    def unwrap(value: Any) -> Any:
        kind = type(value)
        if kind in plain:
            return value
        return value.value if kind is constexpr else stock(value)

    replace(core, "_unwrap_if_constexpr", unwrap)
    replace(interpreter.tl, "_unwrap_if_constexpr", unwrap)
    stock_equal = core.dtype.__eq__

    def equal(self: Any, other: Any) -> bool:
        return self is other or stock_equal(self, other)

    replace(core.dtype, "__eq__", equal)


def _handles(interpreter: Any, replace: Replace) -> None:
    """A value's array is made by numpy from one that was of the right type."""
    Handle, builder = interpreter.TensorHandle, interpreter.InterpreterBuilder
    stock, np_dtype, pointer = (
        builder.binary_op,
        interpreter._get_np_dtype,
        interpreter.tl.pointer_type,
    )

    def init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        dtype, left = lhs.dtype.scalar, lhs.data
        if isinstance(dtype, pointer) or left.dtype == np.bool_:
            return stock(self, lhs, rhs, op)
        output = op(left, rhs.data)
        if output.itemsize > left.itemsize:
            output = output.astype(np_dtype(dtype))
        return Handle(output, dtype)

    replace(Handle, "__init__", init)
    replace(builder, "binary_op", binary_op)


def _members(interpreter: Any, replace: Replace) -> None:
    """A builtin is called without looking again at what the interpreter hands it."""

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        inner = getattr(member, "__wrapped__", member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return inner(*args, **kwargs)

        # Whoever asks whether it is a builtin goes by an attribute, as of the stock function.
        scope.set_attr(obj, name, call)

    replace(interpreter, "_patch_attr", patch_attr)


def _operands(semantic: Any, core: Any, replace: Replace) -> None:
    """Operands that fit each other, as most do, are taken as they are."""
    stock_check, stock_broadcast = (
        semantic.binary_op_type_checking_impl,
        semantic.broadcast_impl_value,
    )
    tensor = core.tensor

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        # Values of one shape have it in common.
        return (lhs, rhs) if lhs.shape is rhs.shape else stock_broadcast(self, lhs, rhs)

    same: dict[tuple[str, type], bool] = {}

    def fits(dtype: Any, kind: type) -> bool:
        """Whether a Python number of this kind takes the type of the value that it meets."""
        key = dtype.name, kind
        if key not in same:
            numeric = not dtype.is_ptr() and (dtype.is_floating() or dtype.is_int())
            same[key] = numeric and not dtype.is_bool() and _RANK[kind] <= dtype.kind().value
        return same[key]

    def check(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        if arithmetic_check and not div_or_mod:
            left, right = type(lhs), type(rhs)
            if left is tensor and right is tensor:
                if lhs.dtype.name == rhs.dtype.name and not lhs.dtype.is_ptr():
                    return broadcast(self, lhs, rhs)
            elif left is tensor and right in _RANK:
                if fits(lhs.dtype, right):
                    return broadcast(self, lhs, self._cast_to_computation_type(rhs, lhs.dtype))
            elif right is tensor and left in _RANK and fits(rhs.dtype, left):
                return broadcast(self, self._cast_to_computation_type(lhs, rhs.dtype), rhs)
        return stock_check(
            self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        )

    # Sums are worked out again with more bits, for an assertion that only debugging makes.
    replace(semantic, "binary_op_sanitize_overflow_impl", lambda *_: None)
    replace(semantic, "broadcast_impl_value", broadcast)
    replace(semantic, "binary_op_type_checking_impl", check)
