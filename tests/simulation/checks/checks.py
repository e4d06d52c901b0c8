"""What a client may have received: what an undisturbed run gives, or a part of it with a reason that happened."""

from __future__ import annotations

import math

from cadenza_common.plan.result import TokenLogprobs
from scheduler_svc.core.errors import (
    ModelChangedError,
    PreconditionError,
    RequestRejectedError,
    UnknownAdapterError,
)
from scheduler_svc.core.types import FinishDetail
from scheduler_svc.engine.adapters.adapters import FIELD
from tests.helpers.core.lane_rig import first_pages
from tests.simulation.catalogue import (
    LettersDecoder,
    cut_beams,
    next_token,
    prompt_logprobs,
    token_logprobs,
    whole_beams,
    whole_sample,
)
from tests.simulation.clients import Client, SampleSeen
from tests.simulation.executor.adapting import FAILED, INVALID
from tests.simulation.world import Violation, World

_LATE_S = 0.05
"""A deadline may pass by so much, beyond the pauses of the scheduler."""
_NATURAL = (
    FinishDetail.EOS,
    FinishDetail.STOP_TOKEN,
    FinishDetail.STOP_STRING,
    FinishDetail.MAX_TOKENS,
    FinishDetail.MAX_MODEL_LEN,
    FinishDetail.NO_ALLOWED_TOKEN,
)


def check_client(world: World, client: Client) -> None:
    """Raise Violation unless all that the client received is allowed."""
    try:
        if client.live is None:
            _check_refusal(world, client)
            return
        _check_end(world, client)
        if client.spec.beams is not None:
            _check_beams(world, client)
        else:
            numerics = _numerics_of(world, client)
            for index, seen in enumerate(client.samples):
                _check_sample(world, client, index, seen, numerics)
        _check_prompt_logprobs(world, client)
    except Violation as exc:
        plan = client.plan
        raise Violation(f"{plan.name} ({plan.kind}, seed {client.spec.sampling.seed}): {exc}") from None


def _check_refusal(world: World, client: Client) -> None:
    """Only what fits no executor is refused for good; when nothing can be served any more, everything is."""
    if isinstance(client.refusal, UnknownAdapterError):
        return  # The client has looked whether the operator has taken its name.
    if isinstance(client.refusal, PreconditionError):
        _check_precondition(world, client, client.refusal)
        return
    if not isinstance(client.refusal, RequestRejectedError):
        _require(world.fenced or client.deadline is not None, f"refused: {client.refusal!r}")
        return
    spec = client.spec
    fits = any(
        len(spec.prompt_token_ids) + 1 <= limits.max_model_len
        and spec.num_sequences <= limits.max_num_seqs
        and first_pages(limits, len(spec.prompt_token_ids), spec.num_sequences) <= limits.num_blocks
        for limits in client.refused_by
    )
    _require(not fits, f"refused although it fits: {client.refusal}")


def _check_end(world: World, client: Client) -> None:
    """It has ended, once, in time, and with a reason that happened."""
    live = client.live
    assert live is not None
    _require(live.ended, "it never ended")
    if client.deadline is not None:
        late_s = live.times.end_ns / 1e9 - client.deadline
        # Its client, which comes back while the queue is full, may be late too.
        allowed = _LATE_S + world.paused_s + 2 * world.loop.latest_s
        _require(late_s <= allowed, f"it ended {late_s:.3f} s after its deadline")
    error = live.error
    if isinstance(error, ModelChangedError):
        exact = not world.scenario.config.allow_fingerprint_change
        _require(exact and len(world.numerics) > 1, f"ended without another model: {error}")
    elif isinstance(error, PreconditionError):
        _check_precondition(world, client, error)
    else:
        _require(error is None, f"ended with {error!r}")
    if error is None and not client.has_left:
        _require(all(seen.finish for seen in client.samples), "its reader never received a finish")
    for detail in client.details():
        _require(_happened(world, client, detail), f"{detail.name} without a reason")
        world.counts[f"end: {detail.name}"] += 1
    if error is not None:
        world.counts[f"end: {type(error).__name__}"] += 1


