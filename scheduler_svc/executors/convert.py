"""execution.proto: converts plans to the wire form, and descriptions from it; `results` converts results."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from cadenza.v1 import execution_pb2 as pb
from cadenza.v1 import types_pb2
from cadenza_common.grammar.table import GrammarEngine
from cadenza_common.serving.slices import SLICE_ITEMS, Work, run_at_once, slices_of
from scheduler_svc.core.plan import AdmittedSequence, StepPlan
from scheduler_svc.core.types import BlockPairs, Sampling, SamplingValue
from scheduler_svc.plan_loop.ports import ModelDescription

_ALLOWED = "allowed_token_ids"
"""The longest list of the sampling parameters."""
_SEQUENCE_ITEMS = 128
"""The work of describing one sequence, in numbers that take as long: 20 us (measured)."""
_PLAN_ITEMS = 4096
"""As many numbers of the admissions become part of a message before the first pause: making the plan was work too."""
_DIGEST_DIGITS = 12
"""Hexadecimal digits of a digest in a message: enough to see that two differ."""


class ProtocolError(Exception):
    """An executor's message contradicts the protocol."""


def model_description(message: pb.DescribeResponse) -> ModelDescription:
    """Return the description from a DescribeResponse; raises ProtocolError for sizes that no executor has."""
    model, kv, limits = message.model, message.kv, message.limits
    _check_sizes(message)
    return ModelDescription(
        name=model.name,
        architecture=model.architecture,
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        dtype=model.dtype,
        num_parameters=model.num_parameters,
        tokenizer=message.tokenizer,
        eos_token_ids=tuple(message.eos_token_ids),
        bos_token_id=message.bos_token_id if message.HasField("bos_token_id") else None,
        block_size=kv.block_size,
        num_device_blocks=kv.num_device_blocks,
        num_host_blocks=kv.num_host_blocks,
        bytes_per_block=kv.bytes_per_block,
        num_slots=limits.num_slots,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_logprobs=limits.max_logprobs,
        max_inflight_plans=limits.max_inflight_plans,
        device=message.device,
        incarnation=message.incarnation,
        fingerprint=message.fingerprint.SerializeToString(),
        is_exact=message.fingerprint.mode == types_pb2.NUMERICS_MODE_EXACT,
        numerics=_numerics(message.fingerprint),
        model_type=model.model_type,
        gives_prompt_logprobs=pb.EXECUTOR_FEATURE_PROMPT_LOGPROBS in message.features,
        has_logits_processors=pb.EXECUTOR_FEATURE_LOGITS_PROCESSORS in message.features,
        can_copy=pb.EXECUTOR_FEATURE_BLOCK_COPY in message.features,
        can_swap=pb.EXECUTOR_FEATURE_SWAP in message.features,
        can_fork=pb.EXECUTOR_FEATURE_SAMPLE_FORK in message.features,
        gives_candidates=pb.EXECUTOR_FEATURE_BEAMS in message.features,
        gives_debug_digest=pb.EXECUTOR_FEATURE_DEBUG_DIGEST in message.features,
        shares_prefixes=pb.EXECUTOR_FEATURE_SHARED_PREFIXES in message.features,
        grammar_engine=_grammar_engine(message),
        max_drafts=limits.max_drafts if pb.EXECUTOR_FEATURE_DRAFTS in message.features else 0,
        adaptive_drafts=limits.adaptive_drafts,
        max_loras=limits.max_loras if pb.EXECUTOR_FEATURE_ADAPTERS in message.features else 0,
        max_cpu_loras=limits.max_cpu_loras if pb.EXECUTOR_FEATURE_ADAPTERS in message.features else 0,
    )


def _grammar_engine(message: pb.DescribeResponse) -> bytes:
    if pb.EXECUTOR_FEATURE_GRAMMAR not in message.features:
        return b""
    return GrammarEngine(message.grammar.library, message.grammar.table_digest).key


def _check_sizes(message: pb.DescribeResponse) -> None:
    for part, names in (
        (message.model, ("vocab_size", "max_model_len")),
        (message.kv, ("block_size", "num_device_blocks")),
        (message.limits, ("num_slots", "max_num_seqs", "max_num_batched_tokens", "max_inflight_plans")),
    ):
        for name in names:
            if getattr(part, name) < 1:
                raise ProtocolError(f"the executor's description says {name} {getattr(part, name)}")


