"""ExecutionService over grpc.aio: sessions that receive plans and send results.

The event loop queues, the worker runs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import psutil
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cadenza.v1 import admin_pb2, admin_pb2_grpc, execution_pb2_grpc
from cadenza.v1 import execution_pb2 as pb
from cadenza_common.plan.errors import InvalidPlan
from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan.result import StepResult
from cadenza_common.plan_wire.reading import plan_in_slices
from cadenza_common.plan_wire.results import response_in_slices
from cadenza_common.serving.heartbeats import HEARTBEAT_S, SILENCE_S
from cadenza_common.serving.slices import run_in_slices
from cadenza_common.telemetry.spans import SpanSink
from cadenza_common.wire.transport import STATUS_DETAILS_KEY, make_status
from executor_svc.plan.description import Description
from executor_svc.service.adapters import AdapterDesk
from executor_svc.service.description import description_to_wire
from executor_svc.service.lease import Lease, Leases, SessionRefusal
from executor_svc.service.pieces import request_in_slices
from executor_svc.service.step_traces import StepTraces
from executor_svc.worker.session import Activity, PlanSession, RejectedPlan
from executor_svc.worker.worker import Worker

_log = logging.getLogger(__name__)

MAX_TRACED_STEPS = 1000
_MAX_WAITING = 64
"""Maximum plans that wait for the device and results that wait for the scheduler, together. Only a few may be in
flight, but each plan over that number has an answer too, and these must not pile up for a scheduler that reads none."""
_LAST_RESULTS_S = 1.0
"""How long an executor that stops waits until its scheduler has taken the last results and closed the session."""

_process = psutil.Process()

_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class _EndOfPlans:
    """The end of a stream's plans: the scheduler has half-closed after num_plans, or a message is invalid."""

    num_plans: int
    refusal: SessionRefusal | None = None


@dataclass(frozen=True, slots=True)
class _Announcement:
    """A step that is about to run; `sent` is done when the heartbeat that names it is written."""

    step_id: int
    sent: Future[None]


_Outgoing = StepResult | _EndOfPlans | _Announcement | pb.ExecuteResponse


