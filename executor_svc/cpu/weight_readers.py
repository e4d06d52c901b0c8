"""Threads that read weights while a model is built."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import torch


class WeightReaders:
    """Runs reads in threads; the end of the `with` block waits for all of them.

    A read takes a file's bytes, hashes them and puts them into panels, all without Python's lock. PyTorch uses no
    further threads in a read: each reader would start a team of its own for a conversion.
    """

    def __init__(self, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, "weights", initializer=torch.set_num_threads, initargs=(1,))
        self._reads: list[Future[None]] = []

    def submit(self, read: Callable[[], None]) -> None:
        self._reads.append(self._pool.submit(read))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for all reads and raise the first error of one; after an error of the block, drop the rest."""
        try:
            if error is None:
                for read in self._reads:
                    read.result()
        finally:
            self._pool.shutdown(wait=True, cancel_futures=True)
