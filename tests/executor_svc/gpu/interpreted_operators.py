"""Operators and loads of tensors in Triton's interpreter, at once where numpy does the same for their types.

Triton first converts and repeats operands until they are of one type and shape, in a dozen calls; numpy does so itself.
All other operands take Triton's own way.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

INT32 = range(-(2**31), 2**31)
WIDE_INTS = {"int32", "int64"}
Operator = Callable[[Any, Any], Any]


def _divided(a: Any, b: Any) -> Any:
    """Integers' quotient, rounded to zero, as a GPU's."""
    return (a - np.fmod(a, b)) // b


NUMBERS: dict[str, Operator] = {
    "__add__": np.add, "__sub__": np.subtract, "__mul__": np.multiply, "__radd__": np.add, "__rmul__": np.multiply,
}  # fmt: skip
INTS: dict[str, Operator] = {"__floordiv__": _divided, "__mod__": np.fmod}
BITS: dict[str, Operator] = {"__and__": np.bitwise_and, "__or__": np.bitwise_or}
COMPARISONS: dict[str, Operator] = {
    "__lt__": np.less, "__le__": np.less_equal, "__gt__": np.greater, "__ge__": np.greater_equal,
    "__eq__": np.equal, "__ne__": np.not_equal,
}  # fmt: skip


class FastOperators:
    """Makes them, for the tensors of the interpreter as it is patched."""

    def __init__(self, interpreter: Any) -> None:
        from triton.language import core

        self._core, self._handle = core, interpreter.TensorHandle
        self._interpreter = interpreter
        self._blocks: dict[Any, Any] = {}
        self._is_fast: set[Any] = set()

    def install(self, tensor: Any, scope: Any) -> None:
        """Put them before the tensor's own, if they are not there."""
        if tensor.__add__ in self._is_fast:
            return
        made = {name: self._numbers(name, numpy) for name, numpy in NUMBERS.items()}
        made |= {name: self._numbers(name, numpy, floats=False) for name, numpy in INTS.items()}
        made |= {name: self._numbers(name, numpy, compares=True) for name, numpy in COMPARISONS.items()}
        made |= {name: self._bits(numpy) for name, numpy in BITS.items()}
        made["__add__"] = self._with_pointers(made["__add__"])
        made["__getitem__"] = self._getitem
        for name, fast in made.items():
            found = self._else(fast, getattr(tensor, name))
            self._is_fast.add(found)
            scope.set_attr(tensor, name, found)

    @staticmethod
    def _else(fast: Operator, slow: Operator) -> Operator:
        def either(self: Any, other: Any) -> Any:
            found = fast(self, other)
            return slow(self, other) if found is None else found

        return either

    def _tensor(self, values: Any, handle_dtype: Any, scalar: Any, is_block: bool) -> Any:
        """A tensor of these values; its type is of scalars unless some operand was a block."""
        type_ = scalar
        if is_block:
            key = (scalar.name, values.shape)
            type_ = self._blocks.get(key)
            if type_ is None:
                type_ = self._blocks[key] = self._core.block_type(scalar, list(values.shape))
        return self._core.tensor(self._handle(values, handle_dtype), type_)

    def _numbers(self, name: str, numpy: Operator, floats: bool = True, compares: bool = False) -> Operator:
        """Of two tensors of one type, or one and a constant that it can hold."""
        core, make = self._core, self._tensor
        kinds = {*WIDE_INTS, "fp32"} if floats else WIDE_INTS

        def operate(self: Any, other: Any) -> Any:
            scalar, handle = self.dtype, self.handle
            if scalar.name not in kinds:
                return None
            if type(other) is core.tensor:
                if other.dtype.name != scalar.name:
                    return None
                is_block = bool(self.shape or other.shape)
                right = other.handle.data
            else:
                right = other.value if type(other) is core.constexpr else other
                if not (type(right) is int and right in INT32) and not (type(right) is float and scalar.name == "fp32"):
                    return None
                is_block = bool(self.shape)
            values = numpy(handle.data, right)
            return make(values, handle.dtype.scalar, core.int1 if compares else scalar, is_block)

        operate.__name__ = name
        return operate

    def _bits(self, numpy: Operator) -> Operator:
        """Of two masks."""
        core, make = self._core, self._tensor

        def operate(self: Any, other: Any) -> Any:
            if type(other) is not core.tensor or self.dtype.name != "int1" or other.dtype.name != "int1":
                return None
            left, right = self.handle.data, other.handle.data
            if left.dtype != np.bool_ or right.dtype != np.bool_:
                return None
            return make(numpy(left, right), self.handle.dtype.scalar, core.int1, bool(self.shape or other.shape))

        return operate

    def _with_pointers(self, add: Operator) -> Operator:
        """Addresses and distances, beside numbers."""
        core, make = self._core, self._tensor

        def operate(self: Any, other: Any) -> Any:
            scalar = self.dtype
            if not scalar.is_ptr():
                return add(self, other)
            if type(other) is not core.tensor or other.dtype.name not in WIDE_INTS:
                return None
            width = max(1, scalar.element_ty.primitive_bitwidth // 8)
            values = self.handle.data + width * other.handle.data.astype(np.uint64)
            return make(values, self.handle.dtype, scalar, bool(self.shape or other.shape))

        return operate

    def broadcast(self, _: Any, left: Any, right: Any) -> tuple[Any, Any]:
        """As `TritonSemantic.broadcast_impl_value`."""
        if left.type.name == right.type.name or not (left.shape or right.shape):
            return left, right
        shapes = tuple(each.handle.data.shape if each.shape else () for each in (left, right))
        if shapes[0] == shapes[1]:
            return left, right
        shape = np.broadcast_shapes(*shapes)
        return self._repeated(left, shape), self._repeated(right, shape)

    def _repeated(self, tensor: Any, shape: tuple[int, ...]) -> Any:
        old = tensor.handle.data
        if tensor.shape and old.shape == shape:
            return tensor
        values = np.empty(shape, old.dtype)
        values[...] = old
        return self._tensor(values, tensor.handle.dtype.scalar, tensor.dtype, True)

    def load(self, slow: Any) -> Any:
        """As `TritonSemantic._load_legacy`, which is `slow`."""

        def load(semantic: Any, ptr: Any, mask: Any, other: Any, *options: Any) -> Any:
            is_block, pointer = bool(ptr.shape), ptr.dtype
            wrong = not pointer.is_ptr() or (mask is None and other is not None) or any(options[:2])
            scalar = not is_block and any(each is not None and each.shape for each in (mask, other))
            if wrong or scalar or pointer.element_ty.is_ptr() or pointer.element_ty.name == "int1":
                return slow(semantic, ptr, mask, other, *options)
            element = pointer.element_ty
            dtype = self._interpreter._get_np_dtype(element)
            if mask is not None:
                ptr, mask = self.broadcast(semantic, ptr, mask)
            if other is not None:
                ptr, other = self.broadcast(semantic, ptr, semantic.cast(other, element))
            addresses = ptr.handle.data
            valid = np.ones(addresses.shape, np.bool_) if mask is None else mask.handle.data
            default = np.zeros(addresses.shape, dtype) if other is None else other.handle.data
            values = self._interpreter._interpreter.load(addresses, valid, default, dtype)
            return self._tensor(values, element, element, is_block)

        return load

    def _getitem(self, tensor: Any, slices: Any) -> Any:
        """New axes of a block, beside all of its own."""
        slices = getattr(slices, "values", slices)
        if not tensor.shape or type(slices) not in (tuple, list):
            return None
        whole = slice(None)
        if any(each is not None and (type(each) is not slice or each != whole) for each in slices):
            return None
        if operator.countOf(slices, whole) != len(tensor.shape):
            return None
        values = tensor.handle.data[tuple(slices)]
        return self._tensor(values, tensor.handle.dtype.scalar, tensor.dtype, True)
