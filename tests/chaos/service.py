"""A service as chaos starts it, `python -m tests.chaos.service MODULE …`: its options change between two starts.

The folder that CHAOS_FOLDER names holds them, and they are read at each start. An executor adds the arguments of
`executor-PORT.json`, or of `executor.json`. The scheduler gets the entries of `scheduler.json`, which lead to relays,
in place of the executors' own addresses, which go to a file for the relays.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

VARIABLE = "CHAOS_FOLDER"
ADDRESSES_FILE = "executor-addresses"


def main() -> None:
    """Run the service in this process."""
    _, module, *arguments = sys.argv
    folder = Path(os.environ[VARIABLE])
    if module == "executor_svc":
        address = arguments[arguments.index("--listen") + 1]
        own = options_file(folder, address)
        file = own if own.exists() else folder / "executor.json"
        arguments += json.loads(file.read_text(encoding="utf-8"))
    else:
        arguments = _through_relays(arguments, folder)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def options_file(folder: Path, address: str) -> Path:
    """The file of one executor."""
    return folder / f"executor-{address.rpartition(':')[2]}.json"


def _through_relays(arguments: list[str], folder: Path) -> list[str]:
    addresses = []
    while "--executor" in arguments:
        place = arguments.index("--executor")
        addresses.append(arguments[place + 1])
        del arguments[place : place + 2]
    new = folder / f"{ADDRESSES_FILE}.new"
    new.write_text("\n".join(addresses), encoding="utf-8")
    new.replace(folder / ADDRESSES_FILE)  # a relay may read it now
    entries = json.loads((folder / "scheduler.json").read_text(encoding="utf-8"))
    return [*arguments, *(part for entry in entries for part in ("--executor", entry))]


if __name__ == "__main__":
    main()
