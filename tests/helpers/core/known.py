"""What a request must get from the simulated executor, known in advance, whatever it is batched with."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from hashlib import sha256

from cadenza_common.plan.result import Candidates, LogprobColumns
from executor_svc.simulated.expected_tokens import expected_candidates, expected_logprobs, expected_tokens
from scheduler_svc.core.sequences.beams import BeamSearch, Hypothesis
from scheduler_svc.core.types import FinishDetail, RequestSpec
from tests.helpers.core.core_sampling import for_executor

VOCAB_SIZE = 50


def adapter_hash(index: int) -> bytes:
    """The content of an adapter: every third has the same; 0: no adapter."""
    return sha256(f"adapter {index % 3}".encode()).digest() if index else b""


def known_sample(spec: RequestSpec, max_model_len: int, sample_index: int = 0) -> tuple[list[int], FinishDetail]:
    """The tokens of a sample, and how it ends."""
    limit, length_detail = _length_limit(spec, max_model_len)
    sampling = spec.sampling
    tokens = expected_tokens(
        spec.prompt_token_ids,
        for_executor(sampling),
        limit,
        VOCAB_SIZE,
        sample_index=sample_index,
        adapter_hash=adapter_hash(spec.adapter_index),
    )
    if tokens and tokens[-1] in sampling.stop_token_ids and len(tokens) >= sampling.min_tokens:
        return tokens, FinishDetail.EOS if tokens[-1] in spec.eos_token_ids else FinishDetail.STOP_TOKEN
    return tokens, length_detail if len(tokens) == limit else FinishDetail.NO_ALLOWED_TOKEN


def known_beams(spec: RequestSpec, max_model_len: int) -> list[Hypothesis]:
    """What a beam search that is not cut short returns, best first."""
    *_, (search, _) = _search(spec, max_model_len)
    return search.best(spec.num_samples)


def known_cuts(spec: RequestSpec, max_model_len: int, detail: FinishDetail) -> list[list[Hypothesis]]:
    """What it returns if it is cut short, for this reason: after one round, after two, and so on."""
    return [search.best(spec.num_samples, outputs, detail) for search, outputs in _search(spec, max_model_len)]


def known_prompt_logprobs(
    prompt: Sequence[int], num_top: int, start: int = 1, adapter_index: int = 0
) -> LogprobColumns:
    """Those of the prompt tokens from `start` on, as the wire carries them."""
    content = adapter_hash(adapter_index)
    rows = [expected_logprobs(prompt, index, num_top, VOCAB_SIZE, content) for index in range(start, len(prompt))]
    return LogprobColumns(
        start=start,
        logprobs=_float32([logprob for logprob, _, _, _ in rows]),
        ranks=[rank for _, rank, _, _ in rows],
        num_top=num_top,
        top_token_ids=[token_id for _, _, token_ids, _ in rows for token_id in token_ids],
        top_logprobs=_float32([logprob for _, _, _, logprobs in rows for logprob in logprobs]),
    )


def as_lists(columns: LogprobColumns) -> LogprobColumns:
    """The same in lists, to be compared."""
    return columns._replace(
        logprobs=list(columns.logprobs),
        ranks=list(columns.ranks),
        top_token_ids=list(columns.top_token_ids),
        top_logprobs=list(columns.top_logprobs),
    )


def _search(spec: RequestSpec, max_model_len: int) -> Iterator[tuple[BeamSearch, list[list[int]]]]:
    """The search after each round, with the outputs of the beams that run on."""
    assert spec.beams is not None
    limit, length_detail = _length_limit(spec, max_model_len)
    search = BeamSearch(
        spec.beams,
        stop_ids=frozenset(spec.sampling.stop_token_ids),
        eos_token_ids=spec.eos_token_ids,
        num_prompt_tokens=len(spec.prompt_token_ids),
        max_len=len(spec.prompt_token_ids) + limit,
        length_detail=length_detail,
    )
    outputs: list[list[int]] = [[]]
    while not search.done:
        candidates = [_candidates(spec, output, search.num_candidates) for output in outputs]
        pairs = search.advance(outputs, candidates)
        outputs = [[*outputs[parent], token_id] for parent, token_id in pairs]
        yield search, outputs


def _candidates(spec: RequestSpec, output: list[int], count: int) -> Candidates:
    sampling, content = for_executor(spec.sampling), adapter_hash(spec.adapter_index)
    candidates = expected_candidates(spec.prompt_token_ids, output, sampling, count, VOCAB_SIZE, content)
    return Candidates([token_id for token_id, _ in candidates], _float32([logprob for _, logprob in candidates]))


def _length_limit(spec: RequestSpec, max_model_len: int) -> tuple[int, FinishDetail]:
    """Most output tokens, and the reason for it."""
    room = max_model_len - len(spec.prompt_token_ids)
    if spec.max_tokens is not None and spec.max_tokens <= room:
        return spec.max_tokens, FinishDetail.MAX_TOKENS
    return room, FinishDetail.MAX_MODEL_LEN


def _float32(values: list[float]) -> list[float]:
    return array("f", values).tolist()