def _check_precondition(world: World, client: Client, error: PreconditionError) -> None:
    """No executor that is left can run it: others have other limits, or not its adapter, by what has happened to it."""
    if error.field != FIELD:
        _require(len(set(world.specs())) > 1, f"ended without other limits: {error}")
        return
    index, text, files = client.spec.adapter_index, str(error), world.adapters
    if "not loaded within" in text:
        live = client.live
        waited_s = 0.0 if live is None else (live.times.end_ns - live.times.arrival_ns) / 1e9
        _require(waited_s >= world.scenario.config.lora_load_timeout_s - 1e-6, f"after {waited_s:.3f} s: {error}")
    elif "have changed" in text:
        _require(len(files.answered.get(index, ())) > 1, f"ended without other files: {error}")
    elif "other numerics" in text:
        _require(len(world.numerics) > 1, f"ended without other numerics: {error}")
    elif FAILED in text or INVALID in text:
        _require(index in files.failed, f"ended without a failed load: {error}")
    else:
        _require(any(not model.max_loras for model in world.models), f"ended with executors of adapters: {error}")


def _content(world: World, client: Client) -> int:
    """The content of its adapter, by which its tokens are known; 0: it has none, or has not begun."""
    return world.adapters.used.get(client.spec.adapter_index, 0)


def _happened(world: World, client: Client, detail: FinishDetail) -> bool:
    live = client.live
    assert live is not None
    match detail:
        case FinishDetail.ABORTED:
            return client.aborted_at is not None
        case FinishDetail.DEADLINE:
            return client.deadline is not None and live.times.end_ns / 1e9 >= client.deadline - 1e-6
        case FinishDetail.EXECUTOR_ERROR:
            guilty = world.poison is not None and world.poison[0] == client.spec.sampling.seed
            # An executor came back with fewer slots than it has sequences.
            outgrown = any(client.spec.num_sequences > limits.max_num_seqs for limits in world.specs())
            return live.error is not None or world.fenced or guilty or outgrown
        case FinishDetail.NON_FINITE_LOGITS:
            return world.counts["fault: non-finite"] > 0
        case FinishDetail.KV_CAPACITY:
            return _may_fill_pool(world, client)
    return detail in _NATURAL


