"""Mends what Triton 3.6's interpreter gets wrong or does too often, and PyTorch 2.11 on the CPU can not do.

Where kernels run on a GPU nothing is changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from tests.executor_svc.gpu.interpreted_operators import INT32, WIDE_INTS, FastOperators

FP8_LARGEST = 448.0
"""Of e4m3: what a GPU makes of all that is larger, where PyTorch makes NaN."""


@contextmanager
def mended_interpreter() -> Iterator[None]:
    """Loops to a number that a kernel worked out, bfloat16 and fp8 e4m3 as on a GPU; and faster.

    Such loops fail since numpy 2.4, products of bfloat16 always. Rounding to these types cuts digits off, and fp8 has
    neither NaN nor what is below its normal numbers. And the language's own functions are prepared once, not at every
    launch and every call of every helper; types, shapes and constants are built once; operands of one type go to numpy
    as they are; integers are not checked for overflow. Together these took most of the time.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    with pytest.MonkeyPatch.context() as patch:
        operators = FastOperators(interpreter)
        patch.setattr(interpreter, "_patch_lang_tensor", _with_index(interpreter._patch_lang_tensor, operators))
        patch.setattr(interpreter, "_convert_float", _with_rounding(interpreter._convert_float))
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", _with_floats(interpreter))
        patch.setattr(interpreter.InterpreterBuilder, "create_inline_asm", _without_order(interpreter))
        # Tensors lie on the CPU as it is: none is copied there and back.
        patch.setattr(interpreter.GridExecutor, "_init_args_hst", lambda _, args, kwargs: (args, kwargs))
        patch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)
        patch.setattr(interpreter.TensorHandle, "__post_init__", lambda _: None)  # compares sizes, of every result
        patch.setattr(interpreter, "_patch_attr", _patch_attr)
        scopes: list[Any] = []
        patch.setattr(interpreter, "_patch_lang", _patched_once(interpreter._patch_lang, scopes))
        patch.setattr(interpreter.InterpretedFunction, "__call__", _called_at_once(interpreter))
        # Its finding is dropped unless options.debug is set, which the interpreter never does.
        patch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", lambda *_: None)
        patch.setattr(TritonSemantic, "broadcast_impl_value", lambda *tensors: operators.broadcast(*tensors))
        patch.setattr(TritonSemantic, "_load_legacy", operators.load(TritonSemantic._load_legacy))
        patch.setattr(TritonSemantic, "scalar_constant", _constants_once(TritonSemantic))
        patch.setattr(TritonSemantic, "binary_op_type_checking_impl", _operands(TritonSemantic))
        _build_types_once(patch, interpreter)
        if not _scales_rows():
            patch.setattr(torch, "_scaled_mm", _scaled_mm)
        try:
            yield
        finally:
            for scope in reversed(scopes):
                scope.restore()


