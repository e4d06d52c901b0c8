"""planlog.proto: records of the calls into the core, in the order of scheduler.py, and the differences of two plans."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from google.protobuf.message import Message

from cadenza.v1 import execution_pb2, types_pb2
from cadenza.v1 import planlog_pb2 as pb
from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan.result import StepResult
from cadenza_common.plan_wire.results import result_to_wire
from cadenza_common.plan_wire.writing import plan_to_wire
from cadenza_common.serving.plan_log import FORMAT_VERSION, MAGIC
from cadenza_common.wire.transport import PROTOCOL_VERSION
from scheduler_svc.core.adapters.events import AdapterCommands, AdapterEvent, AdapterLoaded
from scheduler_svc.core.types import ExecutorSpec, FinishDetail, RequestKey, RequestSpec, SessionEnd
from scheduler_svc.executors.adapters import loaded_message
from scheduler_svc.executors.convert import kv_groups_to_wire, state_to_wire
from scheduler_svc.plan_loop.ports import ModelDescription
from scheduler_svc.recording.recorded import event_message, executor_message, request_message

MakeRecord = Callable[[], pb.PlanLogRecord]
"""Builds a record; called only if the record is written."""
_MOST_SHOWN = 20


def header(
    options: Mapping[str, object], model: ModelDescription, *, cadenza_version: str, started_unix_ns: int
) -> pb.PlanLogRecord:
    """Return the first record of a log. `options`: the scheduler's options by name."""
    return pb.PlanLogRecord(
        header=pb.PlanLogHeader(
            magic=MAGIC,
            format_version=FORMAT_VERSION,
            cadenza_version=cadenza_version,
            started_unix_ns=started_unix_ns,
            options=[pb.PlanLogOption(name=name, value=_option_text(value)) for name, value in options.items()],
            executor=_description(model),
        )
    )


def recorded_options(message: pb.PlanLogHeader) -> dict[str, str | None]:
    """Return the scheduler's options as text, by name; None for options without a value."""
    return {option.name: option.value if option.HasField("value") else None for option in message.options}


def with_error(record: pb.PlanLogRecord, error: str) -> pb.PlanLogRecord:
    """Return the record of a call that raised this error; empty: no error."""
    record.error = error
    return record


def error_text(error: Exception) -> str:
    """Return the text of an exception in a record."""
    return f"{type(error).__name__}: {error}"


def executor_described(executor_id: int, model: ModelDescription) -> pb.PlanLogRecord:
    """Return the record of an executor's changed description."""
    return pb.PlanLogRecord(
        executor_described=pb.ExecutorDescribed(executor_id=executor_id, executor=_description(model))
    )


def add_executor(executor_id: int, spec: ExecutorSpec) -> pb.PlanLogRecord:
    """Return the record of a new lane."""
    return pb.PlanLogRecord(add_executor=pb.AddExecutorCall(executor_id=executor_id, spec=executor_message(spec)))


def session_opened(
    executor_id: int,
    last_completed_step_id: int,
    epoch: int,
    incarnation: int,
    *,
    same_incarnation: bool = False,
    keeps_kv: bool = False,
    adapters: Collection[AdapterLoaded] = (),
) -> pb.PlanLogRecord:
    """Return the record of an opened session."""
    call = pb.SessionOpenedCall(
        executor_id=executor_id,
        last_completed_step_id=last_completed_step_id,
        epoch=epoch,
        incarnation=incarnation,
        same_incarnation=same_incarnation,
        keeps_kv=keeps_kv,
        adapters=map(loaded_message, adapters),
    )
    return pb.PlanLogRecord(session_opened=call)


def executor_lost(executor_id: int, now: float, end: SessionEnd | None = None) -> pb.PlanLogRecord:
    """Return the record of an ended session."""
    known = None
    if end is not None:
        known = pb.SessionEnd(
            begun_step_id=end.begun_step_id,
            failed_step_id=end.failed_step_id,
            executor_stopped=end.executor_stopped,
        )
    return pb.PlanLogRecord(executor_lost=pb.ExecutorLostCall(executor_id=executor_id, now=now, end=known))


