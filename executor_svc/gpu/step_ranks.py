"""The part of a GPU's steps that the ranks of a replica do together; steps are launched ahead of what is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from cadenza_common.plan.plan import StepPlan
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.device.interface import is_device_lost, is_out_of_memory
from executor_svc.device.ranks import RankKernels
from executor_svc.gpu.ranks import GpuRanks
from executor_svc.worker.step_ranks import Alone, StepRanks


class GpuStepRanks:
    """Agrees on plans, shares what rank 0 samples, and knows when this process can run no more steps.

    Until `join` the ranks run the same plans, each by itself: those of warm-up.
    """

    def __init__(self, kernels: RankKernels | None) -> None:
        """kernels: of a model that is divided; None: there is one rank."""
        assert kernels is None or isinstance(kernels, GpuRanks)
        self._kernels = kernels
        self._ranks: StepRanks = Alone()
        self._num_settled = 0
        self._lost = False

    @property
    def samples(self) -> bool:
        """Whether this rank has whole logits, and samples."""
        return self._kernels is None or not self._kernels.share.rank

    def join(self, ranks: StepRanks) -> None:
        """Agree on plans with the other ranks from now on."""
        self._ranks = ranks

    def share_first(self, *tensors: Tensor) -> None:
        """Enqueue that all ranks have the numbers of rank 0's tensors."""
        if self._kernels is not None:
            self._kernels.share_first(*tensors)

    def count_settled(self) -> None:
        """Note that one more step of the session is settled."""
        self._num_settled += 1

    @property
    def num_settled(self) -> int:
        """Steps of the session that are settled."""
        return self._num_settled

    def agreed(self, plan: StepPlan, slots: Slots, apply: Callable[[], Scheduled]) -> Scheduled:
        """As in `StepRanks`, after what is settled."""
        self._ranks.settled(self._num_settled)
        return self._ranks.agreed(plan, slots, apply)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside, a plan is enqueued on all ranks: one that cannot leaves the others waiting, and ends its process."""
        try:
            yield
        except Exception:
            self._lost = self._kernels is not None
            raise

    def failed(self, error: Exception) -> None:
        """As in `StepRanks`."""
        self._ranks.failed(error)

    def clear(self) -> None:
        """As in `StepRanks`."""
        self._num_settled = 0
        self._ranks.clear()

    def is_out_of_memory(self, exc: Exception) -> bool:
        """As in `worker.Executor`."""
        return not self._lost and is_out_of_memory(exc)

    def is_lost(self, exc: Exception) -> bool:
        """As in `worker.Executor`."""
        return self._lost or is_device_lost(exc)
