"""Small kernels of the tests' own, to see what the code that makes kernels does. For tests only."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import LANES, Emitter, Int, Vec
from executor_svc.cpu.kernels.codegen.team import KernelLaunch, LaunchProgram, Team

Function = Callable[[Vec], Vec]


def run(num_arguments: int, body: Callable[..., None], items: int, *arguments: int, num_threads: int = 1) -> None:
    """Run body(emitter, item, thread, items, *arguments) for each item."""
    code = Code()
    name = code.kernel("tested", 1 + num_arguments, body)
    LaunchProgram(Team(code, num_threads), [KernelLaunch(name, "items", 1, 1, arguments)]).run(items=items)


def mapped(function: Function) -> Callable[[Tensor], Tensor]:
    """A function of vectors, compiled once, for tensors of floats."""
    code = Code()

    def body(emit: Emitter, item: Int, _: Int, __: Int, x: Int, y: Int) -> None:
        at = item * (4 * LANES)
        emit.store(function(emit.load(x + at, "float32")), y + at, "float32")

    name = code.kernel("mapped", 3, body)
    team = Team(code, 1)

    def apply(x: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % LANES))
        y = torch.empty_like(padded)
        launch = KernelLaunch(name, "vectors", 1, 1, (padded.data_ptr(), y.data_ptr()))
        LaunchProgram(team, [launch]).run(vectors=padded.numel() // LANES)
        return y[: x.numel()].view(x.shape)

    return apply
