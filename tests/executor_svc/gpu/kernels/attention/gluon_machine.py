"""Runs the Gluon kernel's own text on Triton's interpreter: roles, barriers, copies and products in any allowed order.

Each role is a thread, of which one runs at a time. A copy of the copy engine arrives, and a product is computed, at any
moment between its begin and the wait for it, drawn by a seed: whoever reads too early, or overwrites too early, gets
other numbers. What no barrier would ever let go on is an error. Layouts mean nothing here.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.interpreter import TensorHandle

from executor_svc.gpu.kernels.attention.call import AttentionCall
from executor_svc.gpu.kernels.attention.gluon import kernel

_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def as_tensor(value: Any) -> Tensor:
    """The numbers of an interpreted tensor."""
    data = np.ascontiguousarray(value.handle.data)
    if value.dtype == tl.bfloat16:
        return torch.from_numpy(data.view("int16").copy()).view(torch.bfloat16)
    return torch.from_numpy(data.copy())


def as_interpreted(value: Tensor) -> Any:
    """A tensor for the interpreter."""
    type_ = _TYPES[value.dtype]
    bits = value.contiguous()
    data = bits.view(torch.int16).numpy().view("uint16") if value.dtype == torch.bfloat16 else bits.numpy()
    return tl.tensor(TensorHandle(data.copy(), type_), tl.block_type(type_, list(value.shape)))


@dataclass
class Shared:
    """Shared memory: a view of its numbers, NaN at first; or barriers."""

    data: Any

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    def index(self, place: Any) -> Any:
        found = self.data[int(getattr(place, "value", place))]
        return found if isinstance(found, Barrier) else Shared(found)

    def slice(self, start: int, length: int) -> Shared:
        return Shared(self.data[start : start + length])

    def permute(self, _: tuple[int, int]) -> Shared:
        return Shared(self.data.t())

    def load(self, _: Any) -> Any:
        return as_interpreted(self.data)

    def store(self, value: Any) -> None:
        self.data.copy_(as_tensor(value))


@dataclass
class Barrier:
    """An mbarrier: a phase ends when all have arrived, and all bytes that were expected."""

    count: int = 0
    pending: int = 0
    num_bytes: int = 0
    phase: int = 0

    def arrived(self, arrivals: int = 0, num_bytes: int = 0) -> None:
        self.pending -= arrivals
        self.num_bytes += num_bytes
        assert self.pending >= 0, "more have arrived than the barrier waits for"
        if self.pending == 0 and self.num_bytes == 0:
            self.phase, self.pending = self.phase ^ 1, self.count


@dataclass
class Pool:
    """The copy engine's view of all rows [rows, D], a block of which it copies."""

    rows: Tensor
    block: int
    layout: None = None

    @property
    def block_type(self) -> SimpleNamespace:
        return SimpleNamespace(nbytes=self.block * self.rows.shape[1] * self.rows.itemsize)


@dataclass
class Product:
    """Sums of a product that runs; the numbers are there behind the wait for it."""

    run: Callable[[], Any]
    result: Any = None


@dataclass
class Role:
    """A thread of the block, and its products that run, in order."""

    body: Callable[[], None]
    ready: Callable[[], bool] = lambda: True
    turn: threading.Event = field(default_factory=threading.Event)
    products: list[Product] = field(default_factory=list)
    done: bool = False
    error: BaseException | None = None


