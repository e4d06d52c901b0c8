"""`cadenza ps`: the servers that this user runs on this machine."""

from __future__ import annotations

import time

from cadenza_cli.load.results import tables_console

HELP = """List the servers that you have started on this machine: `cadenza up`, and LLM(...) in programs.

Of several models behind one door there is a line for the door and one for each that is loaded. Services that
were started one by one are not listed. `cadenza top --target HOST:PORT` shows what one does.
"""
EPILOG = "Exit codes: 0 success."


def ps() -> None:
    """Print the servers whose process lives."""
    from rich.table import Table

    from cadenza_common.hub.download import human
    from cadenza_common.run_files import read_runs

    console = tables_console()
    table = Table("model", "target", "http", "pid", "memory", "since", box=None, header_style="bold")
    table.columns[0].overflow = "fold"
    runs = list(read_runs("servers"))
    for run in runs:
        # The services of one of several models are children of the process that is a server of all.
        others = {
            pid for each in runs if each["pid"] == run["pid"] and "pids" not in run for pid in each.get("pids", ())
        }
        memory = sum(_memory(pid) for pid in run.get("pids", [run["pid"]])) - sum(map(_memory, others))
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(run["created"]))
        table.add_row(run["model"], run["target"], run["http"] or "", str(run["pid"]), human(memory), since)
    console.print(table if table.row_count else "no servers run here: cadenza up MODEL")


def _memory(pid: int) -> int:
    """Return the resident bytes of a process and its children; 0: it has gone."""
    import psutil

    try:
        parent = psutil.Process(pid)
        return sum(each.memory_info().rss for each in (parent, *parent.children(recursive=True)))
    except psutil.Error:
        return 0
