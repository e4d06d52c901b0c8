"""Plays a new user's first minutes: every command of the READMEs and the quickstart, in terminals of two sizes.

    python -m tests.first_minutes                     the wheel, built now, beside this environment's packages
    python -m tests.first_minutes --place installed   the wheel and all that it needs, installed anew
    python -m tests.first_minutes --place clone       a fresh clone: `make demo` and `make install` too
    python -m tests.first_minutes --pictures DIR      also keeps screens of a busy server as SVG, for docs/figures

Prints a line for each command, and exits with 1 if one of them did not do what its page says.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.first_minutes.pages import all_commands
from tests.first_minutes.pictures import take_pictures
from tests.first_minutes.places import clone_place, installed_place, wheel_place
from tests.first_minutes.play import play_all

SIZES = ((80, 24), (50, 12))
_PLACES = {"wheel": wheel_place, "installed": installed_place, "clone": clone_place}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--place", choices=_PLACES, default="wheel")
    parser.add_argument("--quick", action="store_true", help="leave out what takes longer than seconds")
    parser.add_argument("--pictures", type=Path, help="folder for the pictures")
    options = parser.parse_args()
    failed = 0
    for size in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            home = Path(folder) / "home"
            home.mkdir()
            place = _PLACES[options.place](Path(folder))
            for played in play_all(place, size, all_commands(), home=home, quick=options.quick):
                outcome = played.problem or "ok"
                print(f"{size[0]}x{size[1]} {played.seconds:6.1f} s  {played.line}  {outcome}", flush=True)
                failed += bool(played.problem)
            if options.pictures is not None:
                take_pictures(place, size, home, options.pictures)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
