"""execution.proto: converts descriptions from the wire form; `cadenza_common.plan_wire` has plans and results."""

from __future__ import annotations

from collections.abc import Iterable

from cadenza.v1 import execution_pb2 as pb
from cadenza.v1 import types_pb2
from cadenza_common.grammar.table import GrammarEngine
from cadenza_common.plan.errors import ProtocolError
from cadenza_common.serving.memory_parts import memory_from_wire
from scheduler_svc.core.kv_groups import KVGroup
from scheduler_svc.plan_loop.ports import ModelDescription

_DIGEST_DIGITS = 12
"""Hexadecimal digits of a digest in a message: enough to see that two differ."""


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
        kv_groups=kv_groups_from_wire(kv.groups),
        pages_per_state=_pages_per_state(kv),
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
        media_token_ids=frozenset(message.media_token_ids),
        default_sampling=message.default_sampling.SerializeToString(),
        memory=tuple(map(memory_from_wire, message.memory)),
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


def kv_groups_from_wire(messages: Iterable[pb.KvGroup]) -> tuple[KVGroup, ...]:
    """Return KV groups; raises ProtocolError for what no executor has."""
    groups = tuple(
        KVGroup(index, message.window or None, message.pages_per_block) for index, message in enumerate(messages)
    )
    if any(group.pages_per_block < 1 for group in groups):
        raise ProtocolError("the executor's description has a KV group with pages_per_block 0")
    if any(group.window is None for group in groups[1:]):
        raise ProtocolError("the executor's description has a KV group without a window that is not the first")
    return groups


def kv_groups_to_wire(groups: Iterable[KVGroup]) -> list[pb.KvGroup]:
    """Return the wire form of KV groups."""
    return [pb.KvGroup(window=group.window or 0, pages_per_block=group.pages_per_block) for group in groups]


def _pages_per_state(message: pb.KvGeometry) -> int:
    """Return the pages of a state, 0 without one; raises ProtocolError for a state of no pages."""
    if message.HasField("state") and not message.state.pages_per_state:
        raise ProtocolError("the executor's description has a state with pages_per_state 0")
    return message.state.pages_per_state


def state_to_wire(pages_per_state: int) -> pb.StateGeometry | None:
    """Return the wire form of a state's size; None: there is no state."""
    return pb.StateGeometry(pages_per_state=pages_per_state) if pages_per_state else None


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
