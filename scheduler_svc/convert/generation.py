"""generation.proto: converts requests to plain fields, and chunks of output to responses."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any

from cadenza.v1 import generation_pb2 as pb
from cadenza.v1 import types_pb2
from cadenza_common.plan.result import LogprobColumns, TokenLogprobs
from cadenza_common.serving.memory_parts import memory_to_wire
from cadenza_common.serving.slices import Work, run_at_once, to_list
from scheduler_svc.convert.request_parts import chat_fields, grammar_fields, grammar_without_eos
from scheduler_svc.core.types import Finish, FinishDetail
from scheduler_svc.engine.faults import Faults
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.engine.reader import OutputChunk, SampleChunk
from scheduler_svc.engine.resume_point import ResumePoint, SamplePosition
from scheduler_svc.plan_loop.gauges import Load
from scheduler_svc.plan_loop.ports import ExecutorState, TextStream
from scheduler_svc.requests.fields import OutputMode, PromptFields, RequestFields
from scheduler_svc.requests.sampling_fields import DEFAULTS, FIELD_RULES, EarlyStopping, SamplingFields
from scheduler_svc.tenants.tenant import ONLY_TENANT, Tenant

_OUTPUT_MODES = {
    pb.OUTPUT_MODE_UNSPECIFIED: OutputMode.DELTA,
    pb.OUTPUT_MODE_DELTA: OutputMode.DELTA,
    pb.OUTPUT_MODE_FINAL: OutputMode.FINAL,
}
_EARLY_STOPPING: dict[int, EarlyStopping] = {
    types_pb2.EARLY_STOPPING_UNSPECIFIED: EarlyStopping.FALSE,
    types_pb2.EARLY_STOPPING_FALSE: EarlyStopping.FALSE,
    types_pb2.EARLY_STOPPING_TRUE: EarlyStopping.TRUE,
    types_pb2.EARLY_STOPPING_NEVER: EarlyStopping.NEVER,
}
_REASONS = {
    FinishDetail.EOS: types_pb2.FINISH_REASON_STOP,
    FinishDetail.STOP_TOKEN: types_pb2.FINISH_REASON_STOP,
    FinishDetail.STOP_STRING: types_pb2.FINISH_REASON_STOP,
    FinishDetail.MAX_TOKENS: types_pb2.FINISH_REASON_LENGTH,
    FinishDetail.MAX_MODEL_LEN: types_pb2.FINISH_REASON_LENGTH,
    FinishDetail.KV_CAPACITY: types_pb2.FINISH_REASON_LENGTH,
    FinishDetail.ABORTED: types_pb2.FINISH_REASON_ABORT,
    FinishDetail.DEADLINE: types_pb2.FINISH_REASON_ABORT,
    FinishDetail.NON_FINITE_LOGITS: types_pb2.FINISH_REASON_ERROR,
    FinishDetail.EXECUTOR_ERROR: types_pb2.FINISH_REASON_ERROR,
    FinishDetail.NO_ALLOWED_TOKEN: types_pb2.FINISH_REASON_ERROR,
    FinishDetail.GRAMMAR: types_pb2.FINISH_REASON_ERROR,
}
_TOKEN_LISTS = frozenset({"allowed_token_ids", "stop_token_ids"})
_LONG_BYTES = 64 * 1024
"""A longer request is converted in slices."""
_LONG_BIASES = 1024
_NO_CHARACTER = "\ufffd"
"""What stands in texts for bytes that are no UTF-8."""
_FIELDS_BESIDE_RESUME = frozenset(
    {"request_id", "resume", "output_mode", "return_prompt_token_ids", "return_text_ends", "traceparent"}
)


def request_fields(message: pb.GenerateRequest, tenant: Tenant = ONLY_TENANT) -> RequestFields:
    """Return the fields of a GenerateRequest of this tenant, without checks."""
    return run_at_once(fields_in_slices(message, tenant))


def is_long(message: pb.GenerateRequest) -> bool:
    """Whether `fields_in_slices` would take several slices, or one of over 1 ms."""
    return message.ByteSize() > _LONG_BYTES


def fields_in_slices(message: pb.GenerateRequest, tenant: Tenant = ONLY_TENANT) -> Work[RequestFields]:
    """Return the fields of a tenant's GenerateRequest, without checks: with a pause after each slice of a long one."""
    if is_long(message):
        yield
    starts_at_once = message.starts_at_once
    message.ClearField("starts_at_once")  # no part of the body
    body = message.SerializeToString(deterministic=True)
    if len(body) > _LONG_BYTES:
        yield
    prompt = yield from prompt_in_slices(message.prompt)
    sampling = DEFAULTS
    if message.HasField("sampling_params"):
        sampling = yield from _sampling_in_slices(message.sampling_params)
    return RequestFields(
        request_id=message.request_id,
        tenant=tenant.name,
        shared_prefixes=tenant.shared_prefixes,
        prompt=prompt,
        sampling=sampling,
        timeout_s=message.timeout_s if message.HasField("timeout_s") else None,
        resume_grace_s=message.resume_grace_s if message.HasField("resume_grace_s") else None,
        resume=_resume_point(message.resume) if message.HasField("resume") else None,
        new_request_fields=tuple(
            field.name for field, _ in message.ListFields() if field.name not in _FIELDS_BESIDE_RESUME
        ),
        output_mode=_OUTPUT_MODES.get(message.output_mode),
        return_prompt_token_ids=message.return_prompt_token_ids,
        return_text_ends=message.return_text_ends,
        starts_at_once=starts_at_once,
        cache_salt=message.cache_salt,
        enable_prefix_caching=message.enable_prefix_caching if message.HasField("enable_prefix_caching") else True,
        expected_output_tokens=message.expected_output_tokens if message.HasField("expected_output_tokens") else None,
        num_draft_tokens=message.speculation.num_draft_tokens if message.HasField("speculation") else None,
        traceparent=message.traceparent,
        adapter=message.adapter,
        body=body,
        # An id that the service drew is never sent twice, so its body needs no digest.
        body_digest=_digest(body, message.traceparent) if message.request_id else b"",
    )


