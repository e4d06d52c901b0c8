"""Chance: times that are longer or shorter than modelled, the same ones for the same seed. Gamma distributed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cadenza.loadtest.seeds import stream

_CHUNK = 4096


def factors(variation: float, seed: int, name: str) -> Iterator[float]:
    """Numbers without end, of mean 1 and this coefficient of variation, which is over 0.

    Those of two names are independent.
    """
    rng, shape = stream(seed, name), 1 / variation**2
    while True:
        yield from (rng.standard_gamma(shape, _CHUNK) / shape).tolist()


def varied(scale: float, seed: int, name: str) -> Callable[[float], float]:
    """A function that makes of a mean, over 0, a number whose variance is `scale` times that mean."""
    draw: Callable[[float], float] = stream(seed, name).standard_gamma
    return lambda mean: scale * draw(mean / scale)
