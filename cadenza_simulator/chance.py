"""Random variation of times around the modelled value, gamma distributed and reproducible by seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cadenza_loadtest.seeds import stream

_CHUNK = 4096


def factors(variation: float, seed: int, name: str) -> Iterator[float]:
    """Endless random numbers of mean 1 and this coefficient of variation, which must be over 0.

    The numbers of different names are independent.
    """
    rng, shape = stream(seed, name), 1 / variation**2
    while True:
        yield from (rng.standard_gamma(shape, _CHUNK) / shape).tolist()


def varied(scale: float, seed: int, name: str) -> Callable[[float], float]:
    """A function that draws a number of a given mean, over 0; its variance is `scale` times the mean."""
    draw: Callable[[float], float] = stream(seed, name).standard_gamma
    return lambda mean: scale * draw(mean / scale)
