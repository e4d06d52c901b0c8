"""Compiles the kernels that `emit` writes to machine code of an instruction set."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from threading import RLock
from typing import Any

from llvmlite import binding as llvm
from llvmlite import ir

from executor_svc.cpu.kernels.codegen.emit import Emitter, Int
from executor_svc.cpu.kernels.codegen.isa import Isa, host_isa

_I64 = ir.IntType(64)


@cache
def _target() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    if llvm.get_default_triple().startswith("x86_64"):  # elsewhere LLVM does not have the option, and ends the process
        # The pass that turns a chain of integer sums into a tree needs more registers than there are.
        llvm.set_option("", "-x86-machine-combiner=0")
    return llvm.Target.from_default_triple()


class Code:
    """Kernels by name. Added kernels are compiled at the first request for an address; any thread may ask.

    A name says all that its instructions depend on, so that `shared_code` serves all models of a process.
    """

    def __init__(self, isa: Isa | None = None) -> None:
        """isa: what kernels are compiled for; by default that of `host_isa`."""
        self.isa = isa or host_isa()
        self._module = ir.Module("kernels")
        self._pending: set[str] = set()
        self._num_arguments: dict[str, int] = {}
        self._addresses: dict[str, int] = {}
        self._engines: list[Any] = []
        self._lock = RLock()

    def kernel(self, name: str, num_arguments: int, body: Callable[..., None]) -> str:
        """Add void name(arguments*, item, thread): body(emitter, item, thread, *arguments), all 64-bit integers.

        Returns the name, for `address`; does nothing for an existing kernel.
        """

        def whole(emit: Emitter, arguments: Int, item: Int, thread: Int) -> None:
            body(emit, item, thread, *[emit.load_int(arguments + 8 * i) for i in range(num_arguments)])

        self._num_arguments[name] = num_arguments
        return self.function(name, 3, whole)

    def num_arguments(self, kernel: str) -> int:
        """Return the number of a kernel's arguments; raises KeyError for a name that is no kernel's."""
        return self._num_arguments[kernel]

    def function(self, name: str, num_arguments: int, body: Callable[..., None]) -> str:
        """Add void name(integers…): body(emitter, *integers)."""
        with self._lock:
            if name not in self._pending and name not in self._addresses:
                self._define(name, num_arguments, body)
                self._pending.add(name)
        return name

    def helper(self, name: str, num_arguments: int, body: Callable[..., None]) -> Callable[..., None]:
        """Add void name(integers…), for kernels to call.

        Returns a function that emits a call: call(emitter, *integers).
        """
        function = self._module.globals.get(name)
        if function is None:
            function = self._define(name, num_arguments, body)
            function.linkage = "internal"
            function.attributes.add("noinline")

        def call(emit: Emitter, *arguments: Int) -> None:
            emit.builder.call(function, [each.value for each in arguments])

        return call

    def address(self, name: str) -> int:
        """Return the address of a kernel's machine code, valid during the life of this object."""
        if name not in self._addresses:
            with self._lock:
                if name not in self._addresses:
                    self._compile()
        return self._addresses[name]

    def assembly(self) -> str:
        """Return the instructions of the kernels that are not compiled yet; this processor may lack them."""
        return str(self._machine().emit_assembly(self._parsed()))

    def _define(self, name: str, num_arguments: int, body: Callable[..., None]) -> Any:
        function = ir.Function(self._module, ir.FunctionType(ir.VoidType(), [_I64] * num_arguments), name)
        emit = Emitter(self._module, function)
        body(emit, *[Int(emit, each) for each in function.args])
        emit.builder.ret_void()
        return function

    def _compile(self) -> None:
        engine = llvm.create_mcjit_compiler(self._parsed(), self._machine())
        engine.finalize_object()
        self._engines.append(engine)
        self._addresses |= {name: int(engine.get_function_address(name)) for name in self._pending}
        self._pending.clear()
        self._module = ir.Module("kernels")

    def _parsed(self) -> Any:
        module = llvm.parse_assembly(str(self._module))
        module.verify()
        return module

    def _machine(self) -> Any:
        return _target().create_target_machine(cpu=self.isa.cpu, features=self.isa.flags, opt=2)


@cache
def _shared_code(isa: Isa) -> Code:
    return Code(isa)


def shared_code(isa: Isa | None = None) -> Code:
    """Return this process's kernels for an instruction set, by default that of `host_isa`: each is compiled once."""
    return _shared_code(isa or host_isa())


def symbol(library: str | None, name: str) -> int | None:
    """Return the address of a C function, or None."""
    try:
        return ctypes.cast(getattr(ctypes.CDLL(library), name), ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None
