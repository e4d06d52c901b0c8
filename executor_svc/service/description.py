"""Converts the description of an executor to its wire form."""

from __future__ import annotations

from cadenza.v1 import execution_pb2 as pb
from cadenza.v1 import types_pb2
from cadenza_common.grammar.table import GrammarEngine
from cadenza_common.serving.memory_parts import memory_to_wire
from executor_svc.plan.description import Description, Fingerprint, ModelGeometry
from executor_svc.plan.limits import Limits


def description_to_wire(description: Description) -> pb.DescribeResponse:
    """Return the wire form of the description."""
    loaded, limits = description.loaded, description.limits
    return pb.DescribeResponse(
        protocol_version=description.protocol_version,
        incarnation=description.incarnation,
        model=_model(loaded.geometry),
        tokenizer=loaded.tokenizer,
        eos_token_ids=loaded.eos_token_ids,
        bos_token_id=loaded.bos_token_id,
        kv=pb.KvGeometry(
            block_size=limits.block_size,
            num_device_blocks=limits.num_device_blocks,
            num_host_blocks=limits.num_host_blocks,
            bytes_per_block=description.bytes_per_block,
            dtype=description.fingerprint.kv_dtype,
            num_groups=max(1, len(limits.kv_groups)),
            groups=[
                pb.KvGroup(window=group.window, pages_per_block=group.pages_per_block) for group in limits.kv_groups
            ],
            state=pb.StateGeometry(pages_per_state=limits.pages_per_state) if limits.pages_per_state else None,
        ),
        limits=_limits(limits),
        features=sorted(_features(description)),
        fingerprint=_fingerprint(description.fingerprint),
        device=description.device,
        version=description.version,
        grammar=_grammar(description.grammar),
        media_token_ids=loaded.media_token_ids,
        default_sampling=types_pb2.SamplingParams(**description.default_sampling),  # type: ignore[arg-type]
        memory=map(memory_to_wire, description.memory),
    )


def _features(description: Description) -> list[pb.ExecutorFeature.ValueType]:
    limits = description.limits
    features = [
        pb.EXECUTOR_FEATURE_LOGPROBS,
        pb.EXECUTOR_FEATURE_PROMPT_LOGPROBS,
        pb.EXECUTOR_FEATURE_LOGITS_PROCESSORS,
        pb.EXECUTOR_FEATURE_BLOCK_COPY,
        pb.EXECUTOR_FEATURE_SAMPLE_FORK,
        pb.EXECUTOR_FEATURE_BEAMS,
        pb.EXECUTOR_FEATURE_DEBUG_DIGEST,
    ]
    if limits.max_drafts:
        features.append(pb.EXECUTOR_FEATURE_DRAFTS)
    if limits.max_loras:
        features.append(pb.EXECUTOR_FEATURE_ADAPTERS)
    if description.grammar is not None:
        features.append(pb.EXECUTOR_FEATURE_GRAMMAR)
    if limits.num_host_blocks:
        features.append(pb.EXECUTOR_FEATURE_SWAP)
    if description.shares_prefixes:
        features.append(pb.EXECUTOR_FEATURE_SHARED_PREFIXES)
    return features


def _model(geometry: ModelGeometry) -> pb.ModelGeometry:
    return pb.ModelGeometry(
        name=geometry.name,
        architecture=geometry.architecture,
        vocab_size=geometry.vocab_size,
        hidden_size=geometry.hidden_size,
        num_layers=geometry.num_layers,
        num_heads=geometry.num_heads,
        num_kv_heads=geometry.num_kv_heads,
        head_size=geometry.head_size,
        max_model_len=geometry.max_model_len,
        dtype=geometry.dtype,
        num_parameters=geometry.num_parameters,
        weight_bytes=geometry.weight_bytes,
        model_type=geometry.model_type,
        weights=geometry.weights,
    )


def _limits(limits: Limits) -> pb.ExecutorLimits:
    return pb.ExecutorLimits(
        num_slots=limits.num_slots,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_logprobs=limits.max_logprobs,
        max_inflight_plans=limits.max_inflight_plans,
        max_drafts=limits.max_drafts,
        adaptive_drafts=limits.adaptive_drafts,
        max_loras=limits.max_loras,
        max_cpu_loras=limits.max_cpu_loras,
    )


def _grammar(engine: GrammarEngine | None) -> pb.GrammarEngine | None:
    if engine is None:
        return None
    return pb.GrammarEngine(library=engine.library, table_digest=engine.table_digest)


def _fingerprint(fingerprint: Fingerprint) -> types_pb2.NumericsFingerprint:
    exact = fingerprint.mode == "exact"
    return types_pb2.NumericsFingerprint(
        mode=types_pb2.NUMERICS_MODE_EXACT if exact else types_pb2.NUMERICS_MODE_FAST,
        weights_digest=fingerprint.weights_digest,
        dtype=fingerprint.dtype,
        kv_dtype=fingerprint.kv_dtype,
        kernels=fingerprint.kernels,
        isa=fingerprint.isa,
        num_threads=fingerprint.num_threads,
        versions=fingerprint.versions,
        digest=fingerprint.digest,
    )
