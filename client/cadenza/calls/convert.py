"""Converts client objects to their wire form and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from cadenza.chats import ChatMessage, ChatOptions
from cadenza.info import (
    AdapterUse,
    AddedToken,
    ChatExamples,
    DeviceMemory,
    ExecutorInfo,
    FaultCount,
    ModelInfo,
    ServerInfo,
    ServerLoad,
    TenantInfo,
)
from cadenza.outputs import CompletionOutput, FinishReason, Logprob, LogprobRow, RequestMetrics, RequestOutput
from cadenza.prompts import CallOptions, Prompt
from cadenza.sampling_params import SamplingParams
from cadenza.structured_outputs import StructuredOutputsParams
from cadenza.v1 import generation_pb2, types_pb2
from cadenza_common.telemetry.trace_context import current_traceparent

_DEFAULTS = SamplingParams()
_DEFAULT_OPTIONS = CallOptions()
_LISTS = "stop stop_token_ids allowed_token_ids bad_words".split()
_OF_THEIR_OWN = (*_LISTS, "max_tokens", "logit_bias", "early_stopping", "structured_outputs")
# For these fields absent means the default. max_tokens is not among them: absent means no limit.
_SCALARS = [each.name for each in fields(SamplingParams) if each.name not in _OF_THEIR_OWN]
_EARLY_STOPPING = {
    True: types_pb2.EARLY_STOPPING_TRUE,
    "never": types_pb2.EARLY_STOPPING_NEVER,
}
_FINISH_REASONS: dict[int, FinishReason] = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_ABORT: "abort",
    types_pb2.FINISH_REASON_ERROR: "error",
}


def params_to_proto(params: SamplingParams) -> types_pb2.SamplingParams:
    """Return the wire form, in which only fields that differ from the server's defaults are set."""
    message = types_pb2.SamplingParams()
    for name in _SCALARS:
        value = getattr(params, name)
        if value != getattr(_DEFAULTS, name):
            setattr(message, name, value)
    for name in _LISTS:
        getattr(message, name).extend(getattr(params, name) or ())
    if params.max_tokens is not None:
        message.max_tokens = params.max_tokens
    for token_id, bias in (params.logit_bias or {}).items():
        message.logit_bias[token_id] = bias
    if params.early_stopping:
        message.early_stopping = _EARLY_STOPPING[params.early_stopping]
    if params.structured_outputs is not None:
        message.grammar.CopyFrom(_grammar(params.structured_outputs))
    return message


def _grammar(params: StructuredOutputsParams) -> types_pb2.GrammarSpec:
    message = types_pb2.GrammarSpec(
        disable_any_whitespace=params.disable_any_whitespace,
        disable_additional_properties=params.disable_additional_properties,
        whitespace_pattern=params.whitespace_pattern or "",
        start_after_token_ids=params.start_after_token_ids,
    )
    if isinstance(params.json, str):
        message.json_schema = params.json
    if params.regex is not None:
        message.regex = params.regex
    if params.grammar is not None:
        message.grammar = params.grammar
    if params.json_object is not None:
        message.json_object = params.json_object
    if isinstance(params.structural_tag, str):
        message.structural_tag = params.structural_tag
    if params.choice is not None:
        message.choices.values.extend(params.choice)
    return message


def prompt_to_proto(prompt: Prompt) -> types_pb2.PromptPart:
    """Return the prompt as a single prompt part."""
    if prompt.token_ids is not None:
        return types_pb2.PromptPart(tokens=types_pb2.TokenIds(ids=prompt.token_ids))
    if prompt.messages is not None:
        return types_pb2.PromptPart(chat=_chat(prompt.messages, prompt.chat))
    return types_pb2.PromptPart(text=prompt.text or "")


def _chat(messages: Sequence[ChatMessage], options: ChatOptions | None) -> types_pb2.Chat:
    chat = types_pb2.Chat(messages=[_chat_message(each) for each in messages])
    if options is not None:
        chat.add_generation_prompt = options.add_generation_prompt
        chat.continue_final_message = options.continue_final_message
        chat.tools.extend(options.tools)
        chat.documents.extend(options.documents)
        chat.template_kwargs = options.chat_template_kwargs
        chat.template = options.chat_template
    return chat


