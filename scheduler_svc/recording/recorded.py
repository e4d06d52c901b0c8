"""planlog.proto: converts the core's requests and executors to their wire form and back."""

from __future__ import annotations

from dataclasses import replace

from cadenza.v1 import execution_pb2, types_pb2
from cadenza.v1 import planlog_pb2 as pb
from cadenza_common.plan.sampling import Grammar
from cadenza_common.plan_wire.sampling import sampling_from_wire, sampling_to_wire
from scheduler_svc.core.adapters.events import (
    AdapterDue,
    AdapterEvent,
    AdapterLoaded,
    AdapterRegistered,
    AdapterRemoved,
    AdapterUnloaded,
)
from scheduler_svc.core.types import BeamSpec, ExecutorSpec, RequestSpec, SessionEnd
from scheduler_svc.executors import adapters
from scheduler_svc.executors.convert import kv_groups_from_wire, kv_groups_to_wire

_STOPPING = {
    True: types_pb2.EARLY_STOPPING_TRUE,
    False: types_pb2.EARLY_STOPPING_FALSE,
    None: types_pb2.EARLY_STOPPING_NEVER,
}
_EARLY_STOPPING = {number: value for value, number in _STOPPING.items()}


def executor_message(spec: ExecutorSpec) -> pb.RecordedExecutor:
    """Return the wire form of an executor's capacity."""
    return pb.RecordedExecutor(
        block_size=spec.block_size,
        num_blocks=spec.num_blocks,
        num_host_blocks=spec.num_host_blocks,
        num_slots=spec.num_slots,
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=spec.max_num_batched_tokens,
        max_model_len=spec.max_model_len,
        watermark=spec.watermark,
        shares_prefixes=spec.shares_prefixes,
        numerics=spec.numerics,
        lacks=sorted(spec.lacks),
        max_drafts=spec.max_drafts,
        adaptive_drafts=spec.adaptive_drafts,
        max_loras=spec.max_loras,
        max_cpu_loras=spec.max_cpu_loras,
        grammar_engine=spec.grammar_engine,
        kv_groups=kv_groups_to_wire(spec.kv_groups),
        pages_per_state=spec.pages_per_state,
    )


def executor_spec(message: pb.RecordedExecutor) -> ExecutorSpec:
    """Return an executor's capacity from the log."""
    return ExecutorSpec(
        block_size=message.block_size,
        num_blocks=message.num_blocks,
        num_host_blocks=message.num_host_blocks,
        num_slots=message.num_slots,
        max_num_seqs=message.max_num_seqs,
        max_num_batched_tokens=message.max_num_batched_tokens,
        max_model_len=message.max_model_len,
        watermark=message.watermark,
        shares_prefixes=message.shares_prefixes,
        numerics=message.numerics,
        lacks=frozenset(message.lacks),
        max_drafts=message.max_drafts,
        adaptive_drafts=message.adaptive_drafts,
        max_loras=message.max_loras,
        max_cpu_loras=message.max_cpu_loras,
        grammar_engine=message.grammar_engine,
        kv_groups=kv_groups_from_wire(message.kv_groups),
        pages_per_state=message.pages_per_state,
    )


def request_message(spec: RequestSpec) -> pb.RecordedRequest:
    """Return the wire form of a complete request."""
    grammar = spec.sampling.grammar
    return pb.RecordedRequest(
        request_id=spec.request_id,
        tenant=spec.tenant,
        prompt_token_ids=spec.prompt_token_ids,
        sampling=sampling_to_wire(spec.sampling),
        max_tokens=spec.max_tokens,
        eos_token_ids=sorted(spec.eos_token_ids),
        num_samples=spec.num_samples,
        beams=None if spec.beams is None else _beams_message(spec.beams),
        cache_salt=spec.cache_salt,
        shared_prefixes=spec.shared_prefixes,
        uses_prefix_cache=spec.uses_prefix_cache,
        priority=spec.priority,
        expected_output_tokens=spec.expected_output_tokens,
        max_drafts=spec.max_drafts,
        adapter_index=spec.adapter_index,
        adapter_hash=spec.adapter_hash,
        known_outputs=[types_pb2.TokenIds(ids=output) for output in spec.known_outputs],
        grammar=None if grammar is None else types_pb2.GrammarSpec.FromString(grammar.spec),
        grammar_engine=b"" if grammar is None else grammar.engine,
    )


def request_spec(message: pb.RecordedRequest) -> RequestSpec:
    """Return a request from the log."""
    return RequestSpec(
        request_id=message.request_id,
        tenant=message.tenant,
        prompt_token_ids=tuple(message.prompt_token_ids),
        sampling=replace(sampling_from_wire(message.sampling), grammar=_grammar(message)),
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        eos_token_ids=frozenset(message.eos_token_ids),
        num_samples=message.num_samples,
        beams=_beams(message.beams) if message.HasField("beams") else None,
        cache_salt=message.cache_salt,
        shared_prefixes=message.shared_prefixes,
        uses_prefix_cache=message.uses_prefix_cache,
        priority=message.priority,
        expected_output_tokens=message.expected_output_tokens if message.HasField("expected_output_tokens") else None,
        max_drafts=message.max_drafts if message.HasField("max_drafts") else None,
        adapter_index=message.adapter_index,
        adapter_hash=message.adapter_hash,
        known_outputs=tuple(tuple(output.ids) for output in message.known_outputs),
    )


def event_message(event: AdapterEvent, executor_id: int) -> pb.AdapterEventCall:
    """Return the wire form of an event of an adapter."""
    match event:
        case AdapterRegistered():
            return pb.AdapterEventCall(registered=adapters.load_message(event), wanted=event.wanted)
        case AdapterRemoved():
            return pb.AdapterEventCall(removed=execution_pb2.UnloadAdapter(adapter_index=event.index))
        case AdapterDue():
            return pb.AdapterEventCall(due=event.index)
        case AdapterLoaded():
            return pb.AdapterEventCall(executor_id=executor_id, loaded=adapters.loaded_message(event))
        case AdapterUnloaded():
            unloaded = execution_pb2.AdapterUnloaded(adapter_index=event.index)
            return pb.AdapterEventCall(executor_id=executor_id, unloaded=unloaded)


def adapter_event(message: pb.AdapterEventCall) -> AdapterEvent:
    """Return an event from the log."""
    match message.WhichOneof("event"):
        case "registered":
            return replace(adapters.registered_adapter(message.registered), wanted=message.wanted)
        case "removed":
            return AdapterRemoved(message.removed.adapter_index)
        case "due":
            return AdapterDue(message.due)
        case "loaded":
            return adapters.loaded_adapter(message.loaded)
        case _:
            return adapters.unloaded_adapter(message.unloaded)


def session_end(message: pb.ExecutorLostCall) -> SessionEnd | None:
    """Return what was known about the end of a session; None in logs of earlier versions."""
    if not message.HasField("end"):
        return None
    return SessionEnd(message.end.begun_step_id, message.end.failed_step_id, message.end.executor_stopped)


def _grammar(message: pb.RecordedRequest) -> Grammar | None:
    if not message.HasField("grammar"):
        return None
    return Grammar(message.grammar.SerializeToString(deterministic=True), message.grammar_engine)


def _beams_message(beams: BeamSpec) -> pb.RecordedBeams:
    return pb.RecordedBeams(
        width=beams.width, length_penalty=beams.length_penalty, early_stopping=_STOPPING[beams.early_stopping]
    )


def _beams(message: pb.RecordedBeams) -> BeamSpec:
    return BeamSpec(message.width, message.length_penalty, _EARLY_STOPPING[message.early_stopping])
