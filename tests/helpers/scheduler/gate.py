"""Requests that are sure to meet: the executor runs no step until the scheduler knows all of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from cadenza import AsyncClient, RequestOutput, SamplingParams
from cadenza_common.plan.plan import StepPlan
from executor_svc.worker.worker import Executor, Launched


class Gate:
    """Stands before the executor of `services.executor_service`. Open until requests are to meet."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()

    def before(self, executor: Executor) -> Executor:
        """The same executor, whose steps go through the gate."""
        launch = executor.launch

        def launch_when_open(plan: StepPlan, received_ns: int) -> Launched:
            assert self._open.wait(30), "the requests did not come"
            return launch(plan, received_ns)

        executor.launch = launch_when_open  # type: ignore[method-assign]
        return executor

    async def generate(
        self, client: AsyncClient, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        """The outputs of prompts that all wait or run before any of them has a token. Nothing else may run.

        As many plans as may be in flight can have been made when only the first prompts were there.
        """
        self._open.clear()
        async with asyncio.TaskGroup() as tasks:
            outputs = tasks.create_task(client.generate(list(prompts), list(params)))
            try:
                await self._known(client, len(prompts), outputs)
            finally:
                self._open.set()
        return outputs.result()

    async def _known(self, client: AsyncClient, num_requests: int, outputs: asyncio.Task[list[RequestOutput]]) -> None:
        """Each look costs a call, so this does not spin; 20 s at most."""
        async with asyncio.timeout(20):
            while not outputs.done():
                load = (await client.server_info()).load
                if load.num_waiting + load.num_running + load.num_swapped >= num_requests:
                    return