class ExecutionServicer(execution_pb2_grpc.ExecutionServiceServicer):
    """Serves one worker to one scheduler at a time. Its server is a `limited_server`: plan streams yield bytes."""

    def __init__(
        self,
        worker: Worker,
        description: Description,
        heartbeat_s: float,
        silence_s: float,
        spans: SpanSink | None = None,
    ) -> None:
        self._adapters = AdapterDesk(worker)
        self._worker = worker
        self._incarnation = description.incarnation
        self._description = description_to_wire(description)
        self._heartbeat_s = heartbeat_s
        self._silence_s = silence_s
        self.leases = Leases(silence_s)
        self._spans = spans

    async def Describe(self, request: pb.DescribeRequest, context: _Context) -> pb.DescribeResponse:
        """Return the description, which is constant."""
        return self._description

    async def Execute(  # type: ignore[override]  # messages as bytes; the stub's type knows no handlers that write
        self, request_iterator: AsyncIterator[bytes], context: _Context
    ) -> None:
        """Open a session, then answer plans in order until the scheduler half-closes or a newer stream fences it."""
        lease: Lease | None = None
        try:
            lease = self.leases.take(await self._opening(request_iterator), context.peer())
            lease.serving = asyncio.create_task(self._serve(lease, request_iterator, context))
            await lease.serving
        except SessionRefusal as refusal:
            await _abort(context, refusal)
        except asyncio.CancelledError:
            if lease is None or lease.refusal is None:
                raise
            # Released first: the status cannot be sent while the scheduler reads nothing.
            self.leases.release(lease)
            await _abort(context, lease.refusal)
        finally:
            if lease is not None:
                self.leases.release(lease)

    async def finish(self, timeout_s: float, at_once: asyncio.Event) -> None:
        """Answer the steps that run, report to the scheduler that this executor stops, refuse other sessions.

        Waits for the steps until timeout_s seconds have passed or `at_once` is set. Plans that have not begun get no
        answer. The scheduler closes the session: it must not write to a stream that has ended, for gRPC would then
        give it an error in place of the status.
        """
        refusal = SessionRefusal(grpc.StatusCode.UNAVAILABLE, "the executor stops")
        self.leases.close(refusal)
        self._adapters.close()
        finished = asyncio.wrap_future(self._worker.finish())
        stopping = asyncio.create_task(at_once.wait())
        await asyncio.wait((finished, stopping), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        lease = self.leases.current
        if lease is not None and lease.serving is not None:
            lease.announce_stop()
            await asyncio.wait((lease.serving,), timeout=_LAST_RESULTS_S)
            lease.end(refusal)

    async def _opening(self, requests: AsyncIterator[bytes]) -> pb.OpenSession:
        """Return the opening message; raises Refusal for another one, or if none comes: streams must not pile up."""
        try:
            async with asyncio.timeout(self._silence_s):
                return await _first(requests)
        except TimeoutError as exc:
            message = f"no session was opened for {self._silence_s:g} s"
            raise SessionRefusal(grpc.StatusCode.UNAVAILABLE, message) from exc

    async def _serve(self, lease: Lease, requests: AsyncIterator[bytes], context: _Context) -> None:
        """Serve one session, from its opening to the last result."""
        outbox: asyncio.Queue[_Outgoing] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        session, cleared = self._worker.open_session(
            lease.epoch,
            lambda result: _post(loop, outbox, result),
            lambda step_id: _announce(loop, outbox, step_id),
            scheduler_id=lease.scheduler_id,
        )
        lease.announce_stop = lambda: outbox.put_nowait(pb.ExecuteResponse(stopping=pb.ExecutorStopping()))
        opened = asyncio.ensure_future(self._adapters.open(lease.process, asyncio.wrap_future(cleared)))
        traces = StepTraces(self._spans, self._incarnation)
        # All of them before the session is open: that waits for the running step, for minutes at worst.
        helpers = [
            asyncio.create_task(self._answer_opening(lease, session, opened, outbox)),
            asyncio.create_task(self._read(session, requests, outbox, lease, traces)),
            asyncio.create_task(self._beat(outbox, opened)),
            asyncio.create_task(_end_when_silent(lease)),
        ]
        try:
            await self._write(lease.epoch, outbox, context, traces)
        finally:
            self._worker.close_session(session)
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)

    async def _answer_opening(
        self, lease: Lease, session: PlanSession, opened: asyncio.Future[int], outbox: asyncio.Queue[_Outgoing]
    ) -> None:
        """Confirm the session once the running step has ended and the slots are clear."""
        try:
            last_completed = await opened
        except Exception as exc:
            lease.end(SessionRefusal(grpc.StatusCode.INTERNAL, f"the slots cannot be cleared: {exc}"))
            return
        _log.info(
            "scheduler %s at %s: session of epoch %d open, last completed step %d",
            lease.scheduler_id, lease.peer, lease.epoch, last_completed, extra={"epoch": lease.epoch},
        )  # fmt: skip
        answer = pb.SessionOpened(
            epoch=lease.epoch,
            incarnation=self._incarnation,
            last_completed_step_id=last_completed,
            resident_bytes=resident_bytes(),
            sole_since_epoch=session.sole_since_epoch,
            adapters=self._adapters.loaded(),
        )
        outbox.put_nowait(pb.ExecuteResponse(opened=answer))

    async def _read(
        self,
        session: PlanSession,
        requests: AsyncIterator[bytes],
        outbox: asyncio.Queue[_Outgoing],
        lease: Lease,
        traces: StepTraces,
    ) -> None:
        """Queue plans until the scheduler half-closes."""
        num_plans, problem = 0, ""
        try:
            async for raw in requests:
                lease.renew()
                received_ns = time.monotonic_ns()
                request = await run_in_slices(request_in_slices(raw))
                kind = request.WhichOneof("message")
                if kind == "plan":
                    num_plans += 1
                    if session.num_unanswered + outbox.qsize() > _MAX_WAITING:
                        message = f"over {_MAX_WAITING} plans or results wait: the scheduler does not read"
                        _log.warning(
                            "scheduler %s: %s; its session of epoch %d ends", lease.scheduler_id, message, lease.epoch,
                            extra={"epoch": lease.epoch},
                        )  # fmt: skip
                        # Not through the outbox: its writer may be blocked.
                        lease.end(SessionRefusal(grpc.StatusCode.RESOURCE_EXHAUSTED, message))
                        return
                    plan = await _plan_or_rejection(request.plan)
                    self._worker.submit(session, plan, received_ns)
                    traces.on_plan(plan)
                elif kind in ("load_adapter", "unload_adapter"):
                    if problem := self._adapters.take(request, session, outbox.put_nowait):
                        break
                elif kind != "heartbeat":
                    problem = "a session can be opened once only" if kind == "open" else "a message must hold something"
                    break
        except Exception as exc:
            # An undecodable message ends the reading; an open stream would then wait for ever.
            problem = f"a message cannot be read: {exc}"
        refusal = SessionRefusal(grpc.StatusCode.INVALID_ARGUMENT, problem) if problem else None
        outbox.put_nowait(_EndOfPlans(num_plans, refusal))

    async def _beat(self, outbox: asyncio.Queue[_Outgoing], opened: asyncio.Future[int]) -> None:
        """Send a heartbeat at every interval, except while earlier messages wait for a slow reader."""
        while True:
            await asyncio.sleep(self._heartbeat_s)
            if outbox.empty():
                # Until the session is open, a step of another session runs.
                activity = self._worker.activity() if opened.done() else Activity(0, 0, 0)
                outbox.put_nowait(
                    pb.ExecuteResponse(
                        heartbeat=pb.Heartbeat(
                            running_step_id=activity.step_id,
                            running_age_ns=activity.age_ns,
                            num_queued_plans=activity.num_queued,
                            resident_bytes=resident_bytes(),
                        )
                    )
                )

    async def _write(self, epoch: int, outbox: asyncio.Queue[_Outgoing], context: _Context, traces: StepTraces) -> None:
        """Send queued messages until the scheduler has half-closed, and its opening and every plan is answered."""
        num_answered, num_plans, is_open = 0, None, False
        while num_plans is None or num_answered < num_plans or not is_open:
            item = await outbox.get()
            if isinstance(item, StepResult):
                num_answered += 1
                await context.write(await run_in_slices(response_in_slices(item, epoch, self._incarnation)))
                traces.on_result(item)
            elif isinstance(item, _Announcement):
                await context.write(pb.ExecuteResponse(heartbeat=pb.Heartbeat(running_step_id=item.step_id)))
                item.sent.set_result(None)
            elif isinstance(item, _EndOfPlans):
                if item.refusal is not None:
                    raise item.refusal
                num_plans = item.num_plans
            else:
                is_open = is_open or item.HasField("opened")
                await context.write(item)