def give_up_executor(executor_id: int, now: float) -> pb.PlanLogRecord:
    """Return the record of a lost executor that is not waited for."""
    return pb.PlanLogRecord(give_up_executor=pb.GiveUpExecutorCall(executor_id=executor_id, now=now))


def drain_executor(executor_id: int, draining: bool, now: float) -> pb.PlanLogRecord:
    """Return the record of the start or end of one executor's drain."""
    call = pb.DrainExecutorCall(executor_id=executor_id, draining=draining, now=now)
    return pb.PlanLogRecord(drain_executor=call)


def remove_executor(executor_id: int, now: float) -> pb.PlanLogRecord:
    """Return the record of a removed executor."""
    return pb.PlanLogRecord(remove_executor=pb.RemoveExecutorCall(executor_id=executor_id, now=now))


def add_request(spec: RequestSpec, now: float) -> pb.PlanLogRecord:
    """Return the record of a new request."""
    return pb.PlanLogRecord(add_request=pb.AddRequestCall(request=request_message(spec), now=now))


def set_weights(weights: Mapping[str, float]) -> pb.PlanLogRecord:
    """Return the record of the fair order's weights."""
    return pb.PlanLogRecord(set_weights=pb.SetWeightsCall(weights=weights))


def abort(key: RequestKey, detail: FinishDetail) -> pb.PlanLogRecord:
    """Return the record of an aborted request."""
    tenant, request_id = key
    number = types_pb2.FinishDetail.ValueType(detail)
    return pb.PlanLogRecord(abort=pb.AbortCall(tenant=tenant, request_id=request_id, detail=number))


def stop_sample(key: RequestKey, sample_index: int) -> pb.PlanLogRecord:
    """Return the record of a sample that a stop string ended."""
    tenant, request_id = key
    return pb.PlanLogRecord(
        stop_sample=pb.StopSampleCall(tenant=tenant, request_id=request_id, sample_index=sample_index)
    )


def adapter_event(event: AdapterEvent, executor_id: int) -> pb.PlanLogRecord:
    """Return the record of what happened to an adapter."""
    return pb.PlanLogRecord(adapter_event=event_message(event, executor_id))


def adapter_commands(executor_id: int, commands: AdapterCommands) -> pb.PlanLogRecord:
    """Return the record of the loads and unloads that an executor gets."""
    loads = [registered.index for registered in commands.loads]
    call = pb.AdapterCommandsCall(executor_id=executor_id, loads=loads, unloads=commands.unloads)
    return pb.PlanLogRecord(adapter_commands=call)


def drain(draining: bool) -> pb.PlanLogRecord:
    """Return the record of the start or end of a drain."""
    return pb.PlanLogRecord(drain=pb.DrainCall(draining=draining))


def flush_prefix_caches(most: int) -> pb.PlanLogRecord:
    """Return the record of blocks that were removed from the prefix caches."""
    return pb.PlanLogRecord(flush_prefix_caches=pb.FlushPrefixCachesCall(most=most))


def plan_step(executor_id: int, now: float, plan: StepPlan | None, epoch: int) -> pb.PlanLogRecord:
    """Return the record of a planned step, or of no step to plan."""
    message = None if plan is None else plan_to_wire(plan, epoch)
    return pb.PlanLogRecord(plan_step=pb.PlanStepCall(executor_id=executor_id, now=now, plan=message))


def apply_result(executor_id: int, now: float, result: StepResult, epoch: int, incarnation: int) -> pb.PlanLogRecord:
    """Return the record of an applied result."""
    message = result_to_wire(result, epoch, incarnation)
    return pb.PlanLogRecord(apply_result=pb.ApplyResultCall(executor_id=executor_id, now=now, result=message))


def step_failed(executor_id: int, result: StepResult, epoch: int, incarnation: int) -> pb.PlanLogRecord:
    """Return the record of a failed step, whose result the core does not receive."""
    message = result_to_wire(result, epoch, incarnation)
    return pb.PlanLogRecord(step_failed=pb.StepFailed(executor_id=executor_id, result=message))


