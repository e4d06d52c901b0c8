"""The LoRA adapters of a server in a few words, for `cadenza top`."""

from __future__ import annotations

from collections.abc import Sequence

from cadenza.info import AdapterUse, ExecutorInfo, ServerInfo
from cadenza_cli.text import printable

_NUM_SHOWN = 3


def adapter_parts(info: ServerInfo) -> list[str]:
    """How many adapters are loaded, and the requests of those with the most; empty if none is loaded or used."""
    uses = info.adapters
    if not uses and not any(each.num_loaded_adapters for each in info.executors):
        return []
    more = len(uses) - _NUM_SHOWN
    rest = [f"{more} more in use"] if more > 0 else []
    return [loaded_adapters(info.executors), *map(_use, uses[:_NUM_SHOWN]), *rest]


def loaded_adapters(executors: Sequence[ExecutorInfo]) -> str:
    """The loaded adapters of executors and the most that they may have, all together."""
    most = sum(each.max_loaded_adapters for each in executors)
    return f"{sum(each.num_loaded_adapters for each in executors):,} of {most:,} loaded"


def _use(use: AdapterUse) -> str:
    waiting = f" + {use.num_waiting:,} waiting" if use.num_waiting else ""
    return f"{printable(use.name)} {use.num_running:,}{waiting}"