async def _end_when_silent(lease: Lease) -> None:
    """End the session when its scheduler sends nothing any more, so that another one may come."""
    await lease.silence.wait_until_lost()
    silent_s = lease.silence.silent_s
    _log.warning(
        "scheduler %s is silent for %.1f s: its session of epoch %d ends", lease.scheduler_id, silent_s, lease.epoch,
        extra={"epoch": lease.epoch},
    )  # fmt: skip
    # A scheduler that receives UNAVAILABLE opens a new session; ABORTED would stop it.
    lease.end(SessionRefusal(grpc.StatusCode.UNAVAILABLE, f"no message from the scheduler for {silent_s:.1f} s"))


async def _abort(context: _Context, refusal: SessionRefusal) -> NoReturn:
    """End a stream with a refusal's status and detail; sends nothing to a scheduler that has disconnected."""
    details = [] if refusal.detail is None else [refusal.detail]
    status = make_status(refusal.code, refusal.message, details)
    try:
        await context.abort(refusal.code, refusal.message, ((STATUS_DETAILS_KEY, status.SerializeToString()),))
    except grpc.aio.InternalError as exc:
        raise asyncio.CancelledError from exc


def resident_bytes() -> int:
    """Return the resident bytes of this process."""
    return int(_process.memory_info().rss)