def _chat_message(message: ChatMessage) -> types_pb2.ChatMessage:
    return types_pb2.ChatMessage(
        role=message.role,
        content=message.content,
        tool_calls=[
            types_pb2.ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in message.tool_calls
        ],
        tool_call_id=message.tool_call_id,
        name=message.name,
        reasoning_content=message.reasoning_content,
    )


def request_to_proto(
    request_id: str,
    prompt: Prompt,
    params: SamplingParams,
    *,
    final_only: bool,
    options: CallOptions = _DEFAULT_OPTIONS,
    adapter: str = "",
    resume_grace_s: float = 0.0,
    with_text_ends: bool = False,
) -> generation_pb2.GenerateRequest:
    """Return a new request; with `final_only` the server sends one response per sample instead of deltas.

    `with_text_ends`: outputs say where the text of each token ends.
    """
    return generation_pb2.GenerateRequest(
        request_id=request_id,
        prompt=[prompt_to_proto(prompt)],
        sampling_params=params_to_proto(params),
        output_mode=generation_pb2.OUTPUT_MODE_FINAL if final_only else generation_pb2.OUTPUT_MODE_DELTA,
        # Token ids that the client sent need not be returned, unless the server may truncate them.
        return_prompt_token_ids=prompt.token_ids is None or params.truncate_prompt_tokens is not None,
        return_text_ends=with_text_ends,
        cache_salt=(prompt.cache_salt or "").encode(),
        enable_prefix_caching=None if options.enable_prefix_caching else False,
        speculation=_speculation(options.speculation),
        adapter=adapter,
        resume_grace_s=resume_grace_s or None,
        traceparent=current_traceparent(),
    )


def _speculation(num_draft_tokens: int | None) -> generation_pb2.SpeculationParams | None:
    """A limit of 0 is sent too: it differs from none."""
    if num_draft_tokens is None:
        return None
    return generation_pb2.SpeculationParams(num_draft_tokens=int(num_draft_tokens))


def delta_from_proto(response: generation_pb2.GenerateResponse, prompt_token_ids: list[int] | None) -> RequestOutput:
    """Return the contents of one response; stats mark the end of the request.

    `prompt_token_ids`: the prompt's token ids if already known; the wire form of prompt logprobs does not include them.
    """
    output = RequestOutput(response.request_id)
    if response.HasField("info"):
        output.seed = response.info.seed
        if response.info.prompt_token_ids:
            output.prompt_token_ids = list(response.info.prompt_token_ids)
    if response.HasField("prompt_logprobs"):
        start, columns = response.prompt_logprobs_start, response.prompt_logprobs
        known = output.prompt_token_ids or prompt_token_ids or []
        rows = _rows(columns, known[start : start + len(columns.chosen_logprobs)])
        # The first prompt token has no logprobs; its place holds None, as in vLLM.
        output.prompt_logprobs = [None, *rows] if start == 1 else list(rows)
    if response.HasField("stats"):
        output.finished = True
        output.metrics = _metrics(response.stats)
        output.num_cached_tokens = response.stats.num_cached_tokens
    output.outputs = [_sample(sample) for sample in response.outputs]
    return output


def model_info_from_proto(message: generation_pb2.GetModelInfoResponse) -> ModelInfo:
    """Return the model's description."""
    return ModelInfo(
        model=message.model,
        architecture=message.architecture,
        model_type=message.model_type,
        vocab_size=message.vocab_size,
        max_model_len=message.max_model_len,
        dtype=message.dtype,
        eos_token_ids=list(message.eos_token_ids),
        bos_token_id=message.bos_token_id if message.HasField("bos_token_id") else None,
        has_tokenizer=message.has_tokenizer,
        has_chat_template=message.has_chat_template,
        num_parameters=message.num_parameters,
        exact_numerics=message.fingerprint.mode == types_pb2.NUMERICS_MODE_EXACT,
        fingerprint=message.fingerprint.digest,
        chat_template=message.chat_template,
        added_tokens=[AddedToken(each.id, each.text, each.special) for each in message.added_tokens],
        default_sampling={field.name: value for field, value in message.default_sampling.ListFields()},
        chat_examples=_examples(message.chat_examples) if message.HasField("chat_examples") else None,
    )


def _examples(message: generation_pb2.ChatExamples) -> ChatExamples:
    return ChatExamples(message.prompt, message.call, message.calls, message.thought, message.thought_and_call)


