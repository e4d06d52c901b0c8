"""Repeated launches in Triton's interpreter, where no launcher tells of a launch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction

from executor_svc.gpu import runner as gpu_runner
from executor_svc.gpu.launches.noting import NotedLaunches, noting_now
from executor_svc.gpu.launches.repeated import RepeatedParts


def tell_of_launches(patch: pytest.MonkeyPatch) -> None:
    """Let the interpreter tell of its launches, as `WatchedLauncher` does."""
    run = InterpretedFunction.run

    def told(self: InterpretedFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        with _disable_current_modes():  # a kernel calls nothing of PyTorch's
            result = run(self, *args, grid=grid, warmup=warmup, **kwargs)
        if (noting := noting_now()) is not None:
            memory = [each.base if hasattr(each, "base") else each for each in args]
            call = partial(run, self, *args, grid=grid, warmup=warmup, **kwargs)
            noting.add(call, *(each for each in memory if isinstance(each, Tensor)))
        return result

    patch.setattr(InterpretedFunction, "run", told)


def count_repeats(patch: pytest.MonkeyPatch) -> list[int]:
    """Return the number of launches of each part that is repeated from now on."""
    found: list[int] = []
    launch = NotedLaunches.launch

    def counted(self: NotedLaunches) -> None:
        found.append(len(self))
        launch(self)

    patch.setattr(NotedLaunches, "launch", counted)
    return found


def repeat_launches(patch: pytest.MonkeyPatch) -> list[int]:
    """Let executors repeat launches of all steps with prompts; returns what `count_repeats` does."""
    tell_of_launches(patch)
    patch.setattr(gpu_runner, "are_watched", lambda _: True)
    patch.setattr(gpu_runner, "RepeatedParts", partial(RepeatedParts, stream=lambda: 0))
    patch.setattr(gpu_runner, "mixed_sizes", lambda *_: [])
    return count_repeats(patch)
