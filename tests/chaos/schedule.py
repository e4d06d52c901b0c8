"""The faults of a run, drawn from its seed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from random import Random
from typing import Any

WEIGHTS: dict[str, float] = {
    # processes
    "kill executor": 5, "stop executor": 4, "changed executor": 4, "executor out of memory": 2, "executor hangs": 1,
    "executor loses its device": 1, "kill scheduler": 4, "stop scheduler": 2,
    # the network between the services
    "executor link: cut": 4, "executor link: stall": 2, "executor link: drop": 3, "executor link: delay": 1,
    "executor link: throttle": 1, "executor link: halve": 2, "executor link: repeat": 2, "executor link: refuse": 1,
    "executor link: slow close": 1,
    # the network between clients and the scheduler
    "client link: cut": 2, "client link: stall": 1, "client link: drop": 1, "client link: delay": 1,
    "client link: throttle": 1, "client link: halve": 2, "client link: repeat": 2, "client link: refuse": 1,
    "client link: slow close": 1, "client disconnects": 5, "client half-open": 3,
    # clients, clocks, disks
    "cancel": 3, "client leaves": 2, "deadline": 2, "clock jump": 3, "full disk": 2, "poison": 0.4,
}  # fmt: skip
KINDS = tuple(WEIGHTS)
WEIGHTS_OF_SEVERAL: dict[str, float] = {
    # with several executors
    "all executors die": 3, "two executors die": 3, "executor drains": 5, "executor is removed and added": 5,
    "executor joins and leaves": 5, "one executor stops, one drains": 3, "list of executors changes": 4,
}  # fmt: skip
KINDS_OF_SEVERAL = tuple(WEIGHTS_OF_SEVERAL)
_ONLY_SIMULATED = {"poison"}
_LONGEST_S = {
    "stop executor": 5.0,
    "stop scheduler": 4.5,
    "executor hangs": 3.0,
    "clock jump": 3.0,
    "full disk": 3.0,
    "executor link: drop": 5.0,
    "executor link: stall": 5.0,
    "one executor stops, one drains": 5.0,
}
_USUAL_LONGEST_S = 2.5
_SHORTEST_S = 0.3


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault."""

    number: int
    kind: str
    after_s: float
    """Time of calm before it."""
    duration_s: float
    """For kinds that end."""
    waits: bool
    """Whether the service has recovered from the one before when it happens."""
    draw: float
    """From 0 to 1: which of several clients, limits or directions."""
    executor: int = 0
    """Index of the executor that it concerns."""

    def to_json(self) -> dict[str, Any]:
        """Of the history."""
        return asdict(self)


def draw_schedule(seed: int, count: int, *, simulated: bool, num_executors: int = 1) -> list[Fault]:
    """The same for the same arguments; each kind comes once before any is drawn."""
    rng = Random(f"faults {seed}")
    all_weights = WEIGHTS | (WEIGHTS_OF_SEVERAL if num_executors > 1 else {})
    kinds = [kind for kind in all_weights if simulated or kind not in _ONLY_SIMULATED]
    first = rng.sample(kinds, len(kinds))
    weights = [all_weights[kind] for kind in kinds]
    executors = Random(f"executors {seed}")
    # While one of several is away, the others go on: more faults come then than with a single one.
    share_that_waits = 0.75 if num_executors == 1 else 0.5
    drawn = [*first, *rng.choices(kinds, weights, k=count)][:count]
    return [
        Fault(
            number=number,
            kind=kind,
            after_s=round(rng.uniform(0.1, 1.2), 3),
            duration_s=round(rng.uniform(_SHORTEST_S, _LONGEST_S.get(kind, _USUAL_LONGEST_S)), 3),
            waits=rng.random() < share_that_waits,
            draw=rng.random(),
            executor=executors.randrange(num_executors),
        )
        for number, kind in enumerate(drawn)
    ]