def server_info_from_proto(message: generation_pb2.GetServerInfoResponse) -> ServerInfo:
    """Return the server's options and state."""
    return ServerInfo(
        version=message.version,
        protocol_version=message.protocol_version,
        options=dict(message.options),
        load=ServerLoad(**_same_names(ServerLoad, message.load)),
        executors=[_executor(executor) for executor in message.executors],
        uptime_s=message.uptime_s,
        draining=message.draining,
        resident_bytes=message.resident_bytes,
        tenants=[TenantInfo(**_same_names(TenantInfo, tenant)) for tenant in message.tenants],
        faults=[_fault(fault) for fault in message.faults],
        adapters=[AdapterUse(**_same_names(AdapterUse, use)) for use in message.adapters],
    )


def _executor(message: generation_pb2.ExecutorInfo) -> ExecutorInfo:
    memory = tuple(DeviceMemory(**_same_names(DeviceMemory, part)) for part in message.memory)
    return ExecutorInfo(**_same_names(ExecutorInfo, message) | {"memory": memory})


def _fault(message: generation_pb2.FaultCount) -> FaultCount:
    known = message.kind in generation_pb2.FaultKind.values()
    name = generation_pb2.FaultKind.Name(message.kind) if known else f"fault {message.kind}"
    kind = name.removeprefix("FAULT_KIND_").lower()
    return FaultCount(kind, message.count, message.last_age_s, message.last_executor)


def _same_names(kind: Any, message: Any) -> dict[str, Any]:
    """Fields by name; repeated ones as tuples."""
    values = ((field.name, getattr(message, field.name)) for field in fields(kind))
    return {name: value if isinstance(value, (int, float, str, bytes)) else tuple(value) for name, value in values}


def _sample(message: generation_pb2.SampleOutput) -> CompletionOutput:
    sample = CompletionOutput(message.sample_index, message.text, list(message.token_ids))
    sample.text_ends = list(message.text_ends)
    if message.HasField("logprobs"):
        sample.logprobs = _rows(message.logprobs, sample.token_ids)
    if message.HasField("cumulative_logprob"):
        sample.cumulative_logprob = message.cumulative_logprob
    if message.HasField("finish"):
        finish = message.finish
        sample.finish_reason = _FINISH_REASONS.get(finish.reason, "error")
        detail = types_pb2.FinishDetail.Name(finish.detail) if finish.detail else ""
        sample.finish_detail = detail.removeprefix("FINISH_DETAIL_").lower() or None
        kind = finish.WhichOneof("stop_reason")
        sample.stop_reason = getattr(finish, kind) if kind else None
    return sample


def _rows(columns: types_pb2.LogprobColumns, token_ids: list[int]) -> list[LogprobRow]:
    """Return one row per token: the chosen token, then the top ones; a token is in a row once, as in vLLM."""
    rows: list[LogprobRow] = []
    width = columns.num_top
    for index, (token_id, logprob) in enumerate(zip(token_ids, columns.chosen_logprobs, strict=True)):
        text = columns.chosen_tokens[index] if columns.chosen_tokens else None
        rank_of_chosen = columns.chosen_ranks[index] if columns.chosen_ranks else None
        raw = columns.chosen_bytes[index] if columns.chosen_bytes else b""
        row = {token_id: Logprob(logprob, rank_of_chosen, text, raw or None)}
        for rank, place in enumerate(range(index * width, (index + 1) * width), start=1):
            top_text = columns.top_tokens[place] if columns.top_tokens else None
            raw = columns.top_bytes[place] if columns.top_bytes else b""
            top = Logprob(columns.top_logprobs[place], rank, top_text, raw or None)
            row.setdefault(columns.top_token_ids[place], top)
        rows.append(row)
    return rows


def _metrics(stats: generation_pb2.RequestStats) -> RequestMetrics:
    return RequestMetrics(
        num_prompt_tokens=stats.num_prompt_tokens,
        num_cached_tokens=stats.num_cached_tokens,
        num_completion_tokens=stats.num_completion_tokens,
        num_preemptions=stats.num_preemptions,
        queue_s=stats.queue_ns / 1e9,
        first_token_s=stats.first_token_ns / 1e9,
        total_s=stats.total_ns / 1e9,
    )