async def _first(requests: AsyncIterator[bytes]) -> pb.OpenSession:
    """Return the opening message; raises Refusal if the stream begins with another one."""
    try:
        async for raw in requests:
            request = await run_in_slices(request_in_slices(raw))
            if request.WhichOneof("message") == "open":
                return request.open
            break
    except DecodeError as exc:
        raise SessionRefusal(grpc.StatusCode.INVALID_ARGUMENT, f"a message cannot be read: {exc}") from exc
    raise SessionRefusal(grpc.StatusCode.INVALID_ARGUMENT, "the first message must open the session")


async def _plan_or_rejection(message: pb.StepPlan) -> StepPlan | RejectedPlan:
    try:
        return await run_in_slices(plan_in_slices(message))
    except InvalidPlan as exc:
        return RejectedPlan(message.step_id, str(exc))


def _post(loop: asyncio.AbstractEventLoop, outbox: asyncio.Queue[_Outgoing], result: StepResult) -> None:
    """Pass a result from the device thread to the event loop."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(outbox.put_nowait, result)


def _announce(loop: asyncio.AbstractEventLoop, outbox: asyncio.Queue[_Outgoing], step_id: int) -> Future[None]:
    """Pass the announcement of a step from the device thread to the event loop."""
    sent: Future[None] = Future()
    if not loop.is_closed():
        loop.call_soon_threadsafe(outbox.put_nowait, _Announcement(step_id, sent))
    return sent


class ExecutorAdminServicer(admin_pb2_grpc.ExecutorAdminServiceServicer):
    """Calls for operators of an executor."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def Profile(self, request: admin_pb2.ProfileRequest, context: _Context) -> admin_pb2.ProfileResponse:
        """Return a trace of the next num_steps steps once they have run; cancelling the call cancels the trace."""
        if not 1 <= request.num_steps <= MAX_TRACED_STEPS:
            message = f"num_steps must be in 1 to {MAX_TRACED_STEPS}, not {request.num_steps}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, message)
        try:
            traced = self._worker.trace(request.num_steps)
            return admin_pb2.ProfileResponse(trace=await asyncio.wrap_future(traced))
        except NotImplementedError as exc:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"Profile: {exc}")
        except RuntimeError as exc:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"Profile: {exc}")


@dataclass(frozen=True, slots=True)
class ExecutorServices:
    """The services of an executor that have a state."""

    execution: ExecutionServicer
    health: health.aio.HealthServicer

    async def finish(self, timeout_s: float, at_once: asyncio.Event) -> None:
        """Report NOT_SERVING, and finish the session as `ExecutionServicer.finish` does."""
        await self.health.enter_graceful_shutdown()
        await self.execution.finish(timeout_s, at_once)


async def add_services(
    server: grpc.aio.Server,
    worker: Worker,
    description: Description,
    heartbeat_s: float = HEARTBEAT_S,
    silence_s: float = SILENCE_S,
    spans: SpanSink | None = None,
) -> ExecutorServices:
    """Register all services of an executor; the model is loaded, so health reports SERVING.

    A session ends when its scheduler has sent nothing for silence_s seconds. spans: gets the spans of steps.
    """
    execution = ExecutionServicer(worker, description, heartbeat_s, silence_s, spans)
    execution_pb2_grpc.add_ExecutionServiceServicer_to_server(execution, server)
    admin_pb2_grpc.add_ExecutorAdminServiceServicer_to_server(ExecutorAdminServicer(worker), server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    names = (
        pb.DESCRIPTOR.services_by_name["ExecutionService"].full_name,
        admin_pb2.DESCRIPTOR.services_by_name["ExecutorAdminService"].full_name,
    )
    for name in ("", *names):
        await health_servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return ExecutorServices(execution, health_servicer)
