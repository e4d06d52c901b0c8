"""A service as chaos starts it, `python -m tests.chaos.service MODULE …`: its options change between two starts.

The file that CHAOS_OPTIONS names is a JSON object; it is read at each start. `arguments` are added to the executor's.
The scheduler gets `executor`, the address of a relay, in place of the executor's own, which goes to a file for the
relay.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

VARIABLE = "CHAOS_OPTIONS"
ADDRESS_FILE = "executor-address"


def main() -> None:
    """Run the service in this process."""
    _, module, *arguments = sys.argv
    file = Path(os.environ[VARIABLE])
    options = json.loads(file.read_text(encoding="utf-8"))
    if module == "executor_svc":
        arguments += options["arguments"]
    else:
        place = arguments.index("--executor") + 1
        file.with_name(ADDRESS_FILE).write_text(arguments[place], encoding="utf-8")
        arguments[place] = options["executor"]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
