"""The address of an executor, and the network between it and the scheduler: an ExecutorPort in this process.

A connection is two streams, one in each direction. Each keeps its order; between them, and between connections,
everything races. A cut loses what is under way in both directions, and each end notices at a moment of its own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass
from random import Random
from typing import Any

from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan.result import StepResult, StepStatus
from scheduler_svc.core.adapters.events import AdapterCommands, AdapterLoaded, AdapterUnloaded
from scheduler_svc.plan_loop.ports import (
    ExecutorHeldError,
    ExecutorLostError,
    ExecutorStoppedError,
    ModelDescription,
    PlanStream,
    SessionOpened,
    StaleEpochError,
)
from tests.simulation.executor.process import ExecutorProcess, Session

SILENCE_S = 2.0
"""Both services take a peer that sends nothing for so long as lost (cadenza_common.serving.heartbeats)."""
HEARTBEAT_S = 0.5
_RETRY_S = 0.2
"""Interval at which the client asks an address where nothing answers."""
_OPEN_TIMEOUT_S = 60.0

Answer = StepResult | AdapterLoaded | AdapterUnloaded


@dataclass(slots=True)
class Delays:
    """How long messages take, in seconds: most the usual time, some much longer."""

    usual_s: float
    late_s: float

    def draw(self, rng: Random) -> float:
        """The delay of one message."""
        return self.usual_s * rng.random() + (self.late_s * rng.random() if rng.random() < 0.1 else 0.0)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What an executor sends every HEARTBEAT_S."""

    running_step_id: int
    """0: no step of this session runs."""


class Direction:
    """One direction of a connection. Messages arrive in the order in which they were sent."""

    def __init__(self, address: Address, deliver: Callable[[Any], None]) -> None:
        self._address = address
        self._deliver = deliver
        self._under_way: deque[Any] = deque()
        self._num_due = 0
        self.cut = False

    def send(self, message: Any) -> None:
        """Let a message arrive after a while."""
        if not self.cut:
            self._under_way.append(message)
            self._address.loop.call_later(self._address.delays.draw(self._address.rng), self._arrive)

    def _arrive(self) -> None:
        self._num_due += 1
        self.flush()

    def flush(self) -> None:
        """Deliver what is due, unless the network stands still or the receiver is suspended."""
        while self._num_due and self._under_way and not (self.cut or self._address.stands_still):
            self._num_due -= 1
            self._deliver(self._under_way.popleft())


