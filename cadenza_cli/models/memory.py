"""What of this machine's memory a model may have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cadenza.errors import OptionError

if TYPE_CHECKING:
    from executor_svc.models.fit.text import Room


def room(
    share: float | None = None,
    max_num_seqs: int | None = None,
    max_model_len: int | None = None,
    rate: float | None = None,
) -> Room:
    """Return the room on the CPU; a value of None: the default of `cadenza up`. Raises OptionError."""
    from executor_svc.cpu_memory import free_memory_bytes
    from executor_svc.models.fit.text import Room

    given = {"gpu_memory_utilization": share, "max_num_seqs": max_num_seqs, "max_model_len": max_model_len}
    for name, value in given.items():
        if value is not None and (value <= 0 or (name == "gpu_memory_utilization" and value > 1)):
            raise OptionError(f"option {name}: {value} is out of range")
    made = {"share": share, "max_num_seqs": max_num_seqs, "max_model_len": max_model_len, "read_rate": rate}
    return Room(free_memory_bytes(), **{name: value for name, value in made.items() if value is not None})  # type: ignore[arg-type]
