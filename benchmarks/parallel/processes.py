"""Ranks as processes of a benchmark: each runs the same function, and returns what it found."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.common.rows import BenchmarkError

_TIMEOUT_S = 600.0


def on_processes(size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return what work(rank, size, *arguments) returns in each of `size` new processes, in the order of ranks.

    work must be a function of a module. Raises BenchmarkError for a process that fails.
    """
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    children = [
        context.Process(target=_run, args=(sender, work, rank, size, *arguments), daemon=False)
        for rank, (_, sender) in enumerate(pipes)
    ]
    try:
        for child, (_, sender) in zip(children, pipes, strict=True):
            child.start()
            sender.close()
        return [_found(rank, receiver) for rank, (receiver, _) in enumerate(pipes)]
    finally:
        for child in children:
            if child.is_alive():
                child.kill()
            child.join()


def _found(rank: int, receiver: Connection) -> Any:
    if not receiver.poll(_TIMEOUT_S):
        raise BenchmarkError(f"rank {rank} has not answered for {_TIMEOUT_S:.0f} s")
    try:
        found, error = receiver.recv()
    except EOFError:
        raise BenchmarkError(f"rank {rank} has ended") from None
    if error:
        raise BenchmarkError(f"rank {rank}: {error}")
    return found


def _run(sender: Connection, work: Callable[..., Any], *arguments: Any) -> None:
    try:
        sender.send((work(*arguments), ""))
    except BaseException as error:
        sender.send((None, f"{type(error).__name__}: {error}"))
    sender.close()
    # Libraries' threads, such as gloo's, need not be waited for.
    os._exit(0)
