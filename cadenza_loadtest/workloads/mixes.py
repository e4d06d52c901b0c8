"""Mixes: the algorithm (n samples, beams), the tenant and the LoRA adapter of each request."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from cadenza_loadtest.requests import LoadTestError
from cadenza_loadtest.seeds import ChunkStreams
from cadenza_loadtest.workloads.lengths import positive

MIX_FORM = "n=4:0.2,beam=4:0.1"
TENANTS_FORM = "a:3,b:1"
_CHUNK = 1024
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Algorithm:
    """The decoding algorithm of a request."""

    n: int = 1
    beam_width: int = 0
    """0: no beam search."""

    @property
    def label(self) -> str:
        """The algorithm as written in a mix, such as "n=4"."""
        return f"beam={self.beam_width}" if self.beam_width else f"n={self.n}"


@dataclass(frozen=True, slots=True)
class Weighted(Generic[_T]):
    """Values to draw from, each with its share; the shares sum to 1."""

    values: tuple[_T, ...]
    shares: tuple[float, ...]

    def draw(self, rng: np.random.Generator, count: int) -> list[_T]:
        """[count] draws of the values."""
        ends = np.cumsum(self.shares)
        ends[-1] = 1.0  # with a sum of 0.999… a draw could have no value
        return [self.values[place] for place in np.searchsorted(ends, rng.random(count), side="right").tolist()]


class Label(NamedTuple):
    """The attributes of a request besides its lengths."""

    n: int
    beam_width: int
    tenant: str
    adapter: str
    kind: str
    """The algorithm's label, if there is a mix."""


NO_LABEL = Label(1, 0, "", "", "")


@dataclass(frozen=True, slots=True)
class Labels:
    """Draws the labels of requests; without a mix one sample, without tenants or adapters none."""

    mix: Weighted[Algorithm] | None = None
    tenants: Weighted[str] | None = None
    adapters: Weighted[str] | None = None

    def draw(self, streams: ChunkStreams, count: int) -> Iterable[Label]:
        """Labels for `count` requests."""
        if self.mix is None and self.tenants is None and self.adapters is None:
            return itertools.repeat(NO_LABEL, count)
        tenants = [""] * count if self.tenants is None else self.tenants.draw(streams("tenants"), count)
        adapters = [""] * count if self.adapters is None else self.adapters.draw(streams("adapters"), count)
        if self.mix is None:
            return [Label(1, 0, tenant, adapter, "") for tenant, adapter in zip(tenants, adapters, strict=True)]
        algorithms = self.mix.draw(streams("mix"), count)
        return [
            Label(algorithm.n, algorithm.beam_width, tenant, adapter, algorithm.label)
            for algorithm, tenant, adapter in zip(algorithms, tenants, adapters, strict=True)
        ]

    def endless(self, seed: int) -> Iterator[Label]:
        """The same labels one by one, for callers that do not know how many they need."""
        for chunk in itertools.count():
            yield from self.draw(ChunkStreams(seed, chunk), _CHUNK)


def parse_mix(text: str) -> Weighted[Algorithm] | None:
    """`n=4:0.2,beam=4:0.1`: a fifth of the requests has four samples, a tenth has four beams, the others have one
    sample.

    None for an empty text. Raises LoadTestError.
    """
    try:
        return mix_of(text)
    except ValueError as error:
        raise LoadTestError(f"--mix {text}: {error}") from None


def parse_tenants(text: str) -> Weighted[str] | None:
    """`a:3,b:1`: three quarters of the requests are from tenant a; `a,b`: equal shares. None for an empty text.

    Raises LoadTestError.
    """
    try:
        return tenants_of(text)
    except ValueError as error:
        raise LoadTestError(f"--tenants {text}: {error}") from None


def mix_of(text: str) -> Weighted[Algorithm] | None:
    """As parse_mix, for callers that name the option themselves; raises ValueError."""
    shares: dict[Algorithm, float] = {}
    for part in parts_of(text):
        name, colon, share = part.partition(":")
        if not colon:
            raise ValueError(f"{part!r} has no share; a mix looks like {MIX_FORM}")
        algorithm = _algorithm(name)
        if algorithm in shares:
            raise ValueError(f"{algorithm.label} is given twice")
        shares[algorithm] = positive(share, f"the share in {part!r}")
    if not shares:
        return None
    rest = 1 - math.fsum(shares.values())
    if rest < -1e-9:
        raise ValueError(f"the shares sum to {1 - rest:g}, over 1")
    if Algorithm() in shares and rest > 1e-9:
        raise ValueError(f"the shares sum to {1 - rest:g}; with n=1 among them they must sum to 1")
    if rest > 1e-9:
        shares[Algorithm()] = rest
    return weighted(shares)


def tenants_of(text: str) -> Weighted[str] | None:
    """As parse_tenants, for callers that name the option themselves; raises ValueError."""
    weights: dict[str, float] = {}
    for part in parts_of(text):
        name, colon, weight = part.rpartition(":")
        name = (name if colon else part).strip()
        if not name:
            raise ValueError(f"{part!r} has no name; tenants look like {TENANTS_FORM}")
        if name in weights:
            raise ValueError(f"{name} is given twice")
        weights[name] = positive(weight, f"the weight in {part!r}") if colon else 1.0
    return weighted(weights) if weights else None


def parts_of(text: str) -> list[str]:
    """The entries of a list with commas; none for an empty text."""
    return [part.strip() for part in text.split(",")] if text.strip() else []


def _algorithm(name: str) -> Algorithm:
    kind, _, number = name.strip().partition("=")
    least = {"n": 1, "beam": 2}.get(kind)
    if least is None or not (number.isascii() and number.isdigit()):
        raise ValueError(f"{name!r} is neither n=NUMBER nor beam=WIDTH; a mix looks like {MIX_FORM}")
    if int(number) < least:
        raise ValueError(f"{name}: must be {least} or more")
    return Algorithm(n=int(number)) if kind == "n" else Algorithm(beam_width=int(number))


def weighted(weights: dict[_T, float]) -> Weighted[_T]:
    """Values by their weights, which are above 0."""
    total = math.fsum(weights.values())
    return Weighted(tuple(weights), tuple(weight / total for weight in weights.values()))