def _digest(body: bytes, traceparent: str) -> bytes:
    """SHA-256 of a body without its trace context: a request that is sent again may belong to another span.

    It is the last field but for return_text_ends, in the order of their numbers.
    """
    if traceparent:
        for later in (pb.GenerateRequest(), pb.GenerateRequest(return_text_ends=True)):
            rest = later.SerializeToString()
            later.traceparent = traceparent
            with_trace = later.SerializeToString(deterministic=True)
            if body.endswith(with_trace):
                return hashlib.sha256(body.removesuffix(with_trace) + rest).digest()
    return hashlib.sha256(body).digest()


def fields_from_body(body: bytes, tenant: Tenant = ONLY_TENANT) -> RequestFields:
    """Return the fields of a serialized GenerateRequest of this tenant."""
    return request_fields(pb.GenerateRequest.FromString(body), tenant)


def prompt_in_slices(parts: Iterable[types_pb2.PromptPart]) -> Work[tuple[PromptFields, ...]]:
    """Return the parts of a prompt, with a pause after each slice of a long one."""
    fields = []
    for part in parts:
        if part.WhichOneof("part") == "tokens":
            token_ids = yield from to_list(part.tokens.ids)
            fields.append(PromptFields(token_ids=token_ids))
        else:
            fields.append(_part_fields(part))
    return tuple(fields)


