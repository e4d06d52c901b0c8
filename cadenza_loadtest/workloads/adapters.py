"""The LoRA adapters that requests name: a law over numbered names, or names with weights."""

from __future__ import annotations

from cadenza_loadtest.requests import LoadTestError
from cadenza_loadtest.workloads.lengths import positive
from cadenza_loadtest.workloads.mixes import Weighted, parts_of, weighted

ADAPTERS_FORM = "zipf:1000, zipf:1000:1.5, uniform:16, a:3,b:1"
PREFIX = "adapter-"
_LAWS = ("zipf", "uniform")
_MOST = 1_000_000
_MOST_EXPONENT = 10.0


def adapter_names(count: int, prefix: str = PREFIX) -> list[str]:
    """`adapter-0000` and so on, in the order of popularity; all of one length, with four digits or more."""
    width = max(4, len(str(count - 1)))
    return [f"{prefix}{number:0{width}}" for number in range(count)]


def parse_adapters(text: str, share: float = 1.0, prefix: str = PREFIX) -> Weighted[str] | None:
    """As adapters_of, for the options of a workload; raises LoadTestError."""
    try:
        return adapters_of(text, share, prefix)
    except ValueError as error:
        raise LoadTestError(f"--adapters {text}: {error}") from None


def adapters_of(text: str, share: float = 1.0, prefix: str = PREFIX) -> Weighted[str] | None:
    """`zipf:1000`: of 1,000 adapters the k-th has a weight of 1/k, with `zipf:1000:1.5` of 1/k^1.5; `uniform:16`: 16
    adapters of equal weights; `a:3,b:1`: these names with their weights, `a,b`: equal ones.

    share: of the requests that name one; the others have the name "". None for an empty text. Raises ValueError.
    """
    weights = _law(text, prefix) or _named(text)
    if not weights:
        return None
    if not 0 < share <= 1:
        raise ValueError(f"the share of requests with an adapter must be above 0 and at most 1, not {share:g}")
    drawn = weighted(weights)
    if share == 1:
        return drawn
    return Weighted((*drawn.values, ""), (*(each * share for each in drawn.shares), 1 - share))


def _law(text: str, prefix: str) -> dict[str, float]:
    """The weights of `zipf:N[:EXPONENT]` and `uniform:N`; empty for a list of names."""
    law, *numbers = text.strip().split(":")
    if law not in _LAWS or "," in text:
        return {}
    if len(numbers) != 1 and not (law == "zipf" and len(numbers) == 2):
        raise ValueError(f"adapters look like {ADAPTERS_FORM}")
    count = _count(numbers[0])
    exponent = positive(numbers[1], "the exponent") if len(numbers) == 2 else 1.0
    if exponent > _MOST_EXPONENT:
        raise ValueError(f"the exponent must be at most {_MOST_EXPONENT:g}, not {exponent:g}")
    names = adapter_names(count, prefix)
    if law == "uniform":
        return dict.fromkeys(names, 1.0)
    return {name: (rank + 1) ** -exponent for rank, name in enumerate(names)}


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= _MOST):
        raise ValueError(f"the number of adapters must be 1 to {_MOST:,}, not {text!r}")
    return int(text)


def _named(text: str) -> dict[str, float]:
    weights: dict[str, float] = {}
    for part in parts_of(text):
        name, colon, weight = part.rpartition(":")
        name = (name if colon else part).strip()
        if not name:
            raise ValueError(f"{part!r} has no name; adapters look like {ADAPTERS_FORM}")
        if name in weights:
            raise ValueError(f"{name} is given twice")
        weights[name] = positive(weight, f"the weight in {part!r}") if colon else 1.0
    return weights
