"""`python -m tests.simulation.find_bugs`: the first history that shows each seeded bug, for `found_in`; minutes."""

from __future__ import annotations

from tests.simulation.history import HistoryError
from tests.simulation.many import run_chunk
from tests.simulation.seeded_bugs import NUM_SEARCHED, SEEDED_BUGS, seeded


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