def fill_response(
    message: pb.GenerateResponse, live: LiveRequest, chunk: OutputChunk, *, with_prompt_ids: bool
) -> None:
    """Fill in a chunk of output; the first response includes info, the last one stats."""
    message.request_id = live.request.spec.request_id
    text = live.samples[0].text
    if chunk.prompt_logprobs is not None:
        _fill_prompt_logprobs(message, live, chunk.prompt_logprobs, text)
    for sample in chunk.samples:
        _fill_output(message.outputs.add(), live, sample, text)
    if chunk.is_first:
        prompt = live.request.spec.prompt_token_ids
        message.info.seed = live.request.spec.sampling.seed
        message.info.num_prompt_tokens = len(prompt)
        if with_prompt_ids:
            message.info.prompt_token_ids.extend(prompt)
    if chunk.is_last:
        message.stats.CopyFrom(_stats(live))


_LOAD = {field.name for field in fields(Load)}
_OF_ALL = _LOAD & {field.name for field in pb.SchedulerLoad.DESCRIPTOR.fields}
_OF_ONE = _LOAD & {field.name for field in pb.ExecutorInfo.DESCRIPTOR.fields}
_OF_STATE = {field.name for field in fields(ExecutorState)} & {f.name for f in pb.ExecutorInfo.DESCRIPTOR.fields}
_OF_STATE -= {"memory"}  # of messages


def load(value: Load, *, num_client_tasks: int) -> pb.SchedulerLoad:
    """Return the load of queues and memory."""
    return pb.SchedulerLoad(num_client_tasks=num_client_tasks, **{name: getattr(value, name) for name in _OF_ALL})


def fault_counts(faults: Faults) -> list[pb.FaultCount]:
    """Return the kinds of faults that have occurred, in the order of `FaultKind`."""
    return [
        pb.FaultCount(
            kind=pb.FaultKind.Value(f"FAULT_KIND_{fault.name}"),
            count=each.count,
            last_age_s=faults.last_age_s(fault),
            last_executor=each.last_executor,
        )
        for fault, each in faults
        if each.count
    ]


def executor_info(state: ExecutorState) -> pb.ExecutorInfo:
    """Return the scheduler's state of one executor."""
    own = {name: getattr(state, name) for name in _OF_STATE}
    of_load = {name: getattr(state.load, name) for name in _OF_ONE}
    return pb.ExecutorInfo(**own, **of_load, memory=map(memory_to_wire, state.memory))


def _resume_point(message: pb.ResumePoint) -> ResumePoint:
    return ResumePoint(
        tuple(SamplePosition(each.sample_index, each.token_index, each.finished) for each in message.positions),
        message.prompt_logprobs_start,
    )


def _part_fields(part: types_pb2.PromptPart) -> PromptFields:
    match part.WhichOneof("part"):
        case "text":
            return PromptFields(text=part.text)
        case "chat":
            return PromptFields(chat=chat_fields(part.chat))
        case _:
            return PromptFields()


def _sampling_in_slices(params: types_pb2.SamplingParams) -> Work[SamplingFields]:
    """Return every field that the client has set, by its name in the table; other fields have their defaults."""
    given: dict[str, Any] = {}
    for field, value in params.ListFields():
        if field.name in _TOKEN_LISTS:
            token_ids = yield from to_list(value)
            given[field.name] = tuple(token_ids)
        else:
            given[field.name] = _READERS.get(field.name, _unchanged)(value)
            if field.name == "logit_bias" and len(value) > _LONG_BIASES:
                yield
    if params.ignore_eos and params.HasField("grammar"):
        given["grammar"] = grammar_without_eos(params.grammar)
    known = {name: value for name, value in given.items() if name in FIELD_RULES}
    return SamplingFields(**known, later_fields=tuple(given.keys() - known.keys()))


def _unchanged(value: Any) -> Any:
    """Return a number or a text unchanged, a list as a tuple."""
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


_READERS: dict[str, Callable[[Any], Any]] = {
    "grammar": grammar_fields,
    "logit_bias": lambda biases: tuple(sorted(biases.items())),
    "early_stopping": _EARLY_STOPPING.get,
}