def _numerics(message: types_pb2.NumericsFingerprint) -> tuple[tuple[str, str], ...]:
    """Return the parts of a fingerprint for a message: names and values."""
    known = message.mode in types_pb2.NumericsMode.values()
    mode = types_pb2.NumericsMode.Name(message.mode) if known else str(message.mode)
    return (
        ("mode", mode.removeprefix("NUMERICS_MODE_").lower()),
        ("weights", message.weights_digest.hex()[:_DIGEST_DIGITS]),
        ("dtype", message.dtype),
        ("kv_dtype", message.kv_dtype),
        ("kernels", message.kernels),
        ("isa", message.isa),
        ("threads", str(message.num_threads)),
        ("versions", ", ".join(message.versions)),
        # Last: it covers the fields of config.json that no other part shows.
        ("digest", message.digest.hex()[:_DIGEST_DIGITS]),
    )


def step_plan(plan: StepPlan, epoch: int) -> pb.StepPlan:
    """Return a plan's wire form; unchanged parts are omitted, so a decode-only step takes a few bytes."""
    return run_at_once(request_in_slices(plan, epoch)).plan


def request_in_slices(plan: StepPlan, epoch: int) -> Work[pb.ExecuteRequest]:
    """Return the message of a plan, with a pause after each slice of its admissions.

    It is filled in place: protobuf would copy each part of a message that it is put together from.
    """
    request = pb.ExecuteRequest()
    _fill_without_admissions(request.plan, plan, epoch)
    admitted = request.plan.admitted
    num_items, most = 0, _PLAN_ITEMS
    for sequence in plan.admitted:
        size = _num_items(sequence)
        if num_items + size > most:
            yield
            num_items, most = 0, SLICE_ITEMS
        num_items += size
        message = admitted.add()
        if size <= SLICE_ITEMS:
            message.token_ids.extend(sequence.token_ids)
            _fill_admitted(message, sequence)
            continue
        yield from _extend(message.token_ids, sequence.token_ids)
        _fill_admitted(message, sequence, with_allowed_ids=False)
        yield from _extend(message.sampling.allowed_token_ids, _allowed_ids(sequence.sampling))
    return request


def _extend(field: Any, values: tuple[int, ...]) -> Work[None]:
    """Append to a repeated field, with a pause after each slice of a long list."""
    for part in slices_of(values):
        field.extend(part)
        if len(values) > SLICE_ITEMS:
            yield


def _allowed_ids(sampling: Sampling) -> Any:
    return sampling.values.get(_ALLOWED, ())


def _num_items(sequence: AdmittedSequence) -> int:
    """The work of describing a sequence, in numbers that take as long."""
    num_items = _SEQUENCE_ITEMS + len(sequence.token_ids) + len(sequence.block_ids) + sequence.sampling.num_values
    return num_items if sequence.source is None else num_items - sequence.source.num_blocks


def _fill_without_admissions(message: pb.StepPlan, plan: StepPlan, epoch: int) -> None:
    """Fill in what is there: a decode step has little more than its id."""
    message.step_id, message.epoch = plan.step_id, epoch
    if plan.released_slots:
        message.released_slots.extend(plan.released_slots)
    if plan.held_slots:
        message.held_slots.extend(plan.held_slots)
    if plan.resumed_slots:
        message.resumed_slots.extend(plan.resumed_slots)
    message.decode_ready, message.debug_digest = plan.decode_ready, plan.debug_digest
    message.announces_start = plan.announces_start
    if plan.max_drafts:
        message.max_drafts = plan.max_drafts
    if plan.swapped_out:
        message.swap_out.append(_moves(plan.swapped_out))
    if plan.copied:
        message.copies.append(_moves(plan.copied))
    if plan.swapped_in:
        message.swap_in.append(_moves(plan.swapped_in))
    if plan.append_slots:
        message.appends.add(slots=plan.append_slots, block_ids=plan.append_block_ids)
    if plan.given_slots:
        message.given.slots.extend(plan.given_slots)
        message.given.token_ids.extend(plan.given_token_ids)
    if plan.scheduled_slots:
        message.scheduled.slots.extend(plan.scheduled_slots)
        message.scheduled.num_tokens.extend(plan.scheduled_num_tokens)
        message.scheduled.samples.extend(plan.scheduled_samples)
    if plan.fork_slots:
        message.forks.source_slots.extend(plan.fork_source_slots)
        message.forks.slots.extend(plan.fork_slots)


