"""The requests of a burst, seeded, so that every system and every run gets the same ones."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.rows import BenchmarkError

MIN_PROMPT, MAX_PROMPT = 16, 256
MIN_OUTPUT, MEAN_OUTPUT, MAX_OUTPUT = 8, 64, 256
DECODE_OUTPUT = 128
_FIRST_ID, _END_ID = 300, 8000  # past special tokens and single bytes; within the smallest usual vocabularies


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and the number of tokens to generate for it, ignoring EOS."""

    request_id: int | str
    prompt: list[int]  # token ids
    output_len: int  # tokens


def make_workload(num_requests: int, seed: int, vocab_size: int) -> list[Request]:
    """Prompts of uniform length and outputs of exponential length, clipped; random token ids of the vocabulary.

    For vocabularies of 8,000 ids or more and the same seed, these are the requests with which the project's peers were
    measured. Raises BenchmarkError for a vocabulary that is too small.
    """
    first, end = _id_range(vocab_size)
    rng = random.Random(seed)
    requests = []
    for index in range(num_requests):
        num_prompt = rng.randint(MIN_PROMPT, MAX_PROMPT)
        num_output = max(MIN_OUTPUT, min(MAX_OUTPUT, round(rng.expovariate(1 / MEAN_OUTPUT))))
        prompt = [rng.randrange(first, end) for _ in range(num_prompt)]
        requests.append(Request(index, prompt, num_output))
    return requests


def decode_workload(num_requests: int, seed: int, vocab_size: int) -> list[Request]:
    """Requests that mostly decode: prompts of 16 random token ids, 128 output tokens each."""
    first, end = _id_range(vocab_size)
    rng = random.Random(seed)
    return [
        Request(index, [rng.randrange(first, end) for _ in range(MIN_PROMPT)], DECODE_OUTPUT)
        for index in range(num_requests)
    ]


def poisson_arrivals(num_requests: int, rate: float, seed: int) -> list[float]:
    """Arrival times of a Poisson process in seconds, `rate` per second on average; the first at 0."""
    rng = random.Random(seed)
    gaps = [0.0, *(rng.expovariate(rate) for _ in range(num_requests - 1))]
    return list(itertools.accumulate(gaps))


def load_workload(path: Path, vocab_size: int, max_model_len: int | None = None) -> list[Request]:
    """Requests from a JSON list of {"id", "prompt": [token ids], "output_len"}.

    Raises a BenchmarkError that names the entry and its field; also for an id that is given twice, and for a prompt and
    output that together are longer than max_model_len.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BenchmarkError(f"workload {path}: {error}") from None
    if not isinstance(entries, list):
        raise BenchmarkError(f"workload {path}: must be a list of requests, not {type(entries).__name__}")
    if not entries:
        raise BenchmarkError(f"workload {path}: a list with at least one request is needed")
    requests: list[Request] = []
    known: set[int | str] = set()
    for index, entry in enumerate(entries):
        try:
            request = _request(entry, vocab_size, max_model_len)
            if request.request_id in known:
                raise ValueError(f"id {request.request_id!r} is given twice")
        except ValueError as error:
            raise BenchmarkError(f"workload {path}, entry {index}: {error}") from None
        known.add(request.request_id)
        requests.append(request)
    return requests


def digest(requests: Sequence[Request]) -> str:
    """Twelve hex digits that identify a workload."""
    content = [(request.prompt, request.output_len) for request in requests]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def _id_range(vocab_size: int) -> tuple[int, int]:
    """First and end of the token ids of random prompts; raises BenchmarkError for a vocabulary that is too small."""
    end = min(_END_ID, vocab_size)
    if end <= _FIRST_ID:
        raise BenchmarkError(f"a vocabulary of {vocab_size} tokens is too small: over {_FIRST_ID} are needed")
    return _FIRST_ID, end


def _request(entry: Any, vocab_size: int, max_model_len: int | None) -> Request:
    """Parse an entry; raises a ValueError that names the field."""
    if not isinstance(entry, dict):
        raise ValueError('must be an object with "id", "prompt" and "output_len"')
    for name in ("id", "prompt", "output_len"):
        if name not in entry:
            raise ValueError(f"{name} is missing")
    request_id, prompt, output_len = entry["id"], entry["prompt"], entry["output_len"]
    if not (_is_int(request_id) or isinstance(request_id, str)):
        raise ValueError(f"id must be an integer or a string, not {request_id!r}")
    if not _is_int(output_len) or output_len < 1:
        raise ValueError(f"output_len must be an integer of at least 1, not {output_len!r}")
    if not isinstance(prompt, list) or not prompt:
        raise ValueError("prompt must be a list of one or more token ids")
    for index, token_id in enumerate(prompt):
        if not _is_int(token_id) or not 0 <= token_id < vocab_size:
            raise ValueError(f"prompt[{index}] must be a token id, 0 to {vocab_size - 1} for this model: {token_id!r}")
    if max_model_len is not None and len(prompt) + output_len > max_model_len:
        raise ValueError(
            f"prompt and output_len are {len(prompt)} + {output_len} tokens, over the model's {max_model_len}"
        )
    return Request(request_id, prompt, output_len)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
