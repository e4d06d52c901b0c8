"""An executor behind gRPC that follows a script: no model, no KV, real plans and results."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import grpc

from cadenza.v1 import execution_pb2 as pb
from cadenza.v1 import execution_pb2_grpc, types_pb2
from cadenza_common.wire import transport

VOCAB_SIZE = 512
EOS = 0


@dataclass
class _Slot:
    admitted: pb.AdmittedSequence
    num_tokens: int
    num_computed: int
    stopped: bool = False

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.admitted.num_prompt_tokens


@dataclass
class ScriptedExecutor(execution_pb2_grpc.ExecutionServiceServicer):
    """Each sequence gets the tokens of `scripts[its seed]`, then token 100 + seed % 100 for ever."""

    scripts: dict[int, list[int]] = field(default_factory=dict)
    max_model_len: int = 256
    num_blocks: int = 256
    max_num_seqs: int = 64
    name: str = "toy"
    vocab_size: int = VOCAB_SIZE
    tokenizer: str = ""
    digest: bytes = b"d" * 32
    """Of the numerics fingerprint."""
    max_logprobs: int = 20
    incarnation: int = 7
    protocol_version: int = 1
    features: tuple[pb.ExecutorFeature, ...] = ()
    max_drafts: int = 0
    """Announced with EXECUTOR_FEATURE_DRAFTS; it never has a draft, which is allowed. 0: not announced."""
    silent: bool = False
    """Say nothing: no heartbeats, no results."""
    going: asyncio.Event = field(default_factory=asyncio.Event)
    """While clear, no step runs."""
    pause_after: int | None = None
    """Clear `going` after this many plans in all."""
    holder: str = ""
    refuse: tuple[grpc.StatusCode, str] | None = None
    samplings: list[types_pb2.SequenceSampling] = field(default_factory=list)
    """Of each admitted sequence."""
    default_sampling: dict[str, float] = field(default_factory=dict)
    num_plans: int = 0
    num_heartbeats: int = 0
    resident_bytes: int = 5_000
    memory: tuple[types_pb2.MemoryPart, ...] = (
        types_pb2.MemoryPart(name="weights", computed_bytes=7, measured_bytes=9),
        types_pb2.MemoryPart(name="steps", measured_bytes=-2),
    )
    last_epoch: int = 0
    slots: dict[int, _Slot] = field(default_factory=dict)
    fail_with: pb.StepResult | None = None
    error_at_end: pb.SlotError.ValueType | None = None
    """Sequences fail with this where their script ends."""
    breaking: tuple[grpc.StatusCode, str] | None = None
    running: set[asyncio.Task[None]] = field(default_factory=set)
    in_session: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.going.set()

    async def Describe(self, request, context):
        return pb.DescribeResponse(
            protocol_version=self.protocol_version,
            incarnation=self.incarnation,
            model=pb.ModelGeometry(
                name=self.name, architecture="Toy", vocab_size=self.vocab_size, max_model_len=self.max_model_len,
                dtype="float32", num_parameters=11, model_type="toy_text",
            ),
            tokenizer=self.tokenizer,
            eos_token_ids=[EOS],
            kv=pb.KvGeometry(block_size=16, num_device_blocks=self.num_blocks, num_groups=1),
            limits=pb.ExecutorLimits(
                num_slots=2 * self.max_num_seqs, max_num_seqs=self.max_num_seqs, max_num_batched_tokens=512,
                max_logprobs=self.max_logprobs, max_inflight_plans=4, max_drafts=self.max_drafts,
            ),
            fingerprint=types_pb2.NumericsFingerprint(mode=types_pb2.NUMERICS_MODE_EXACT, digest=self.digest),
            device="cpu",
            version="test",
            default_sampling=types_pb2.SamplingParams(**self.default_sampling),
            memory=self.memory,
            features=[*self.features, *([pb.EXECUTOR_FEATURE_DRAFTS] if self.max_drafts else [])],
        )  # fmt: skip

    async def Execute(self, request_iterator, context):
        first = await anext(aiter(request_iterator))
        assert first.WhichOneof("message") == "open"
        if self.refuse is not None:
            await context.abort(*self.refuse)
        if first.open.epoch <= self.last_epoch:
            refusal = pb.SessionRefusal(next_epoch=self.last_epoch + 1)
            status = transport.make_status(grpc.StatusCode.FAILED_PRECONDITION, "the epoch is not larger", [refusal])
            details = ((transport.STATUS_DETAILS_KEY, status.SerializeToString()),)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, status.message, details)
        self.last_epoch = epoch = first.open.epoch
        self.slots.clear()
        opened = pb.SessionOpened(
            epoch=epoch, incarnation=self.incarnation, last_completed_step_id=self.num_plans,
            resident_bytes=self.resident_bytes,
        )  # fmt: skip
        await context.write(pb.ExecuteResponse(opened=opened))
        writing = asyncio.Lock()
        beating = asyncio.create_task(self._beat(context, writing))
        self.running.add(asyncio.current_task())
        self.in_session.set()
        try:
            async for request in request_iterator:
                if request.WhichOneof("message") == "heartbeat":
                    self.num_heartbeats += 1
                    continue
                await self.going.wait()
                self.num_plans += 1
                assert request.plan.epoch == epoch
                result = self.fail_with or self.run(request.plan)
                result.step_id, result.epoch, result.incarnation = request.plan.step_id, epoch, self.incarnation
                if not self.silent:
                    async with writing:
                        await context.write(pb.ExecuteResponse(result=result))
                if self.num_plans == self.pause_after:
                    self.going.clear()
        except asyncio.CancelledError:
            if self.breaking is None:
                raise
            status, self.breaking = self.breaking, None
            await context.abort(*status)
        finally:
            beating.cancel()
            self.running.discard(asyncio.current_task())
            self.in_session.clear()

    async def break_up(self, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
        """End the session with this status, once it is past its opening: the other side may see that first."""
        await self.in_session.wait()
        self.breaking = code, "broken by the test"
        (task,) = self.running
        task.cancel()

    async def become(self, **changes: Any) -> None:
        """Another incarnation takes its place, with these fields; the session ends."""
        self.incarnation += 1
        for name, value in changes.items():
            assert hasattr(self, name), name
            setattr(self, name, value)
        await self.break_up()

    async def _beat(self, context, writing: asyncio.Lock):
        """Until it is cancelled; gRPC takes one write of a call at a time, so both writers share a lock."""
        while not self.silent:
            await asyncio.sleep(0.1)
            beat = pb.Heartbeat(running_step_id=self.num_plans, resident_bytes=self.resident_bytes)
            async with writing:
                await context.write(pb.ExecuteResponse(heartbeat=beat))

    def run(self, plan: pb.StepPlan) -> pb.StepResult:
        for slot_id in plan.released_slots:
            del self.slots[slot_id]
        for admitted in plan.admitted:
            assert admitted.slot not in self.slots
            self.samplings.append(admitted.sampling)
            self.slots[admitted.slot] = _Slot(admitted, len(admitted.token_ids), admitted.num_computed_tokens)
        scheduled = plan.scheduled
        work = dict(zip(scheduled.slots, zip(scheduled.num_tokens, scheduled.samples, strict=True), strict=True))
        if plan.decode_ready:
            for slot_id, slot in self.slots.items():
                if slot_id not in work and slot.num_tokens - slot.num_computed == (0 if slot.stopped else 1):
                    work[slot_id] = (1, True)
        result = pb.StepResult(status=pb.STEP_STATUS_OK, timings=pb.StepTimings(total_ns=1000, device_ns=900))
        for slot_id, (count, samples) in work.items():
            self._step(result, slot_id, self.slots[slot_id], count, samples)
        return result

    def _step(self, result: pb.StepResult, slot_id: int, slot: _Slot, count: int, samples: bool) -> None:
        if not slot.stopped:
            slot.num_computed += count
            assert slot.num_computed <= slot.num_tokens
        if not samples:
            return
        result.slots.append(slot_id)
        result.num_tokens.append(0 if slot.stopped else 1)
        if slot.stopped:
            return
        sampling = slot.admitted.sampling
        script = self.scripts.get(sampling.seed, [])
        if self.error_at_end is not None and slot.num_output >= len(script):
            result.num_tokens[-1] = 0
            result.error_slots.append(slot_id)
            result.errors.append(self.error_at_end)
            slot.stopped, slot.num_computed = True, slot.num_tokens
            return
        token = script[slot.num_output] if slot.num_output < len(script) else 100 + sampling.seed % 100
        slot.num_tokens += 1
        result.token_ids.append(token)
        if token in sampling.stop_token_ids and slot.num_output >= sampling.min_tokens:
            slot.stopped, slot.num_computed = True, slot.num_tokens
        if sampling.HasField("num_logprobs"):
            top = range(sampling.num_logprobs)
            result.logprobs.add(slot=slot_id, start=slot.num_tokens - 1).columns.MergeFrom(
                types_pb2.LogprobColumns(
                    chosen_logprobs=[-0.5], chosen_ranks=[1], num_top=len(top), top_token_ids=top,
                    top_logprobs=[-0.5 - i for i in top],
                )
            )  # fmt: skip


async def serve(executor: ScriptedExecutor, address: str = "127.0.0.1:0") -> tuple[grpc.aio.Server, str]:
    """Serve it; returns the server, to be stopped, and its address."""
    server = grpc.aio.server(options=transport.server_options())
    execution_pb2_grpc.add_ExecutionServiceServicer_to_server(executor, server)
    bound = transport.bind(server, address, default_port=0)
    await server.start()
    return server, bound
