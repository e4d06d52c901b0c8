"""`python -m tests.simulation.bugs.find_bugs`: the first history that shows each bug, for `found_in`; in minutes."""

from __future__ import annotations

from tests.simulation.bugs.seeded_bugs import NUM_SEARCHED, SEEDED_BUGS, seeded
from tests.simulation.history import HistoryError
from tests.simulation.many import run_chunk


def main() -> None:
    for bug in SEEDED_BUGS:
        with seeded(bug):
            try:
                run_chunk(range(NUM_SEARCHED))
            except HistoryError as error:
                print(f"{error.seed:5}  {bug.name}", flush=True)
            else:
                print(f" none  {bug.name}", flush=True)


if __name__ == "__main__":
    main()