def _scales_rows() -> bool:
    """Does PyTorch's scaled product take a scale for each row on the CPU; on GPUs all that we support do."""
    narrow, scale = torch.zeros(16, 16, dtype=torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(narrow, narrow.t(), scale, scale.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


def _scaled_mm(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
    *, bias: torch.Tensor | None, out_dtype: torch.dtype, use_fast_accum: bool, out: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """`torch._scaled_mm`, as far as it is used here."""
    assert use_fast_accum
    assert out.dtype == out_dtype
    product = a.float() @ b.float() * scale_a * scale_b
    return out.copy_(product if bias is None else product + bias)


def _with_index(patch_tensor: Any, operators: FastOperators) -> Any:
    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        operators.install(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    return patched


def _with_rounding(convert: Any) -> Any:
    import triton.language as tl

    mended = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn}
    types = {tl.float16: torch.float16, tl.float32: torch.float32, **mended}

    def converted(values: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if not {source, target} & mended.keys() or not {source, target} <= types.keys():
            return convert(values, source, target, rounding_mode)
        bits = torch.from_numpy(np.frombuffer(values.tobytes(), f"int{source.primitive_bitwidth}").copy())
        floats = bits.view(types[source]).float()
        if target == tl.float8e4nv:
            floats = floats.clamp(-FP8_LARGEST, FP8_LARGEST)
        found = floats.to(types[target]).view(getattr(torch, f"int{target.primitive_bitwidth}"))
        return found.numpy().view(f"uint{target.primitive_bitwidth}").reshape(np.shape(values))

    return converted


def _with_floats(interpreter: Any) -> Any:
    import triton.language as tl

    create_dot = interpreter.InterpreterBuilder.create_dot

    def as_floats(operand: Any) -> Any:
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        bits = torch.from_numpy(operand.data.view("int16").copy())
        return interpreter.TensorHandle(bits.view(torch.bfloat16).float().numpy(), tl.float32)

    def dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return create_dot(self, as_floats(a), as_floats(b), *others)

    return dot


def _without_order(interpreter: Any) -> Any:
    """Of assembly: programs run one after the other, so none waits for kernels, and there is no cache to fill."""
    import triton.language as tl

    class Zeros:
        def __init__(self, values: Any) -> None:
            shape = np.broadcast_shapes((1,), *(value.data.shape for value in values))
            self.get_result = lambda _: interpreter.TensorHandle(np.zeros(shape, np.int32), tl.int32)

    def assembly(_: Any, text: str, constraints: str, values: Any, *others: Any) -> Any:
        if not any(name in text for name in ("griddepcontrol.", "prefetch.global.L2")):
            raise NotImplementedError(f"the interpreter does not know {text}")
        return Zeros(values)

    return assembly


def _patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Triton's own, without its check that a function of the language is called by a kernel."""
    from triton.language.semantic import TritonSemantic

    semantic, function = TritonSemantic(builder), getattr(member, "__wrapped__", member)

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    scope.set_attr(obj, name, call)


class _Kept:
    """The scope of a launch: what it has patched stays for the next."""

    def restore(self) -> None:
        pass


def _patched_once(patch_language: Any, scopes: list[Any]) -> Any:
    """Prepares the language for a module's functions at its first launch; `scopes` collects what undoes it."""
    ready: set[str] = set()

    def patched(function: Any) -> _Kept:
        if function.__module__ not in ready:
            scopes.append(patch_language(function))
            ready.add(function.__module__)
        return _Kept()

    return patched


def _called_at_once(interpreter: Any) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    return call


def _constants_once(semantic: Any) -> Any:
    build = semantic.scalar_constant
    constants: dict[Any, Any] = {}

    def constant(self: Any, value: Any, dtype: Any) -> Any:
        key = (type(value), value, dtype.name)
        if key not in constants:
            constants[key] = build(self, value, dtype)
        return constants[key]

    return constant


def _operands(semantic: Any) -> Any:
    """Operands of one type need no conversion, small integers beside wider ones none but to a constant."""
    from triton.language import core

    check = semantic.binary_op_type_checking_impl

    def operands(self: Any, lhs: Any, rhs: Any, *flags: Any, **named_flags: Any) -> Any:
        if type(lhs) is core.tensor:
            scalar = lhs.dtype
            if type(rhs) is core.tensor:
                if lhs.type.name == rhs.type.name and (scalar.name in WIDE_INTS or scalar.name == "fp32"):
                    return lhs, rhs
            elif (type(rhs) is int and scalar.name in WIDE_INTS and rhs in INT32) or (
                type(rhs) in (int, float) and scalar.name == "fp32"
            ):
                return self.broadcast_impl_value(lhs, self.scalar_constant(rhs, dtype=scalar))
        return check(self, lhs, rhs, *flags, **named_flags)

    return operands


def _build_types_once(patch: pytest.MonkeyPatch, interpreter: Any) -> None:
    """Types of blocks, shapes of tensors and numpy's types, which every operation builds again, are kept."""
    from triton.language import core

    blocks: dict[Any, dict[str, Any]] = {}
    shapes: dict[str, tuple[Any, Any]] = {}
    dtypes: dict[str, np.dtype[Any]] = {}
    build_block, build_tensor = core.block_type.__init__, core.tensor.__init__
    get_dtype = interpreter._get_np_dtype

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *[size.value if type(size) is core.constexpr else size for size in shape])
        if key not in blocks:
            build_block(self, element_ty, shape)
            blocks[key] = dict(self.__dict__)
        self.__dict__.update(blocks[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        name = type.name
        if name not in shapes:
            build_tensor(self, handle, type)
            shapes[name] = (self.shape, self.numel)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[name]

    def numpy_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name  # a block's elements are numpy's as well
        if name not in dtypes:
            dtypes[name] = get_dtype(dtype)
        return dtypes[name]

    patch.setattr(core.block_type, "__init__", block)
    patch.setattr(core.tensor, "__init__", tensor)
    patch.setattr(interpreter, "_get_np_dtype", numpy_dtype)