def differences(recorded: Message, made: Message, path: str = "") -> Iterator[str]:
    """Yield the differences between two messages of one type: `path: recorded …, now …`, for each field."""
    for field in recorded.DESCRIPTOR.fields:
        left, right, spot = getattr(recorded, field.name), getattr(made, field.name), path + field.name
        if field.has_presence and recorded.HasField(field.name) != made.HasField(field.name):
            yield f"{spot}: {'recorded only' if recorded.HasField(field.name) else 'now only'}"
        elif left == right:
            continue
        elif field.message_type is None or (field.is_repeated and len(left) != len(right)):
            yield f"{spot}: recorded {_shown(left)}, now {_shown(right)}"
        elif field.is_repeated:
            for index, pair in enumerate(zip(left, right, strict=True)):
                yield from differences(*pair, f"{spot}[{index}].")
        else:
            yield from differences(left, right, f"{spot}.")


def _shown(value: Any) -> str:
    """Return a field's value on one line: numbers and text in full, messages as their count."""
    if isinstance(value, str | bytes | int | float):
        return repr(value)
    entries: Sequence[Any] = list(value)
    if entries and isinstance(entries[0], Message):
        return f"{len(entries)} entries"
    more = f" … ({len(entries)} in all)" if len(entries) > _MOST_SHOWN else ""
    return f"[{', '.join(map(str, entries[:_MOST_SHOWN]))}{more}]"


def _option_text(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _description(model: ModelDescription) -> execution_pb2.DescribeResponse:
    """Return the wire form of an executor's description, as far as the scheduler keeps it."""
    features = {
        execution_pb2.EXECUTOR_FEATURE_LOGPROBS: True,
        execution_pb2.EXECUTOR_FEATURE_PROMPT_LOGPROBS: model.gives_prompt_logprobs,
        execution_pb2.EXECUTOR_FEATURE_LOGITS_PROCESSORS: model.has_logits_processors,
        execution_pb2.EXECUTOR_FEATURE_BLOCK_COPY: model.can_copy,
        execution_pb2.EXECUTOR_FEATURE_SWAP: model.can_swap,
        execution_pb2.EXECUTOR_FEATURE_SAMPLE_FORK: model.can_fork,
        execution_pb2.EXECUTOR_FEATURE_BEAMS: model.gives_candidates,
        execution_pb2.EXECUTOR_FEATURE_DRAFTS: model.max_drafts > 0,
        execution_pb2.EXECUTOR_FEATURE_ADAPTERS: model.max_loras > 0,
        execution_pb2.EXECUTOR_FEATURE_DEBUG_DIGEST: model.gives_debug_digest,
        execution_pb2.EXECUTOR_FEATURE_SHARED_PREFIXES: model.shares_prefixes,
    }
    return execution_pb2.DescribeResponse(
        protocol_version=PROTOCOL_VERSION,
        incarnation=model.incarnation,
        model=execution_pb2.ModelGeometry(
            name=model.name,
            architecture=model.architecture,
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            dtype=model.dtype,
            num_parameters=model.num_parameters,
            model_type=model.model_type,
        ),
        tokenizer=model.tokenizer,
        eos_token_ids=model.eos_token_ids,
        bos_token_id=model.bos_token_id,
        kv=execution_pb2.KvGeometry(
            block_size=model.block_size,
            num_device_blocks=model.num_device_blocks,
            num_host_blocks=model.num_host_blocks,
            bytes_per_block=model.bytes_per_block,
            num_groups=max(1, len(model.kv_groups)),
            groups=kv_groups_to_wire(model.kv_groups),
            state=state_to_wire(model.pages_per_state),
        ),
        limits=execution_pb2.ExecutorLimits(
            num_slots=model.num_slots,
            max_num_seqs=model.max_num_seqs,
            max_num_batched_tokens=model.max_num_batched_tokens,
            max_logprobs=model.max_logprobs,
            max_inflight_plans=model.max_inflight_plans,
            max_drafts=model.max_drafts,
            adaptive_drafts=model.adaptive_drafts,
            max_loras=model.max_loras,
            max_cpu_loras=model.max_cpu_loras,
        ),
        features=[feature for feature, has_it in features.items() if has_it],
        fingerprint=types_pb2.NumericsFingerprint.FromString(model.fingerprint),
        device=model.device,
    )
