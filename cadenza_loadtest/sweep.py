"""A sweep: one setting, several values, a point of the result file for each."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from cadenza_common.spelling import suggestion
from cadenza_loadtest.requests import LoadTestError


@dataclass(frozen=True, slots=True)
class Sweep:
    """A parsed `NAME=VALUE,VALUE,…`."""

    name: str
    values: tuple[str, ...]


def swept_name(text: str) -> str:
    """The name of the setting that a `--sweep` sets, with underscores."""
    return text.partition("=")[0].strip().removeprefix("--").replace("-", "_")


def parse_sweep(text: str, known: Collection[str]) -> Sweep:
    """Parse one `--sweep`; `known`: the settings that may be swept. Raises LoadTestError."""
    _, equals, values = text.partition("=")
    name = swept_name(text)
    if not equals or not values.strip():
        raise LoadTestError(f"--sweep {text}: must be NAME=VALUE,VALUE,…, such as request-rate=1,2,4")
    if name not in known:
        flags = {each.replace("_", "-") for each in known}
        hint = suggestion(name.replace("_", "-"), flags) or f"; there are {', '.join(sorted(flags))}"
        raise LoadTestError(f"--sweep {text}: {name.replace('_', '-')} cannot be swept{hint}")
    parts = tuple(part.strip() for part in values.split(","))
    if not all(parts) or len(set(parts)) != len(parts):
        raise LoadTestError(f"--sweep {text}: a value is empty or given twice")
    return Sweep(name, parts)


def combinations(sweeps: Sequence[Sweep]) -> list[dict[str, str]]:
    """All combinations of several sweeps, with the first sweep outermost; without sweeps, one empty point."""
    names = [sweep.name for sweep in sweeps]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise LoadTestError(f"--sweep {twice.replace('_', '-')}: given twice; give all values in one")
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*(each.values for each in sweeps))]
