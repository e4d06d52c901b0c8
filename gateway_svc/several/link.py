"""The gateway's way to the launcher, and to the schedulers of the models that are loaded."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from cadenza.errors import CadenzaError
from gateway_svc.scheduler.link import SchedulerLink
from gateway_svc.several.plan import ListedModel
from gateway_svc.several.roster import Roster
from gateway_svc.several.wire import Bounds, LoadState, read_line, write_order
from gateway_svc.state import State

_LOG = logging.getLogger(__name__)
_RETRY_S = 0.2
_POLL_S = 0.5
_LONGEST_LINE = 1024 * 1024


class LinkToAll(SchedulerLink):
    """What stands for a link to a scheduler where there are several: each loaded model has a link of its own."""

    make: Callable[[ListedModel], State]
    """Makes what serves a model that is loaded; whoever has this link gives it."""

    def __init__(self, socket: str) -> None:
        """socket: path of the launcher's."""
        self.target = "several models"
        self.roster = Roster(self._send, self._follow)
        self.served: dict[str, State] = {}
        """What serves a model, by name, while it is loaded."""
        self.is_serving = False
        self._socket = socket
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._answers = asyncio.Event()
        """Set while `is_serving`."""

    def start(self) -> None:
        """Connect to the launcher from now on."""
        loops = (self._listen(), self.roster.watch(), self._count_sessions())
        self._tasks = [asyncio.create_task(each, name="several-models") for each in loops]

    async def close(self) -> None:
        """End all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._hang_up()
        await asyncio.gather(*self._closing, *(each.link.close() for each in self.served.values()))

    def end_requests(self) -> None:
        """Those of all models."""
        for each in self.served.values():
            each.link.end_requests()

    @property
    def is_away(self) -> bool:
        """Whether nobody can say which models there are; each request finds out whether its own is away."""
        return not self.is_serving

    async def wait_serving(self) -> None:
        """Wait until the launcher has said which models there are."""
        await self._answers.wait()

    @property
    def num_requests(self) -> int:
        """Prompts that run, at all models."""
        return sum(each.link.num_requests for each in self.served.values())

    async def has_tenants(self) -> bool:
        """Several models have no tenants."""
        return False

    async def needs_key(self) -> bool:
        """The keys of the gateway are another matter."""
        return False

    # ---------------------------------------------------------------------------------------------------------------

    def _send(self, order: str, name: str) -> None:
        if self._writer is not None:
            self._writer.write(write_order(order, name))

    def _follow(self, model: ListedModel) -> None:
        """Have a link to the scheduler of a model exactly while it is loaded."""
        name, state = model.status.name, self.served.get(model.status.name)
        if state is not None and state.link.target != model.status.target:
            closing = asyncio.create_task(self.served.pop(name).link.close(), name="model-unloaded")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        if model.status.state is LoadState.LOADED and name not in self.served:
            self.served[name] = self.make(model)
            self.served[name].link.start()

    async def _listen(self) -> None:
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                reader, self._writer = await asyncio.open_unix_connection(self._socket, limit=_LONGEST_LINE)
                while line := await reader.readline():
                    found = read_line(line)
                    if isinstance(found, Bounds):  # the last line about all of them
                        self.roster.bounds = found
                        self._set_serving(True)
                    else:
                        self.roster.update(found)
            self._hang_up()
            self._set_serving(False)
            self.roster.lost()
            await asyncio.sleep(_RETRY_S)

    def _hang_up(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _set_serving(self, serving: bool) -> None:
        if serving != self.is_serving:
            self.is_serving = serving
            self._answers.set() if serving else self._answers.clear()
            _LOG.info("the models' launcher %s", "answers" if serving else "does not answer")

    async def _count_sessions(self) -> None:
        """Know how many requests run in sessions, of which one alone may last for days."""
        while True:
            await asyncio.sleep(_POLL_S)
            for model in self.roster.models:
                state = self.served.get(model.status.name)
                if model.num_sessions and state is not None:
                    with contextlib.suppress(CadenzaError):
                        load = (await state.link.own.server_info()).load
                        model.num_in_sessions = load.num_running + load.num_waiting
                elif not model.num_sessions:
                    model.num_in_sessions = 0
