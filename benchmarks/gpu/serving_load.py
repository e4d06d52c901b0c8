"""What both services and the peer are asked for: random prompts and outputs of random lengths, all at once."""

from __future__ import annotations

import random
from collections.abc import Sequence

from benchmarks.common.workload import Request
from benchmarks.gpu.cases import Ceilings
from benchmarks.gpu.shapes import ModelShape

LEAST, MOST = 100, 1024
"""Tokens of a prompt, and of an output."""
NUM_REQUESTS, NUM_PEER_REQUESTS = 1000, 200


def make_requests(count: int, seed: int, vocab_size: int, least: int = LEAST, most: int = MOST) -> list[Request]:
    """Uniform lengths of prompts and outputs, uniform token ids; fewer requests are the first ones of more."""
    rng = random.Random(seed)
    requests = []
    for index in range(count):
        length, output_len = rng.randint(least, most), rng.randint(least, most)
        requests.append(Request(index, [rng.randrange(vocab_size) for _ in range(length)], output_len))
    return requests


def some_of(requests: Sequence[Request], count: int, seed: int) -> list[Request]:
    """A seeded choice, in their order: what a slower peer is asked for."""
    chosen = random.Random(seed + 1).sample(range(len(requests)), min(count, len(requests)))
    return [requests[index] for index in sorted(chosen)]


def alike(count: int, length: int, output_len: int, seed: int, vocab_size: int) -> list[Request]:
    """Requests of one size: once all have begun, each step decodes them all."""
    rng = random.Random(seed + 2)
    return [
        Request(index, [rng.randrange(vocab_size) for _ in range(length)], output_len) for index in range(count)
    ]  # fmt: skip


def limit_s(shape: ModelShape, requests: Sequence[Request], ceilings: Ceilings) -> float:
    """Seconds for all products at the rate of a large one and, after these, for all keys and values that outputs read.

    In 16 bits. That matrices are read too is left out: with many sequences their products take longer.
    """
    flops = read_tokens = 0
    for each in requests:
        length, more = len(each.prompt), each.output_len - 1
        flops += shape.prefill_flops(1, length) + more * shape.prefill_flops(1, 1)
        read_tokens += more * length + more * (more + 1) // 2
    return flops / ceilings.matmul + read_tokens * shape.kv_bytes_per_token / ceilings.copy