class Connection:
    """A plan stream between the scheduler and one process, from its opening on."""

    def __init__(self, address: Address, process: ExecutorProcess, epoch: int) -> None:
        self.process = process
        self.opened: asyncio.Future[SessionOpened] = address.loop.create_future()
        self.inbox: asyncio.Queue[Answer | Exception] = asyncio.Queue()
        self.lost: Exception | None = None
        self.begun_step_id = 0
        """The newest step that the scheduler knows to have begun, by a result or a heartbeat."""
        self.adapters: set[int] = set()
        """Those that plans may name: the executor has answered that it has them, and no unload has been sent."""
        self._address = address
        self._session: Session | None = None
        self._to_executor = Direction(address, self._at_executor)
        self._to_scheduler = Direction(address, self._at_scheduler)
        self._to_executor.send(epoch)

    @property
    def session(self) -> Session | None:
        """The session at the executor's end."""
        return self._session

    def send(self, plan: StepPlan) -> None:
        """Send a plan; raises the error that ended the connection."""
        self._address.on_plan(plan, self.adapters)
        if self.lost is not None:
            raise self.lost
        self._to_executor.send(plan)

    def send_adapters(self, commands: AdapterCommands) -> None:
        """Send loads and unloads of adapters; raises the error that ended the connection."""
        self._address.on_adapters(commands)
        self.adapters -= set(commands.unloads)
        if self.lost is not None:
            raise self.lost
        self._to_executor.send(commands)

    def _at_executor(self, message: int | StepPlan | AdapterCommands) -> None:
        process = self.process
        if not process.alive:
            return
        if not isinstance(message, int):
            assert self._session is not None
            submit: Callable[[Session, Any], None] = (
                process.submit if isinstance(message, StepPlan) else process.submit_adapters
            )
            submit(self._session, message)
            return
        refusal = self._address.refusal(process, message)
        if refusal is not None:
            self._to_scheduler.send(refusal)
            return
        to_scheduler = self._to_scheduler
        self._session = Session(
            message,
            deliver=to_scheduler.send,
            announce=lambda step_id: to_scheduler.send(Heartbeat(step_id)),
            announce_end=lambda: to_scheduler.send(ExecutorStoppedError("a signal stopped the executor")),
        )
        if self.lost is not None:
            self._session.lost_at = self._address.loop.time()
        self._beat()
        process.open_session(
            self._session,
            lambda last, adapters: self._to_scheduler.send(
                SessionOpened(process.model.incarnation, last, adapters=adapters)
            ),
        )

    def _at_scheduler(self, message: SessionOpened | Answer | Heartbeat | Exception) -> None:
        if isinstance(message, Exception):
            self.lose(message)
        elif isinstance(message, SessionOpened):
            if not self.opened.done():
                self.opened.set_result(message)
        elif isinstance(message, Heartbeat):
            self.begun_step_id = max(self.begun_step_id, message.running_step_id)
        elif isinstance(message, (AdapterLoaded, AdapterUnloaded)):
            self.inbox.put_nowait(message)
        else:
            self.process.num_answered += message.status is StepStatus.OK
            self.begun_step_id = max(self.begun_step_id, message.step_id)
            self.inbox.put_nowait(message)

    def take(self, answer: AdapterLoaded) -> None:
        """The scheduler learns that an adapter is loaded, or is not."""
        self._address.on_answer(answer)
        if answer.error is None:
            self.adapters.add(answer.index)

    def _beat(self) -> None:
        """Send heartbeats with the running step until the session ends."""
        if self._session is None or self._session.closed or not self.process.alive:
            return
        if not self._address.stands_still:
            self._to_scheduler.send(Heartbeat(self.process.running_step_id(self._session)))
        self._address.loop.call_later(HEARTBEAT_S, self._beat)

    def flush(self) -> None:
        """Deliver what waited."""
        self._to_executor.flush()
        self._to_scheduler.flush()

    def lose(self, error: Exception) -> None:
        """The scheduler's end notices that the connection is gone."""
        if self.lost is not None:
            return
        self._end(error)
        self._to_scheduler.cut = True
        self.inbox.put_nowait(error)
        if not self.opened.done():
            self.opened.set_exception(error)

    def _end(self, error: Exception) -> None:
        self.lost = error
        if self._session is not None:
            self._session.lost_at = self._address.loop.time()

    def cut(self, reason: str) -> None:
        """Lose what is under way; each end notices within some milliseconds."""
        address = self._address
        self._to_executor.cut = self._to_scheduler.cut = True
        for notice in (lambda: self.lose(ExecutorLostError(reason)), self.end_session):
            address.loop.call_later(address.delays.draw(address.rng), notice)

    def fall_silent(self) -> None:
        """Both ends notice that they have received nothing for SILENCE_S."""
        # Before the session is open, the client waits for the answer, and nothing else.
        if self.opened.done():
            self.lose(ExecutorLostError(f"no message for {SILENCE_S} s"))
            self.end_session()

    def end_session(self) -> None:
        """The executor's end notices that the connection is gone, or has been silent for too long."""
        self._to_executor.cut = self._to_scheduler.cut = True
        if self._session is not None:
            self.process.close_session(self._session)

    def close(self) -> None:
        """The scheduler ends it; safe to call twice."""
        if self.lost is None:
            self._end(ExecutorLostError("the session was closed"))
            self._to_executor.cut = self._to_scheduler.cut = True
            # The process notices later, unless another session has ended this one before.
            self._address.loop.call_later(self._address.delays.draw(self._address.rng), self.end_session)
        if self in self._address.connections:
            self._address.connections.remove(self)


class Stream:
    """A PlanStream over a connection."""

    resident_bytes = 0

    def __init__(self, connection: Connection, opened: SessionOpened) -> None:
        self.opened = opened
        self._connection = connection
        for answer in opened.adapters:
            connection.take(answer)

    @property
    def begun_step_id(self) -> int:
        """The newest step that the executor is known to have begun; 0: none."""
        return self._connection.begun_step_id

    async def send(self, plan: StepPlan) -> None:
        """Send the next plan; raises ExecutorLostError."""
        self._connection.send(plan)

    async def send_adapters(self, commands: AdapterCommands) -> None:
        """Send loads and unloads of adapters, after the plans so far; raises ExecutorLostError."""
        self._connection.send_adapters(commands)

    async def results(self) -> AsyncIterator[Answer]:
        """Results in plan order, and answers about adapters; raises ExecutorLostError when the stream ends."""
        while True:
            message = await self._connection.inbox.get()
            if isinstance(message, Exception):
                raise message
            if isinstance(message, AdapterLoaded):
                self._connection.take(message)
            yield message

    async def close(self) -> None:
        """End the session."""
        self._connection.close()


