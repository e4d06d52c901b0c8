"""Launches that are recorded to be run again as one program."""

from __future__ import annotations

from dataclasses import replace

from executor_svc.cpu.kernels.codegen.team import KernelLaunch, LaunchProgram, Team
from executor_svc.cpu.kernels.panel_layout import Coming


class CpuRecording:
    """Implements `device.kernels.Recording`."""

    def __init__(self, team: Team) -> None:
        self.rows = "rows"
        self.launches: list[KernelLaunch] = []
        self._team = team
        self._product: int | None = None

    def announce(self, coming: Coming | None) -> None:
        """The next launch is a product with this weight: the product before it prefetches it.

        None: the choice of experts decides which weight it is, so nothing is prefetched for it.
        """
        if coming is None:
            self._product = None
            return
        if self._product is not None:
            last = self.launches[self._product]
            self.launches[self._product] = replace(last, arguments=(*last.arguments[: -len(coming)], *coming))
        self._product = len(self.launches)

    def program(self) -> LaunchProgram:
        return LaunchProgram(self._team, self.launches)