def _fill_output(output: pb.SampleOutput, live: LiveRequest, chunk: SampleChunk, text: TextStream | None) -> None:
    output.sample_index = chunk.sample_index
    output.first_token_index = chunk.first_token_index
    output.token_ids.extend(chunk.token_ids)
    output.text = chunk.text
    output.text_offset = chunk.text_offset
    output.text_ends.extend(chunk.text_ends)
    if chunk.logprobs:
        output.logprobs.CopyFrom(_logprob_columns(chunk.token_ids, chunk.logprobs, text))
    if chunk.finish is not None:
        output.finish.CopyFrom(_finish(chunk.finish))
        cumulative_logprob = live.cumulative_logprob(chunk.sample_index)
        if cumulative_logprob is not None:
            output.cumulative_logprob = cumulative_logprob


def _fill_prompt_logprobs(
    message: pb.GenerateResponse,
    live: LiveRequest,
    logprobs: LogprobColumns,
    text: TextStream | None,
) -> None:
    message.prompt_logprobs_start = logprobs.start
    message.prompt_logprobs.CopyFrom(
        types_pb2.LogprobColumns(
            chosen_logprobs=logprobs.logprobs,
            chosen_ranks=logprobs.ranks,
            num_top=logprobs.num_top,
            top_token_ids=logprobs.top_token_ids,
            top_logprobs=logprobs.top_logprobs,
        )
    )
    token_ids = live.request.spec.prompt_token_ids[logprobs.start : logprobs.end]
    _name_tokens(message.prompt_logprobs, token_ids, logprobs.top_token_ids, text)


def _name_tokens(
    columns: types_pb2.LogprobColumns, token_ids: Sequence[int], top_ids: Sequence[int], text: TextStream | None
) -> None:
    """Add the tokens' texts, and the bytes of those that have no text of their own."""
    if text is None:
        return
    columns.chosen_tokens.extend(map(text.token_text, token_ids))
    columns.top_tokens.extend(map(text.token_text, top_ids))
    if any(_NO_CHARACTER in each for each in columns.chosen_tokens):
        columns.chosen_bytes.extend(map(text.token_bytes, token_ids))
    if any(_NO_CHARACTER in each for each in columns.top_tokens):
        columns.top_bytes.extend(map(text.token_bytes, top_ids))


def _logprob_columns(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], text: TextStream | None
) -> types_pb2.LogprobColumns:
    top_ids = [token_id for entry in logprobs for token_id in entry.top_token_ids]
    columns = types_pb2.LogprobColumns(
        chosen_logprobs=[entry.logprob for entry in logprobs],
        chosen_ranks=[entry.rank for entry in logprobs],
        num_top=len(logprobs[0].top_token_ids),
        top_token_ids=top_ids,
        top_logprobs=[logprob for entry in logprobs for logprob in entry.top_logprobs],
    )
    _name_tokens(columns, token_ids, top_ids, text)
    return columns


def _finish(finish: Finish) -> types_pb2.Finish:
    message = types_pb2.Finish(reason=_REASONS[finish.detail], detail=types_pb2.FinishDetail.ValueType(finish.detail))
    if finish.detail is FinishDetail.STOP_TOKEN and finish.stop_token_id is not None:
        message.stop_token_id = finish.stop_token_id
    elif finish.detail is FinishDetail.STOP_STRING and finish.stop_string is not None:
        message.stop_string = finish.stop_string
    return message


def _stats(live: LiveRequest) -> pb.RequestStats:
    times, counts = live.times, live.counts

    def since_arrival(moment_ns: int) -> int:
        return max(0, moment_ns - times.arrival_ns) if moment_ns else 0

    return pb.RequestStats(
        num_prompt_tokens=len(live.request.spec.prompt_token_ids),
        num_cached_tokens=counts.num_cached_tokens,
        num_completion_tokens=live.num_completion_tokens,
        num_preemptions=counts.num_preemptions,
        queue_ns=since_arrival(times.first_plan_ns),
        first_token_ns=since_arrival(times.first_token_ns),
        total_ns=since_arrival(times.end_ns),
    )
