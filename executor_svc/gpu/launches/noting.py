"""Notes what a part of a step launches, to launch it again without what Python did to find the arguments.

Triton's launchers tell of kernels (`watched_launcher`), PyTorch's dispatcher of operations. Noted launches have the
same arguments and addresses each time: the part must depend on nothing else, and write to memory that is kept.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs

Call = Callable[[], object]
_ALIGNMENT = 256
"""Bytes, as of PyTorch's allocator."""
_EMPTY = torch.ops.aten.empty.memory_format
_VIEWS = frozenset(
    {
        torch.ops.aten.slice.Tensor, torch.ops.aten.view.default, torch.ops.aten.view.dtype, torch.ops.aten.t.default,
        torch.ops.aten.select.int, torch.ops.aten.split_with_sizes.default, torch.ops.aten.unsqueeze.default,
    }
)  # fmt: skip
"""Operations whose results are always in the memory of their argument; most of what a step calls."""
_BINDINGS: dict[object, Callable[..., Any]] = {
    torch.ops.aten.mm.out: torch.mm,
    torch.ops.aten.addmm.out: torch.addmm,
}
"""The same operations by PyTorch's own bindings, which take half of the time."""
_threads = threading.local()
"""`noting`: what notes now, of each thread that has ever noted."""


def noting_now() -> Noting | None:
    """Return what notes this thread's launches at this moment; None: nothing does."""
    return getattr(_threads, "noting", None)


def begin_operation() -> None:
    """Say that what follows needs nothing that the operation before it has allocated."""
    if (noting := noting_now()) is not None:
        noting.scratch.restart()


class Scratch:
    """Memory of noted operations for what they allocate: each begins at its start."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._taken = 0

    def restart(self) -> None:
        """Give the same memory again."""
        self._taken = 0

    def take(self, num_bytes: int, device: torch.device) -> Tensor:
        """Return memory [num_bytes] uint8 that nothing else has until `restart`."""
        first = -(-self._taken // _ALIGNMENT) * _ALIGNMENT
        if self._memory is None or first + num_bytes > len(self._memory):
            # What is noted keeps the smaller memory.
            first, least = 0, 0 if self._memory is None else 2 * len(self._memory)
            self._memory = torch.empty(max(num_bytes, least), dtype=torch.uint8, device=device)
        self._taken = first + num_bytes
        return self._memory[first : self._taken]


class NotedLaunches:
    """What a part of a step launches."""

    def __init__(self, calls: Sequence[Call], kept: Sequence[object]) -> None:
        """kept: the memory at the addresses of the calls."""
        self._calls = tuple(calls)
        self._kept = tuple(kept)

    def __len__(self) -> int:
        return len(self._calls)

    def launch(self) -> None:
        """Enqueue it again. Raises what the driver or PyTorch does."""
        for call in self._calls:
            call()


class Noting(TorchDispatchMode):
    """Notes what is launched inside, as it is launched; for one thread."""

    def __init__(self, scratch: Scratch) -> None:
        super().__init__()
        self.scratch = scratch
        self.refusal: str | None = None
        """What cannot be launched again; None: all can."""
        self._calls: list[Call] = []
        self._kept: dict[int, object] = {}
        self._num_launched = self._num_told = 0

    def __enter__(self) -> Self:
        assert noting_now() is None, "a thread notes one part at a time"
        _threads.noting = self
        knobs.runtime.launch_enter_hook.add(self._count)
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        knobs.runtime.launch_enter_hook.remove(self._count)
        _threads.noting = None
        if self._num_told != self._num_launched:
            self.refuse("a kernel that was loaded before launches were watched")

    def launches(self) -> NotedLaunches:
        """Return what was noted, if nothing was refused."""
        assert self.refusal is None, self.refusal
        return NotedLaunches(self._calls, tuple(self._kept.values()))

    def refuse(self, what: str) -> None:
        """Say that something cannot be launched again."""
        self.refusal = self.refusal or what

    def add(self, call: Call, *memory: Tensor) -> None:
        """Note a call, and keep the memory that it uses."""
        self._calls.append(call)
        for each in memory:
            storage = each.untyped_storage()
            self._kept[storage.data_ptr()] = storage

    def add_kernel(self, call: Call | None, *memory: Tensor) -> None:
        """Note the launch of a kernel of Triton's, which has been counted; None: it cannot be launched again."""
        self._num_told += 1
        if call is None:
            self.refuse("a kernel with memory of its launch")
        else:
            self.add(call, *memory)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # Nothing is compiled here: to keep Dynamo out takes as long as all else of a call.

    def _count(self, _: object) -> None:
        self._num_launched += noting_now() is self  # and not a launch of another thread

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func in _VIEWS:
            return func(*args, **given)
        if func is _EMPTY:
            return self._empty(*args, **given)
        result = func(*args, **given)
        if func._schema.is_mutable:
            self._calls.append(partial(_BINDINGS.get(func, func), *args, **given))
        elif not _are_views(result, args):
            self.refuse(f"the result of {func} in memory of its own")
        return result

    def _empty(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device, **others: Any) -> Tensor:
        if any(others.values()):
            self.refuse("memory of an unusual kind")
        taken = self.scratch.take(math.prod(size) * dtype.itemsize, device)
        return taken.view(dtype).view(*size)


def _are_views(results: Any, args: Sequence[Any]) -> bool:
    """Return whether all results are in the memory of an argument."""
    places = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
    found = results if isinstance(results, (tuple, list)) else [results]
    return all(isinstance(each, Tensor) and each.untyped_storage().data_ptr() in places for each in found)