class Address:
    """Where executors listen, one after another. Implements ExecutorPort."""

    def __init__(
        self,
        target: str,
        loop: asyncio.AbstractEventLoop,
        rng: Random,
        delays: Delays,
        *,
        on_plan: Callable[[StepPlan, Collection[int]], None],
        on_adapters: Callable[[AdapterCommands], None],
        on_answer: Callable[[AdapterLoaded], None],
    ) -> None:
        """on_plan: called with each plan as the scheduler sends it, and the adapters that it may name. on_adapters: the
        same for loads and unloads. on_answer: called with each answer to a load as the scheduler reads it."""
        self.target = target
        self.loop, self.rng, self.delays = loop, rng, delays
        self.on_plan, self.on_adapters, self.on_answer = on_plan, on_adapters, on_answer
        self.process: ExecutorProcess | None = None
        self.connections: list[Connection] = []
        self.num_opened = 0
        """Sessions so far."""
        self.stalled = False
        """Whether the network delivers nothing; TCP delivers it later."""
        self.num_refusals = 0
        """Sessions to refuse, as an executor does that has seen a larger epoch."""
        self.held_until = 0.0
        """The end of the lease of another scheduler, which is dead."""
        self.fenced = False
        """Whether another scheduler holds the executor."""
        self.replace_before_open: Callable[[], None] | None = None
        """Called between a description and the session, once."""

    @property
    def stands_still(self) -> bool:
        """Whether nothing arrives at present, in either direction."""
        return self.stalled or (self.process is not None and self.process.stopped)

    @property
    def answers(self) -> bool:
        """Whether a process listens here and can be reached."""
        return self.process is not None and self.process.alive and not self.stands_still

    async def describe(self) -> ModelDescription:
        """Wait until an executor answers, and return its description."""
        while True:
            await asyncio.sleep(self.delays.draw(self.rng))
            process = self.process
            if self.answers and process is not None:
                model = process.model
                await asyncio.sleep(self.delays.draw(self.rng))
                if self.answers and process.alive:
                    return model
            await asyncio.sleep(_RETRY_S)

    async def open(self, epoch: int) -> PlanStream:
        """Open a session; raises ExecutorLostError, StaleEpochError, ExecutorHeldError."""
        if self.replace_before_open is not None:
            replace, self.replace_before_open = self.replace_before_open, None
            replace()
        process = self.process
        if process is None or not process.alive:
            await asyncio.sleep(self.delays.draw(self.rng))
            raise ExecutorLostError("UNAVAILABLE: connection refused")
        connection = Connection(self, process, epoch)
        self.connections.append(connection)
        try:
            async with asyncio.timeout(_OPEN_TIMEOUT_S):
                opened = await connection.opened
        except TimeoutError:
            connection.close()
            raise ExecutorLostError("no answer to OpenSession") from None
        except BaseException:
            connection.close()
            raise
        self.num_opened += 1
        return Stream(connection, opened)

    async def aclose(self) -> None:
        """The scheduler does not use this executor any more; it may come back to it by another port."""

    def refusal(self, process: ExecutorProcess, epoch: int) -> Exception | None:
        """Why the process refuses a session; None if it does not."""
        if self.fenced:
            return ExecutorHeldError("another scheduler holds this executor", silent_s=0.3 * self.rng.random())
        if self.loop.time() < self.held_until:
            # A scheduler that has died: its lease ends SILENCE_S after its last message.
            silent_s = SILENCE_S - (self.held_until - self.loop.time())
            return ExecutorHeldError("another scheduler holds this executor", silent_s)
        if self.num_refusals:
            self.num_refusals -= 1
            process.last_epoch += self.rng.choice([1, 1000])
        if epoch <= process.last_epoch:
            return StaleEpochError(f"epoch {epoch} is not above {process.last_epoch}", process.last_epoch + 1)
        return None

    def cut(self, reason: str, *, but: Session | None = None) -> None:
        """Cut all connections but that of one session."""
        for connection in list(self.connections):
            if but is None or connection.session is not but:
                connection.cut(reason)

    def flush(self) -> None:
        """Deliver what waited while the network stood still."""
        for connection in list(self.connections):
            connection.flush()
