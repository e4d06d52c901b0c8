"""What several executors serve together: one model, under the largest of their limits, with all of their features."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace

from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.types import ExecutorSpec
from scheduler_svc.plan_loop.ports import ModelDescription


def why_other_model(served: ModelDescription, model: ModelDescription) -> str:
    """Why an executor cannot join those that serve another model; empty if its model is the same.

    The same model has the same vocabulary, architecture and weights, whatever it is called. Limits, blocks, devices
    and numerics may differ.
    """
    weights, served_weights = _weights(model), _weights(served)
    differing = [
        f"{name} {new} is not {old}"
        for name, old, new in (
            ("vocabulary size", served.vocab_size, model.vocab_size),
            ("architecture", served.architecture, model.architecture),
            ("weights", served_weights, weights),
        )
        if old != new
    ]
    if not differing:
        return ""
    return f"it has another model, {model.name}, than the served {served.name}: {', '.join(differing)}"


def fleet_model(served: ModelDescription, models: Iterable[ModelDescription]) -> ModelDescription:
    """The description that new requests are checked against: the served model with the limits of these executors.

    Each limit is the largest one, and each feature is there if one executor has it: placement knows which executor a
    request fits. Only `max_logprobs` is the smallest, because placement does not count logprobs.
    """
    models = list(models)
    if len(models) == 1:
        return models[0]
    return replace(
        served,
        max_model_len=max(model.max_model_len for model in models),
        num_device_blocks=max(model.num_device_blocks for model in models),
        num_host_blocks=max(model.num_host_blocks for model in models),
        num_slots=max(model.num_slots for model in models),
        max_num_seqs=max(model.max_num_seqs for model in models),
        max_num_batched_tokens=max(model.max_num_batched_tokens for model in models),
        max_logprobs=min(model.max_logprobs for model in models),
        max_loras=max(model.max_loras for model in models),
        max_cpu_loras=max(model.max_cpu_loras for model in models),
        grammar_engine=next((model.grammar_engine for model in models if model.grammar_engine), b""),
        gives_prompt_logprobs=any(model.gives_prompt_logprobs for model in models),
        has_logits_processors=any(model.has_logits_processors for model in models),
        # Beams and samples need two features of one executor.
        can_copy=any(model.can_copy for model in models),
        can_fork=any(model.can_fork and model.can_copy for model in models),
        gives_candidates=any(model.gives_candidates and model.can_copy for model in models),
    )


def lacking_features(model: ModelDescription) -> frozenset[str]:
    """Names of the features that an executor lacks, as placement uses them."""
    has = {
        "prompt_logprobs": model.gives_prompt_logprobs,
        "logits_processors": model.has_logits_processors,
        "samples": model.can_fork and model.can_copy,
        "beams": model.gives_candidates and model.can_copy,
    }
    return frozenset(name for name, there in has.items() if not there)


def promised_numerics(model: ModelDescription, *, allows_other_numerics: bool) -> bytes:
    """What requests with output are bound to: executors with the same value go on with the same tokens.

    Empty where no tokens are promised: in fast mode, or if the operator accepts that later tokens may differ.
    """
    if allows_other_numerics or not model.is_exact:
        return b""
    return hashlib.sha256(model.fingerprint).digest()


def executor_spec(model: ModelDescription, config: SchedulerConfig) -> ExecutorSpec:
    """The executor's limits, lowered by this scheduler's options."""
    return ExecutorSpec(
        block_size=model.block_size,
        num_blocks=model.num_device_blocks,
        num_slots=model.num_slots,
        max_num_seqs=min(config.max_num_seqs or model.max_num_seqs, model.max_num_seqs),
        max_num_batched_tokens=min(
            config.max_num_batched_tokens or model.max_num_batched_tokens, model.max_num_batched_tokens
        ),
        max_model_len=min(config.max_model_len or model.max_model_len, model.max_model_len),
        watermark=config.watermark,
        num_host_blocks=model.num_host_blocks if model.can_swap else 0,
        shares_prefixes=model.shares_prefixes,
        numerics=promised_numerics(model, allows_other_numerics=config.allow_fingerprint_change),
        max_drafts=model.max_drafts,
        adaptive_drafts=model.adaptive_drafts,
        max_loras=_least(config.max_loras, model.max_loras),
        max_cpu_loras=_least(config.max_cpu_loras, model.max_cpu_loras),
        grammar_engine=model.grammar_engine,
        lacks=lacking_features(model),
        kv_groups=model.kv_groups,
        pages_per_state=model.pages_per_state,
    )


def _least(option: int | None, limit: int) -> int:
    return limit if option is None else min(option, limit)


def _weights(model: ModelDescription) -> str:
    return dict(model.numerics).get("weights", "none")