class Machine:
    """One block of threads after the other."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._roles: list[Role] = []
        self._copies: list[Callable[[], None]] = []
        self._paused = threading.Event()
        self._running: Role | None = None
        self.order: list[int] = []
        """What was chosen, of what could go on."""

    def specialize(self, parts: Sequence[tuple[Any, tuple[Any, ...]]], *_: object) -> None:
        """Run all roles to their ends, one step of one role, copy or product at a time."""
        self._roles = [Role(partial(body, *args)) for body, args in parts]
        threads = [threading.Thread(target=self._run, args=(role,), daemon=True) for role in self._roles]
        for thread in threads:
            thread.start()
        # Some are slow, so that the others run as far ahead as barriers let them.
        speeds = [10 ** self._random.uniform(-2, 0) for _ in range(len(parts) + 2)]
        while any(not role.done for role in self._roles):
            steps: list[tuple[float, Callable[[], None]]] = [
                (speed, partial(self._resume, role))
                for speed, role in zip(speeds, self._roles, strict=False)
                if not role.done and role.ready()
            ]
            steps += [(speeds[-2], partial(self._arrive, copy)) for copy in self._copies]
            steps += [(speeds[-1], partial(_finish_first, role)) for role in self._roles if role.products]
            if not steps:
                raise AssertionError("all roles wait for barriers that nobody will arrive at")
            (chosen,) = self._random.choices(range(len(steps)), [speed for speed, _ in steps])
            self.order.append(chosen)
            steps[chosen][1]()
        assert not self._copies, "a copy was never waited for"

    def pause(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Let others go on, at least until this holds."""
        role = self._running
        assert role is not None
        role.ready = ready
        role.turn.clear()
        self._paused.set()
        role.turn.wait()

    def _resume(self, role: Role) -> None:
        self._running = role
        self._paused.clear()
        role.turn.set()
        self._paused.wait()
        self._running = None
        if role.error is not None:
            raise role.error

    def _run(self, role: Role) -> None:
        role.turn.wait()
        try:
            role.body()
        except BaseException as error:
            role.error = error
        role.done = True
        self._paused.set()

    def _arrive(self, copy: Callable[[], None]) -> None:
        self._copies.remove(copy)
        copy()

    # --- what the kernel calls ----------------------------------------------------------------------------------------

    def wait(self, bar: Barrier, phase: Any) -> None:
        wanted = int(phase)
        self.pause(lambda: bar.phase != wanted)

    def expect(self, bar: Barrier, num_bytes: int) -> None:
        bar.arrived(1, int(num_bytes))

    def arrive(self, bar: Barrier, count: int) -> None:
        self.pause()
        bar.arrived(count)

    def copy(self, pool: Pool, at: list[Any], bar: Barrier, into: Shared) -> None:
        row = int(at[0])

        def copied() -> None:
            into.data.copy_(pool.rows[row : row + pool.block])
            bar.arrived(0, -pool.block_type.nbytes)

        self._copies.append(copied)
        self.pause()

    def multiply(self, left: Any, right: Shared, sums: Any, *, use_acc: bool = True, is_async: bool = False) -> Product:
        assert is_async
        assert not isinstance(sums, Product), "sums of a product that may still run"
        role, factor = self._running, left if isinstance(left, Shared) else as_tensor(left)
        assert role is not None

        def run() -> Any:
            rows = (factor.data if isinstance(factor, Shared) else factor).float()
            found = rows @ right.data.float()
            return as_interpreted(found + as_tensor(sums) if use_acc else found)

        product = Product(run)
        role.products.append(product)
        self.pause()
        return product

    def wait_for_products(self, left: int, deps: list[Any]) -> Any:
        role = self._running
        assert role is not None
        self.pause()
        while len(role.products) > left:
            _finish_first(role)
        assert all(each.result is not None for each in deps), "a product whose wait leaves it running"
        assert len(deps) == 1
        return deps[0].result


def _finish_first(role: Role) -> None:
    product = role.products.pop(0)
    product.result = product.run()


class MachineKernel:
    """Takes the place of the compiled kernel in its launcher."""

    def __init__(self, seed: int, module: ModuleType = kernel) -> None:
        """module: in which the kernel and its functions are."""
        self.machine = machine = Machine(seed)
        names = dict(vars(module)) | {
            "tl": tl,
            "gl": _language(machine),
            "mbarrier": SimpleNamespace(
                init=_init,
                wait=machine.wait,
                expect=machine.expect,
                arrive=machine.arrive,
                MBarrierLayout=lambda: Barrier,
            ),
            "tma": SimpleNamespace(async_copy_global_to_shared=machine.copy),
            "fence_async_shared": lambda: None,
            "warpgroup_mma": machine.multiply,
            "warpgroup_mma_wait": machine.wait_for_products,
        }
        for name, value in vars(module).items():
            if isinstance(value, GluonJITFunction):
                names[name] = triton.jit(FunctionType(value.fn.__code__, names, name, value.fn.__defaults__))
        self._kernel = names["prompt_kernel"]
        for argument, type_ in self._kernel.rewrite().__annotations__.items():
            self._kernel.rewrite().__annotations__[argument] = type_.replace("gl.", "tl.")

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return self._kernel[grid]

    @staticmethod
    def pool(call: AttentionCall) -> Pool:
        """In the place of the launcher's descriptor."""
        return Pool(call.kv_layer.as_strided((call.num_rows, call.head_size), (call.head_size, 1)), call.block_size)


def _init(bar: Barrier, count: int) -> None:
    bar.count = bar.pending = count


def _language(machine: Machine) -> SimpleNamespace:
    """Gluon's language: Triton's, without layouts."""
    dtypes = {value: key for key, value in _TYPES.items()}

    def allocate(element: Any, shape: list[int], layout: Any) -> Shared:
        if layout is Barrier:
            return Shared([Barrier() for _ in range(shape[0])])
        return Shared(torch.full(shape, float("nan"), dtype=dtypes[element]))

    def nothing(*_: object) -> None:
        return None

    layouts = ("SliceLayout", "NVMMADistributedLayout", "DotOperandLayout", "BlockedLayout")
    return SimpleNamespace(
        **dict.fromkeys(layouts, nothing),
        constexpr=tl.constexpr,
        int64=tl.int64,
        float32=tl.float32,
        static_range=range,
        cdiv=tl.cdiv,
        # Looked up when they are called: the interpreter puts its own in their places.
        program_id=lambda axis: tl.program_id(axis),
        where=lambda *values: tl.where(*values),
        load=lambda *places: tl.load(*places),
        store=lambda *places: tl.store(*places),
        arange=lambda start, end, _: tl.arange(start, end),
        zeros=lambda shape, dtype, _: tl.zeros(shape, dtype),
        full=lambda shape, value, dtype, _: tl.zeros(shape, dtype) + value,
        convert_layout=lambda value, _: value,
        allocate_shared_memory=allocate,
        warp_specialize=machine.specialize,
    )