def _may_fill_pool(world: World, client: Client) -> bool:
    """Whether its sequences, which share full blocks of the prompt and nothing else, can exceed a pool alone."""
    spec = client.spec
    for limits in world.specs():
        size, num_prompt = limits.block_size, len(spec.prompt_token_ids)
        length = min(limits.max_model_len, num_prompt + (spec.max_tokens or limits.max_model_len))
        num_shared = num_prompt // size
        num_blocks = num_shared + spec.num_sequences * (-(-length // size) - num_shared)
        num_pages = num_blocks * (sum(group.pages_per_block for group in limits.kv_groups) or 1)
        if num_pages + spec.num_sequences * limits.pages_per_state > limits.num_blocks:
            return True
    return False


def _lengths(world: World) -> list[int]:
    return sorted({limits.max_model_len for limits in world.specs()})


# --- samples ---------------------------------------------------------------------------------------------------------


def _numerics_of(world: World, client: Client) -> set[int]:
    """The numerics that may have given its tokens; in exact mode that is one for all of its samples."""
    if len(world.numerics) == 1 or world.scenario.config.allow_fingerprint_change:
        return world.numerics
    content = _content(world, client)
    found = [each for each in sorted(world.numerics) if _gives(client, each, content)]
    _require(found, f"{[seen.token_ids for seen in client.samples]} are not of one numerics")
    return set(found)


def _gives(client: Client, numerics: int, content: int) -> bool:
    """Whether executors of these numerics give all tokens that the client has received."""
    return all(
        token_id == next_token(client.plan.index, index, tuple(seen.token_ids[:place]), numerics, content)
        for index, seen in enumerate(client.samples)
        for place, token_id in enumerate(seen.token_ids)
    )


def _check_sample(world: World, client: Client, index: int, seen: SampleSeen, numerics: set[int]) -> None:
    content = _content(world, client)
    if client.spec.sampling.num_logprobs is not None:
        _check_logprobs(client, seen, content)
    if client.entry.stop:
        _check_text(client, seen)
    detail = seen.finish.detail if seen.finish is not None else None
    if world.numerics != {0}:
        _check_drawn(client, index, seen, numerics, content)
        return
    wholes = [
        whole_sample(client.plan.index, index, client.plan.max_tokens, length, content)
        for length in _lengths(world)
        if length > len(client.spec.prompt_token_ids)
    ]
    longest = max((whole.token_ids for whole in wholes), key=len, default=[])
    _require(seen.token_ids == longest[: len(seen.token_ids)], f"sample {index} is {seen.token_ids}, not of {longest}")
    if detail not in _NATURAL or detail is FinishDetail.STOP_STRING:
        return
    if detail is FinishDetail.MAX_MODEL_LEN:
        # Also in the middle, when an executor comes back with less.
        length = len(client.spec.prompt_token_ids) + len(seen.token_ids)
        _require(_lengths(world)[0] <= length <= _lengths(world)[-1], f"sample {index} ends at length {length}")
        return
    _require(
        any(whole.token_ids == seen.token_ids and whole.detail is detail for whole in wholes),
        f"sample {index} ends {detail.name if detail else ''} after {seen.token_ids}, not as one of {wholes}",
    )


def _check_drawn(client: Client, index: int, seen: SampleSeen, numerics: set[int], content: int) -> None:
    """With executors of several numerics, each token is one that one of them gives after those before it."""
    spec, tokens = client.spec, seen.token_ids
    for place, token_id in enumerate(tokens):
        output = tuple(tokens[:place])
        possible = {next_token(client.plan.index, index, output, each, content) for each in numerics}
        _require(token_id in possible, f"sample {index}: token {place} is {token_id}, not one of {possible}")
    stopped = bool(tokens) and tokens[-1] in spec.sampling.stop_token_ids and len(tokens) >= spec.sampling.min_tokens
    detail = seen.finish.detail if seen.finish is not None else None
    if detail in (FinishDetail.EOS, FinishDetail.STOP_TOKEN):
        _require(stopped, f"sample {index} ends {detail.name} after {tokens}")
    if detail is FinishDetail.MAX_TOKENS:
        _require(len(tokens) == spec.max_tokens, f"sample {index} ends after {len(tokens)} tokens")


def _check_logprobs(client: Client, seen: SampleSeen, content: int) -> None:
    _require(
        len(seen.logprobs) == len(seen.token_ids), f"{len(seen.logprobs)} logprobs of {len(seen.token_ids)} tokens"
    )
    num_top = client.spec.sampling.num_logprobs or 0
    for place, found in enumerate(seen.logprobs):
        wanted = token_logprobs(client.plan.index, tuple(seen.token_ids[: place + 1]), num_top, content)
        _require(_alike(found, wanted), f"logprobs of token {place} are {found}, not {wanted}")


def _alike(found: TokenLogprobs, wanted: TokenLogprobs) -> bool:
    if (found.rank, list(found.top_token_ids)) != (wanted.rank, list(wanted.top_token_ids)):
        return False
    pairs = zip((found.logprob, *found.top_logprobs), (wanted.logprob, *wanted.top_logprobs), strict=True)
    return all(math.isclose(ours, theirs, rel_tol=1e-6, abs_tol=1e-6) for ours, theirs in pairs)


def _check_text(client: Client, seen: SampleSeen) -> None:
    """The text of its tokens, cut at the first stop string."""
    decoder, tokens = LettersDecoder(), seen.token_ids
    if seen.finish is not None and seen.finish.detail in (FinishDetail.EOS, FinishDetail.STOP_TOKEN):
        tokens = tokens[:-1]
    text = decoder.decode(tokens, skip_special_tokens=True)
    matches = []
    for stop in client.entry.stop:
        # A match must be completed by a token after the first min_tokens; a token is a letter.
        first = max(0, client.spec.sampling.min_tokens + 1 - len(stop))
        start = text.find(stop, first)
        if start >= 0:
            matches.append((start + len(stop), start))
    if not matches:
        whole = text if seen.finish is not None else text[: len(seen.text)]
        _require(seen.text == whole, f"its text is {seen.text!r}, not {whole!r}")
        _require(seen.finish is None or seen.finish.detail is not FinishDetail.STOP_STRING, "no stop string is there")
        return
    end = min(matches)[0]
    start = min(start for match_end, start in matches if match_end == end)
    _require(seen.finish is not None and seen.finish.detail is FinishDetail.STOP_STRING, "a stop string was missed")
    _require(len(seen.token_ids) == end, f"{len(seen.token_ids)} tokens, where a stop string ends after {end}")
    _require(seen.text == text[:start], f"its text is {seen.text!r}, not {text[:start]!r}")


# --- beams and prompts -----------------------------------------------------------------------------------------------


def _check_beams(world: World, client: Client) -> None:
    """What the search alone returns, or what it returns when it is cut short; a client that left has nothing."""
    found = [tuple(seen.token_ids) for seen in client.samples]
    if not any(found):
        natural = {*client.details()} & {FinishDetail.EOS, FinishDetail.STOP_TOKEN, FinishDetail.MAX_TOKENS}
        _require(not natural, "a search ends without a result")
        return
    lengths = [length for length in _lengths(world) if length > len(client.spec.prompt_token_ids)]
    plan, content = client.plan, _content(world, client)
    wholes = [_padded(whole_beams(plan.index, plan.max_tokens, length, content), len(found)) for length in lengths]
    details = {*client.details()}
    cut = details & {FinishDetail.ABORTED, FinishDetail.DEADLINE, FinishDetail.KV_CAPACITY, FinishDetail.EXECUTOR_ERROR}
    # An executor that comes back with less cuts beams short too.
    shortened = len(_lengths(world)) > 1 and FinishDetail.MAX_MODEL_LEN in details
    # Where the best have ended by themselves, nothing says that the others were cut short for lack of blocks.
    if cut or shortened or _may_fill_pool(world, client):
        for length in lengths:
            wholes += [_padded(each, len(found)) for each in cut_beams(plan.index, plan.max_tokens, length, content)]
        if cut and len(lengths) > 1:
            return
    if client.has_left and not all(seen.finish for seen in client.samples):
        return
    _require(found in wholes or len(lengths) > 1, f"beams {found}, not one of {wholes}")


def _padded(beams: list[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    """Samples for which a search has nothing end empty."""
    return beams + [()] * (count - len(beams))


def _check_prompt_logprobs(world: World, client: Client) -> None:
    """All of them, if there is any output."""
    live = client.live
    assert live is not None
    if live.prompt_logprobs is None:
        return
    count, whole = client.num_prompt_logprobs, prompt_logprobs(client.plan.index, _content(world, client))
    rows = live.prompt_logprobs.rows(1, 1 + count)
    _require(list(rows.ranks) == list(whole.ranks[:count]), "wrong ranks of prompt tokens")
    _require(list(rows.top_token_ids) == list(whole.rows(1, 1 + count).top_token_ids), "wrong prompt logprobs")
    pairs = zip(rows.logprobs, whole.logprobs[:count], strict=True)
    _require(all(math.isclose(ours, theirs, rel_tol=1e-6, abs_tol=1e-6) for ours, theirs in pairs), "wrong logprobs")
    if any(seen.token_ids for seen in client.samples):
        _require(count == len(client.spec.prompt_token_ids) - 1, f"{count} prompt logprobs")


def _require(condition: object, message: str) -> None:
    if not condition:
        raise Violation(message)
