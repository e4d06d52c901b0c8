"""Random streams of a load test: one for each drawn quantity, so that changing one does not affect the others."""

from __future__ import annotations

import zlib

import numpy as np

from cadenza_loadtest.requests import LoadTestError


def check_seed(seed: int) -> int:
    """The seed; raises LoadTestError if it is negative."""
    if seed < 0:
        raise LoadTestError(f"--seed {seed}: must be 0 or more")
    return seed


def stream(seed: int, *place: str | int) -> np.random.Generator:
    """A generator for the draws at `place`, such as ("output_len", 3) for the fourth chunk of output lengths.

    Streams of different seeds or places are independent: numpy's SeedSequence mixes both.
    """
    key = tuple(zlib.crc32(part.encode()) if isinstance(part, str) else part for part in place)
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(check_seed(seed), spawn_key=key)))


class ChunkStreams:
    """The streams of one chunk of a workload, by the name of the drawn quantity."""

    __slots__ = ("_chunk", "_seed")

    def __init__(self, seed: int, chunk: int) -> None:
        self._seed = seed
        self._chunk = chunk

    def __call__(self, name: str) -> np.random.Generator:
        return stream(self._seed, name, self._chunk)
