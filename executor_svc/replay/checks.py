"""Compares a replay with its plan log: the options of its executor, and the results of its plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cadenza.v1 import execution_pb2 as pb
from cadenza.v1 import types_pb2
from cadenza_common.settings.names import flag
from executor_svc.config import ExecutorConfig

_DTYPES = ("float32", "bfloat16")
_MODES = {types_pb2.NUMERICS_MODE_EXACT: "exact", types_pb2.NUMERICS_MODE_FAST: "fast"}
_SHOWN = 160


def geometry_options(recorded: pb.DescribeResponse) -> dict[str, int]:
    """Return the options that plans depend on, with the recorded executor's values.

    With recurrent states a pool that was sized by free memory may have a number of pages that no option gives: then it
    is the next larger one here. The replay's pool has exactly the recorded pages.
    """
    pages, states = 1, 0
    if recorded.device != "simulated":  # there, options count pages
        pages = sum(group.pages_per_block for group in recorded.kv.groups) or 1
        states = recorded.limits.max_num_seqs * recorded.kv.state.pages_per_state
    return {
        "block_size": recorded.kv.block_size,
        "num_gpu_blocks": max(1, -(-(recorded.kv.num_device_blocks - states) // pages)),
        "num_cpu_blocks": recorded.kv.num_host_blocks // pages,
        "max_model_len": recorded.model.max_model_len,
        "max_num_seqs": recorded.limits.max_num_seqs,
        "max_num_batched_tokens": recorded.limits.max_num_batched_tokens,
    }


def recorded_arguments(recorded: pb.DescribeResponse, given: Sequence[str]) -> list[str]:
    """Return arguments for an executor like the recorded one, but with fewer logs, without those in `given`."""
    names = {argument.partition("=")[0] for argument in given}
    options: dict[str, object] = {"log_level": "warning", "model": recorded.model.name, **geometry_options(recorded)}
    simulated = recorded.device == "simulated"
    if simulated or flag("simulate") in names:
        options["simulate_vocab_size"] = recorded.model.vocab_size
        if flag("model") not in names:
            options["simulate"] = "instant"
        if recorded.kv.state.pages_per_state:
            options["simulate_state_pages"] = recorded.kv.state.pages_per_state
        if recorded.kv.groups:
            groups = [f"{group.window or 'full'}:{group.pages_per_block}" for group in recorded.kv.groups]
            options["simulate_kv_groups"] = ",".join(groups)
    elif recorded.model.dtype in _DTYPES:
        options["dtype"] = recorded.model.dtype
    if not simulated and recorded.HasField("fingerprint"):
        options["numerics"] = _MODES.get(recorded.fingerprint.mode, "exact")
        options["num_threads"] = max(1, recorded.fingerprint.num_threads)
    if recorded.limits.max_drafts:
        # Whatever made the drafts: a replay takes them from the results.
        options |= {"speculative": "ngram", "num_speculative_tokens": recorded.limits.max_drafts}
    if recorded.limits.max_loras:
        options |= {"max_loras": recorded.limits.max_loras, "max_cpu_loras": recorded.limits.max_cpu_loras}
    return [f"{flag(name)}={value}" for name, value in options.items() if flag(name) not in names]


def contradictions(config: ExecutorConfig, recorded: pb.DescribeResponse) -> Iterator[str]:
    """Yield an error message for each option that would change the meaning of the recorded plans."""
    for name, value in geometry_options(recorded).items():
        if getattr(config, name) != value:
            yield f"{flag(name)}: {getattr(config, name)} is not what was recorded, {value}"


def numerics_difference(recorded: pb.DescribeResponse, here: pb.DescribeResponse) -> str:
    """Return the fields in which the numerics fingerprints differ; empty if they are equal."""
    left, right = recorded.fingerprint, here.fingerprint
    if left.digest == right.digest:
        return ""
    fields = [field.name for field in left.DESCRIPTOR.fields if getattr(left, field.name) != getattr(right, field.name)]
    named = [name for name in fields if name != "digest"]
    return ", ".join(named) or "the model's configuration"


def first_difference(recorded: pb.StepResult, replayed: pb.StepResult, *, exact: bool) -> str:
    """Return the first difference between two results of one plan; empty if they are equal.

    Compares tokens, candidates and errors; with `exact` also the bits of logprobs.
    """
    if recorded.status != replayed.status:
        message = f": {replayed.error_message}" if replayed.error_message else ""
        return f"status: recorded {_status(recorded)}, now {_status(replayed)}{message}"
    if recorded.status != pb.STEP_STATUS_OK:
        return ""
    left, right = _by_slot(recorded, exact), _by_slot(replayed, exact)
    for slot in sorted(left.keys() | right.keys()):
        old, new = left.get(slot, {}), right.get(slot, {})
        for name in sorted(old.keys() | new.keys(), key=_PARTS.index):
            if old.get(name) != new.get(name):
                return f"slot {slot}: {name}: recorded {_shown(old.get(name))}, now {_shown(new.get(name))}"
    saved, now = (list(zip(each.saved_slots, each.saved_positions, strict=True)) for each in (recorded, replayed))
    if saved != now:
        return f"states saved, slots and positions: recorded {_shown(saved)}, now {_shown(now)}"
    if recorded.debug_digest and recorded.debug_digest != replayed.debug_digest:
        return f"digest of the slots: recorded {recorded.debug_digest.hex()}, now {replayed.debug_digest.hex()}"
    return ""


_PARTS = ("error", "token ids", "candidates", "logprobs of candidates", "logprobs", "logprobs of the prompt")


def _by_slot(result: pb.StepResult, exact: bool) -> dict[int, dict[str, Any]]:
    """Return the results of each slot, by part."""
    slots: dict[int, dict[str, Any]] = {}
    start = 0
    for index, slot in enumerate(result.slots):
        count = result.num_tokens[index] if result.num_tokens else 1
        slots[slot] = {"token ids": list(result.token_ids[start : start + count])}
        start += count
    for slot, error in zip(result.error_slots, result.errors, strict=True):
        slots.setdefault(slot, {})["error"] = pb.SlotError.Name(error)
    for found in result.candidates:
        slots.setdefault(found.slot, {})["candidates"] = list(found.token_ids)
        if exact:
            slots[found.slot]["logprobs of candidates"] = list(found.logprobs)
    if exact:
        for name, entries in (("logprobs", result.logprobs), ("logprobs of the prompt", result.prompt_logprobs)):
            for entry in entries:
                slots.setdefault(entry.slot, {})[name] = _columns(entry.columns)
    return slots


def _columns(columns: types_pb2.LogprobColumns) -> list[list[float]]:
    return [
        list(columns.chosen_logprobs), list(columns.chosen_ranks),
        list(columns.top_token_ids), list(columns.top_logprobs),
    ]  # fmt: skip


def _status(result: pb.StepResult) -> str:
    return pb.StepStatus.Name(result.status).removeprefix("STEP_STATUS_")


def _shown(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