def _moves(pairs: BlockPairs) -> pb.BlockMoves:
    sources, destinations = zip(*pairs, strict=True)
    return pb.BlockMoves(sources=sources, destinations=destinations)


def _fill_admitted(message: pb.AdmittedSequence, sequence: AdmittedSequence, *, with_allowed_ids: bool = True) -> None:
    """Fill in all but the token ids; what is 0 or false stays absent."""
    source, sampling, block_ids = sequence.source, sequence.sampling, sequence.block_ids
    if source is not None:
        block_ids = block_ids[source.num_blocks :]
        message.source.slot = source.slot
        message.source.num_tokens, message.source.num_blocks = source.num_tokens, source.num_blocks
    message.slot = sequence.slot
    message.num_prompt_tokens = sequence.num_prompt_tokens
    if sequence.num_computed_tokens:
        message.num_computed_tokens = sequence.num_computed_tokens
    message.block_tables.add().block_ids.extend(block_ids)
    if not with_allowed_ids and _allowed_ids(sampling):
        values = {name: value for name, value in sampling.values.items() if name != _ALLOWED}
        sampling = dataclasses.replace(sampling, values=values)
    _fill_sampling(message.sampling, sampling, sequence.sample_index)
    if sampling.grammar is not None and source is None:
        message.grammar.ParseFromString(sampling.grammar.spec)
    if sequence.grammar_turn:
        message.grammar_turn = sequence.grammar_turn
    if sequence.held:
        message.held = True
    if sequence.adapter_index:
        message.adapter_index = sequence.adapter_index
    if sequence.max_drafts:
        message.max_drafts, message.max_len = sequence.max_drafts, sequence.max_len
        message.draft_scope = sequence.draft_scope


def sequence_sampling(sampling: Sampling, sample_index: int) -> types_pb2.SequenceSampling:
    """Return the wire form of one sequence's sampling parameters."""
    message = types_pb2.SequenceSampling()
    _fill_sampling(message, sampling, sample_index)
    return message


def _fill_sampling(message: types_pb2.SequenceSampling, sampling: Sampling, sample_index: int) -> None:
    """Fill an empty message. Assigning the seed makes a part of another message present, even if all is zero."""
    message.seed = sampling.seed
    if sample_index:
        message.sample_index = sample_index
    if sampling.stop_token_ids:
        message.stop_token_ids.extend(sampling.stop_token_ids)
    if sampling.min_tokens:
        message.min_tokens = sampling.min_tokens
    if sampling.num_logprobs is not None:
        message.num_logprobs = sampling.num_logprobs
    if sampling.num_prompt_logprobs is not None:
        message.num_prompt_logprobs = sampling.num_prompt_logprobs
    if sampling.num_candidates:
        message.num_candidates = sampling.num_candidates
    for name, value in sampling.values.items():
        if isinstance(value, tuple):
            getattr(message, name).extend(_wire_values(value))
        else:
            setattr(message, name, value)


def sampling_from_wire(message: types_pb2.SequenceSampling) -> Sampling:
    """Reverse `sequence_sampling`, without the sample index; numbers have the precision of the wire."""
    return Sampling(
        seed=message.seed,
        stop_token_ids=tuple(message.stop_token_ids),
        min_tokens=message.min_tokens,
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
        num_prompt_logprobs=message.num_prompt_logprobs if message.HasField("num_prompt_logprobs") else None,
        num_candidates=message.num_candidates,
        values={
            field.name: _plain_value(value) for field, value in message.ListFields() if field.name not in _READ_BY_CORE
        },
    )


_READ_BY_CORE = frozenset({each.name for each in dataclasses.fields(Sampling)} | {"sample_index"})


def _wire_values(values: tuple[Any, ...]) -> Iterable[Any]:
    """Return the wire form of a list: a list of words is a list of messages."""
    return [types_pb2.TokenIds(ids=each) if isinstance(each, tuple) else each for each in values]


def _plain_value(value: Any) -> SamplingValue:
    if isinstance(value, int | float):
        return value
    return tuple(tuple(each.ids) if isinstance(each, types_pb2.TokenIds) else each for each in value)
