"""`python -m cadenza`: the `cadenza` command if its script is not on the path."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points


def main() -> None:
    """Run the command that this installation has; the client alone has none."""
    for command in entry_points(group="console_scripts", name="cadenza"):
        command.load()()
    sys.exit("cadenza: this is the client alone; a wheel of all of Cadenza has the command")


if __name__ == "__main__":
    main()
