"""The gRPC client of an executor: Describe, and the plan stream with heartbeats."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, NoReturn

import grpc
from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from cadenza.v1 import execution_pb2 as pb
from cadenza.v1 import execution_pb2_grpc as pb_grpc
from cadenza_common.metrics.histogram import Histogram
from cadenza_common.plan.errors import ProtocolError
from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan.result import StepResult
from cadenza_common.plan_wire.results import result_from_wire, result_in_slices
from cadenza_common.plan_wire.writing import request_in_slices
from cadenza_common.serving.heartbeats import HEARTBEAT_S, SILENCE_S, PeerSilence
from cadenza_common.serving.slices import run_at_once, run_in_slices
from cadenza_common.wire.tls.connection import ChannelFiles
from cadenza_common.wire.tls_reason import find_tls_reason
from cadenza_common.wire.transport import (
    EXECUTOR_PORT,
    PROTOCOL_VERSION,
    STATUS_DETAILS_KEY,
    aio_channel,
    format_address,
    parse_address,
)
from scheduler_svc.core.adapters.events import AdapterCommands, AdapterLoaded, AdapterUnloaded
from scheduler_svc.executors.adapters import command_messages, loaded_adapter, unloaded_adapter
from scheduler_svc.executors.convert import model_description
from scheduler_svc.metrics.buckets import PLAN_BYTES
from scheduler_svc.plan_loop.ports import (
    ExecutorFencedError,
    ExecutorHeldError,
    ExecutorLostError,
    ExecutorStoppedError,
    ModelDescription,
    SessionOpened,
    StaleEpochError,
)

if TYPE_CHECKING:
    _Call = grpc.aio.StreamStreamCall[bytes, pb.ExecuteResponse]

_LOG = logging.getLogger(__name__)
_EXECUTE = "/cadenza.v1.ExecutionService/Execute"
_OPEN_TIMEOUT_S = 60.0
"""An executor answers a new session only after its running step has ended."""
_FIRST_NOTICE_S = 10.0
"""An executor that was started together with this scheduler listens by then, though it may still load its model."""
_NOTICE_S = 30.0
_DESCRIBE_TIMEOUT_S = 5.0
_TLS_LOOK_S = 3.0
_RETRY_S = 0.2
_FENCED = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.ABORTED)
"""Without a SessionRefusal that allows a retry, these stop the scheduler."""


class GrpcExecutor:
    """An ExecutorPort for one address. The channel reconnects by itself; each session has a connection of its own."""

    def __init__(
        self, target: str, scheduler_id: str, *, silence_s: float = SILENCE_S, tls: ChannelFiles | None = None
    ) -> None:
        """scheduler_id: the executor hands itself over at once to another process with the same id.

        silence_s: an executor without messages for this long counts as lost. tls: None for plain text.
        Raises ValueError for a bad address.
        """
        self._tls = tls
        self.target = format_address(*parse_address(target, default_port=EXECUTOR_PORT))
        self._scheduler_id = scheduler_id
        self._incarnation = secrets.randbits(64)
        self._silence_s = silence_s
        self.plan_bytes = Histogram(PLAN_BYTES)
        """Sizes of the plans sent, over all sessions."""
        self._connect()

    def _connect(self) -> None:
        """Use a connection that is made by the next call."""
        self._channel = aio_channel(self.target, self._tls)
        self._stub: pb_grpc.ExecutionServiceAsyncStub = pb_grpc.ExecutionServiceStub(self._channel)
        # Messages of a plan stream are made here, so that their sizes are known at no further cost.
        self._execute: grpc.aio.StreamStreamMultiCallable[bytes, pb.ExecuteResponse] = self._channel.stream_stream(
            _EXECUTE, response_deserializer=pb.ExecuteResponse.FromString
        )
        self._is_doubtful = False

    async def _reconnect_if_doubtful(self) -> None:
        """Replace a connection that a session or a call was lost on, although the connection may look alive.

        After bytes were lost or repeated, both ends may disagree about the compressed headers of calls (RFC 7541): each
        later call is then taken for another one, or never answered, and gRPC keeps the connection.
        """
        if self._is_doubtful:
            await self._channel.close()
            self._connect()

    async def describe(self) -> ModelDescription:
        """Wait until the executor answers; raises ExecutorLostError for another protocol version."""
        notice = asyncio.create_task(self._log_waiting())
        answer = asyncio.create_task(self._description())
        refusal = asyncio.create_task(self._tls_refusal())
        try:
            await asyncio.wait((answer, refusal), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise ExecutorLostError(await refusal)
            message = await answer
        finally:
            for task in (notice, answer, refusal):
                task.cancel()
            await asyncio.gather(answer, refusal, return_exceptions=True)
        if message.protocol_version != PROTOCOL_VERSION:
            raise ExecutorLostError(
                f"it speaks protocol version {message.protocol_version}, this scheduler {PROTOCOL_VERSION}"
            )
        try:
            return model_description(message)
        except ProtocolError as exc:
            raise ExecutorLostError(str(exc)) from exc

    async def _description(self) -> pb.DescribeResponse:
        """The answer of an executor that listens, some time; raises ExecutorLostError for another one."""
        while True:
            await self._reconnect_if_doubtful()
            try:
                return await self._stub.Describe(pb.DescribeRequest(), timeout=_DESCRIBE_TIMEOUT_S, wait_for_ready=True)
            except grpc.aio.AioRpcError as exc:
                self._is_doubtful = exc.code() is not grpc.StatusCode.UNAVAILABLE
                # UNAVAILABLE: still loading, or the connection broke; DEADLINE_EXCEEDED: nothing listens there.
                if exc.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    raise ExecutorLostError(f"Describe: {_reason(exc)}") from exc
                if exc.code() is grpc.StatusCode.UNAVAILABLE:  # may be returned at once
                    await asyncio.sleep(_RETRY_S)

    async def _tls_refusal(self) -> str:
        """Why no connection comes about, as soon as it is known that TLS is the reason.

        A call that waits for its connection would wait for ever, without a word.
        """
        while True:
            await asyncio.sleep(_TLS_LOOK_S)
            tls = None if self._tls is None else self._tls.tls
            reason = await find_tls_reason(self.target, tls, default_port=EXECUTOR_PORT, prefix="--executor-")
            if reason:
                return f"no TLS connection: {reason}"

    async def open(self, epoch: int) -> GrpcPlanStream:
        """Open a session; raises ExecutorLostError, StaleEpochError, ExecutorHeldError, ExecutorFencedError."""
        self._is_doubtful = True  # for the describe that follows this session
        stream = GrpcPlanStream(self._execute(), epoch, self.plan_bytes, silence_s=self._silence_s)
        try:
            await stream.start(self._scheduler_id, self._incarnation)
        except BaseException:
            await stream.close()
            raise
        about = {"executor": self.target, "epoch": epoch}
        _LOG.info(
            "executor %s: session %d of scheduler %s is open", self.target, epoch, self._scheduler_id, extra=about
        )
        return stream

    async def aclose(self) -> None:
        """Close the channel; open sessions end."""
        await self._channel.close()

    async def _log_waiting(self) -> None:
        delay, waited, about = _FIRST_NOTICE_S, 0.0, {"executor": self.target}
        while True:
            await asyncio.sleep(delay)
            waited += delay
            delay = _NOTICE_S
            if await _listens(self.target):
                _LOG.info("the executor at %s is loading its model (%.0f s so far)", self.target, waited, extra=about)
            else:
                _LOG.warning("no executor listens at %s (%.0f s so far)", self.target, waited, extra=about)


class GrpcPlanStream:
    """A PlanStream: one session. Writes are serialized; `silence_s` without messages breaks it."""

    opened: SessionOpened

    def __init__(self, call: _Call, epoch: int, plan_bytes: Histogram, *, silence_s: float) -> None:
        self.last_heartbeat: pb.Heartbeat | None = None
        """The executor's last heartbeat: its running step, and the time since that step began."""
        self.resident_bytes = 0
        """Resident memory of the executor's process in bytes, as last reported; 0: unknown."""
        self.begun_step_id = 0
        """The newest step that the executor is known to have begun; 0: none."""
        self._call = call
        self._epoch = epoch
        self._plan_bytes = plan_bytes
        self._silence = PeerSilence(silence_s)
        self._write_lock = asyncio.Lock()
        self._inflight: deque[tuple[int, float]] = deque()
        """(step_id, time of sending), oldest first."""
        self._lost = ""
        self._closed = False
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, scheduler_id: str, incarnation: int) -> None:
        """Send OpenSession, start the heartbeats, wait for SessionOpened."""
        opening = pb.OpenSession(
            scheduler_id=scheduler_id,
            epoch=self._epoch,
            protocol_version=PROTOCOL_VERSION,
            scheduler_incarnation=incarnation,
        )
        self._tasks = [
            asyncio.create_task(self._send_heartbeats(), name="executor-heartbeat"),
            asyncio.create_task(self._end_when_silent(), name="executor-silence"),
        ]
        try:
            async with asyncio.timeout(_OPEN_TIMEOUT_S):
                await self._write(pb.ExecuteRequest(open=opening))
                message = await self._read()
                while message.WhichOneof("message") == "heartbeat":
                    message = await self._read()
        except TimeoutError as exc:
            raise ExecutorLostError(f"no answer to OpenSession within {_OPEN_TIMEOUT_S:.0f} s") from exc
        if message.WhichOneof("message") != "opened" or message.opened.epoch != self._epoch:
            raise ExecutorLostError("the answer to OpenSession is not this session's SessionOpened")
        self.opened = SessionOpened(
            message.opened.incarnation,
            message.opened.last_completed_step_id,
            message.opened.sole_since_epoch,
            tuple(map(loaded_adapter, message.opened.adapters)),
        )
        self.resident_bytes = message.opened.resident_bytes

    async def send(self, plan: StepPlan) -> None:
        """Send the next plan; raises ExecutorLostError."""
        self._inflight.append((plan.step_id, time.monotonic()))
        work = request_in_slices(plan, self._epoch)
        # A plan without admissions is short.
        request = await run_in_slices(work) if plan.admitted else run_at_once(work)
        self._plan_bytes.observe(await self._write(request))

    async def send_adapters(self, commands: AdapterCommands) -> None:
        """Send loads and unloads; raises ExecutorLostError."""
        for message in command_messages(commands):
            await self._write(message)

    async def results(self) -> AsyncIterator[StepResult | AdapterLoaded | AdapterUnloaded]:
        """Yield results in plan order, and answers about adapters; raises ExecutorLostError when the stream ends."""
        while True:
            message = await self._read()
            kind = message.WhichOneof("message")
            if kind == "result":
                yield await self._result(message.result)
            elif kind == "adapter_loaded":
                yield loaded_adapter(message.adapter_loaded)
            elif kind == "adapter_unloaded":
                yield unloaded_adapter(message.adapter_unloaded)

    async def close(self) -> None:
        """End the session; safe to call twice."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        # A call that is only dropped stays open (grpc#43462).
        self._call.cancel()

    async def _result(self, message: pb.StepResult) -> StepResult:
        if message.epoch != self._epoch or message.incarnation != self.opened.incarnation:
            raise ExecutorLostError(f"the result of step {message.step_id} belongs to another session")
        if self._inflight and self._inflight[0][0] == message.step_id:
            self._inflight.popleft()
        self.begun_step_id = max(self.begun_step_id, message.step_id)
        try:
            if message.logprobs or message.prompt_logprobs:
                return await run_in_slices(result_in_slices(message))
            return result_from_wire(message)
        except ProtocolError as exc:
            raise ExecutorLostError(str(exc)) from exc

    async def _read(self) -> pb.ExecuteResponse:
        """Read the next message; records heartbeats.

        Raises ExecutorStoppedError if the executor stops, ExecutorLostError at the end of the stream.
        """
        try:
            message = await self._call.read()
        except asyncio.CancelledError:
            self._raise_unless_cancelled()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as exc:
            await self._raise_lost(exc)
        if not isinstance(message, pb.ExecuteResponse):
            await self._raise_lost(None)
        self._silence.heard()
        kind = message.WhichOneof("message")
        if kind == "heartbeat":
            self.last_heartbeat = message.heartbeat
            self.resident_bytes = message.heartbeat.resident_bytes or self.resident_bytes
            self.begun_step_id = max(self.begun_step_id, message.heartbeat.running_step_id)
        elif kind == "stopping":
            raise ExecutorStoppedError("a signal stopped it")
        return message

    async def _write(self, message: pb.ExecuteRequest) -> int:
        """Send a message; returns its size in bytes. Raises ExecutorLostError."""
        data = message.SerializeToString()
        async with self._write_lock:
            try:
                await self._call.write(data)
            except asyncio.CancelledError:
                self._raise_unless_cancelled()
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as exc:
                await self._raise_lost(exc)
        return len(data)

    def _raise_unless_cancelled(self) -> NoReturn:
        """Handle CancelledError, which grpc.aio raises both for a cancelled call and for a cancelled task."""
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError
        raise ExecutorLostError(self._lost or "the session was closed")

    async def _raise_lost(self, exc: BaseException | None) -> NoReturn:
        """Raise an error with the reason why the call ended."""
        if self._lost or self._closed:
            raise ExecutorLostError(self._lost or "the session was closed") from exc
        code, details = await self._call.code(), await self._call.details()
        refusal = _session_refusal(await self._call.trailing_metadata())
        if refusal is not None and code is grpc.StatusCode.FAILED_PRECONDITION:
            raise StaleEpochError(f"{code.name}: {details}", refusal.next_epoch) from exc
        if refusal is not None and refusal.holder_id:
            raise ExecutorHeldError(str(details), refusal.holder_silent_ns / 1e9) from exc
        if code in _FENCED:
            raise ExecutorFencedError(f"the executor refuses this scheduler: {code.name}: {details}") from exc
        if code is grpc.StatusCode.OK:
            raise ExecutorLostError("the executor ended the plan stream") from exc
        raise ExecutorLostError(f"{code.name}: {details}") from exc

    async def _send_heartbeats(self) -> None:
        """Send heartbeats at the interval."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            if self._write_lock.locked():
                # A write is blocked: heartbeats must not pile up behind it.
                continue
            try:
                await self._write(pb.ExecuteRequest(heartbeat=self._heartbeat(time.monotonic())))
            except ExecutorLostError:
                return  # the reader raises the reason

    async def _end_when_silent(self) -> None:
        """Break the session when the executor sends nothing any more."""
        await self._silence.wait_until_lost()
        self._lost = f"no message for {self._silence.silent_s:.1f} s"
        self._call.cancel()

    def _heartbeat(self, now: float) -> pb.Heartbeat:
        if not self._inflight:
            return pb.Heartbeat()
        step_id, sent_at = self._inflight[0]
        return pb.Heartbeat(
            running_step_id=step_id, running_age_ns=int((now - sent_at) * 1e9), num_queued_plans=len(self._inflight)
        )


def _session_refusal(metadata: grpc.aio.Metadata | None) -> pb.SessionRefusal | None:
    """The SessionRefusal in the details of a status; None if there is none, or none that can be read."""
    refusal = pb.SessionRefusal()
    for key, value in metadata or ():
        if key == STATUS_DETAILS_KEY and isinstance(value, bytes):
            with contextlib.suppress(DecodeError):
                if any(detail.Unpack(refusal) for detail in status_pb2.Status.FromString(value).details):
                    return refusal
    return None


def _reason(exc: grpc.aio.AioRpcError) -> str:
    return f"{exc.code().name}: {exc.details()}"


async def _listens(target: str) -> bool:
    """Whether something accepts connections there. An executor listens before it loads its model."""
    host, port = parse_address(target, default_port=EXECUTOR_PORT)
    try:
        async with asyncio.timeout(_DESCRIBE_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port)
    except OSError:  # TimeoutError is one
        return False
    writer.close()
    return True
