"""The requests for both services and the peer: random prompts and outputs of random lengths, all at once."""

from __future__ import annotations

import random
from collections.abc import Sequence

from benchmarks.common.workload import Request
from benchmarks.gpu.common.cases import Ceilings
from benchmarks.gpu.common.shapes import ModelShape

SHORTEST, LONGEST = 100, 1024
"""Tokens of a prompt, and of an output."""


def make_requests(
    count: int, seed: int, vocab_size: int, shortest: int = SHORTEST, longest: int = LONGEST
) -> list[Request]:
    """Uniform lengths of prompts and outputs, uniform token ids; fewer requests are the first ones of more."""
    rng = random.Random(seed)
    requests = []
    for index in range(count):
        length, output_len = rng.randint(shortest, longest), rng.randint(shortest, longest)
        requests.append(Request(index, [rng.randrange(vocab_size) for _ in range(length)], output_len))
    return requests


def sample_of(requests: Sequence[Request], count: int, seed: int) -> list[Request]:
    """A seeded sample in the requests' order, for a slower peer."""
    chosen = random.Random(seed + 1).sample(range(len(requests)), min(count, len(requests)))
    return [requests[index] for index in sorted(chosen)]


def equal_requests(count: int, length: int, output_len: int, seed: int, vocab_size: int) -> list[Request]:
    """Requests of one size: after all prompts are computed, each step decodes all sequences."""
    rng = random.Random(seed + 2)
    return [Request(index, [rng.randrange(vocab_size) for _ in range(length)], output_len) for index in range(count)]


def limit_s(shape: ModelShape, requests: Sequence[Request], ceilings: Ceilings) -> float:
    """Least seconds in 16 bits: all products at the measured rate, then reading all keys and values for the outputs.

    Reading the matrices is left out: with many sequences their products take longer.
    """
    flops = read_tokens = 0
    for each in requests:
        length, more = len(each.prompt), each.output_len - 1
        flops += shape.prefill_flops(1, length) + more * shape.prefill_flops(1, 1)
        read_tokens += more * length + more * (more + 1) // 2
    return flops / ceilings.matmul + read_tokens * shape.kv_bytes_per_token / ceilings.copy
