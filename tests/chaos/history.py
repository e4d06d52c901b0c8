"""The history of a run, as JSON lines: schedule, events, and outputs that are not as they must be."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from tests.chaos.schedule import Fault


class History:
    """Writes it as things happen, so that it is there whatever becomes of the run. Times are seconds from its start."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("w", encoding="utf-8")
        self._began = time.monotonic()

    def now(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def write(self, record: str, **fields: Any) -> None:
        """Add a record."""
        self._file.write(json.dumps({"record": record, "at_s": round(self.now(), 4), **fields}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """No more is written."""
        self._file.close()


def read_schedule(path: Path) -> tuple[dict[str, Any], list[Fault]]:
    """The options of a run and its faults, to repeat it; lines may have been taken out by hand."""
    options: dict[str, Any] = {}
    faults = []
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["record"] == "run":
            options = record["options"]
        elif record["record"] == "scheduled":
            faults.append(Fault(**record["fault"]))
    if not options:
        raise ValueError(f"{path} has no record of a run")
    return options, faults
