"""The internals of a server, for the second screen of `cadenza top`; its adapters also for the first."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from cadenza.info import AdapterUse, ExecutorInfo, ServerInfo
from cadenza_cli.text import memory_parts, number, printable, size
from cadenza_cli.top.figures import TIMES, ExecutorFigures, ServerFigures
from cadenza_cli.top.lanes import share, tokens_per_step
from cadenza_cli.top.rows import LineGroup, elide, named
from cadenza_cli.wrapping import wrap

_NAME_CELLS = 14
_SERVER_KEEP = 90
"""Rows from this on are of the server as a whole, and come before executors."""
_REASON_LINES = 3
_NUM_SHOWN = 3


def detail_rows(snapshot: ServerFigures, width: int, height: int, *, ascii_only: bool = False) -> list[LineGroup]:
    """The rows for a terminal of `height` lines: the server's most important ones, then a line for each executor that
    fits, then what else there is room for."""
    make = _DetailRows(width, ascii_only)
    server = make.server(snapshot)
    needed = sum(len(row.lines) for row in server if row.keep >= _SERVER_KEEP)
    executors = snapshot.executors
    num_shown = len(executors)
    if num_shown > height - needed:
        num_shown = max(0, height - needed - 1)
    rows = [*server]
    for place, executor in enumerate(executors[:num_shown]):
        rows += make.executor(place, executor, executor.info.max_num_seqs or snapshot.max_num_seqs)
    if num_shown < len(executors):
        rows.append(make.row("", [f"{len(executors) - num_shown} more executors: see --json"], _SERVER_KEEP))
    return rows


class _DetailRows:
    """Makes the rows for one terminal."""

    def __init__(self, width: int, ascii_only: bool) -> None:
        self._width = width
        self._ascii_only = ascii_only

    def row(self, name: str, parts: Sequence[str], keep: float) -> LineGroup:
        """A row of parts."""
        return LineGroup(
            named(name, parts, name_cells=_NAME_CELLS, width=self._width, ascii_only=self._ascii_only), keep
        )

    def server(self, snapshot: ServerFigures) -> list[LineGroup]:
        """What concerns all executors; `_SERVER_KEEP` and more is the most important."""
        load = snapshot.info.load
        ages = {"waiting": snapshot.waiting_s, "running": snapshot.running_s, "swapped": snapshot.swapped_s}
        oldest = [f"{name} {age_s:.1f} s" for name, age_s in ages.items() if age_s is not None]
        blocks = [
            f"{load.num_used_device_blocks:,} of {load.num_device_blocks:,}",
            f"{load.num_cached_device_blocks:,} cached",
        ]
        preempted = [
            f"{snapshot.num_preemptions:,} in {snapshot.window_s:.0f} s",
            f"{load.num_preemptions:,} since the start",
        ]
        swapped = [f"{load.num_swapped:,} now", f"{snapshot.num_swapped_out:,} out", f"{snapshot.num_swapped_in:,} in"]
        if load.num_host_blocks:
            swapped.append(f"host blocks {load.num_used_host_blocks:,} of {load.num_host_blocks:,}")
        rows = [
            self.row("scheduler", [printable(snapshot.info.version), _resident(snapshot.info.resident_bytes)], 30),
            self.row("window", [f"{snapshot.window_s:.1f} s", f"watched for {snapshot.watched_s:.0f} s"], 20),
            self.row("oldest", oldest, 25),
            self.row("KV blocks", blocks, 92),
            self.row("preemptions", preempted, 95),
            self.row("swapped", swapped, 91),
        ]
        if snapshot.num_dropped:
            rows.append(self.row("lost", [f"{snapshot.num_dropped:,} step records"], 97))
        return rows

    def executor(self, place: int, figures: ExecutorFigures, max_num_seqs: int | None) -> list[LineGroup]:
        """One executor's rows; of an executor that comes later, rows are left out first."""
        info = figures.info
        later = place / 1000
        state = {"serving": "connected", "lost": "away"}.get(info.state, info.state)
        head = f"{printable(info.device)}, {state}"
        target = elide(printable(info.target), self._width - _NAME_CELLS - len(head) - 3, ascii_only=self._ascii_only)
        failed = [f"{figures.num_failed_steps:,} failed"] if figures.num_failed_steps else []
        slots = "" if max_num_seqs is None else f" of {max_num_seqs:,}"
        tokens = (figures.prompt_tokens_per_s, figures.sampled_tokens_per_s)
        parts = _drafts(figures)
        drafts = [self.row("  drafts", parts, 58 - later)] if parts else []
        adapters = [loaded_adapters([info])] if info.max_loaded_adapters else []
        reason = [LineGroup(self._indented(info.reason), 84 - later)] if info.reason else []
        return [
            self.row(f"executor {info.index}", [f"{target}, {head}"], 85 - later),
            *reason,
            self.row(
                "  plans", [f"{info.num_inflight_plans} in flight", f"step {info.last_step_id:,} done"], 75 - later
            ),
            self.row("  steps", [f"{number(figures.steps_per_s)}/s", f"busy {figures.busy:.0%}", *failed], 80 - later),
            self.row("  p50/p99 ms", _times(figures)[:1], 82 - later),
            self.row("  of it", _times(figures)[1:], 55 - later),
            self.row(
                "  batch", [f"{figures.mean_sequences:.1f}{slots}", f"{figures.max_sequences:,} at most"], 60 - later
            ),
            *drafts,
            self.row("  tokens/s", [f"{number(tokens[0])} prompt", f"{number(tokens[1])} sampled"], 50 - later),
            self.row("  session", [f"incarnation {info.incarnation:016x}", f"epoch {info.epoch}"], 70 - later),
            *([self.row("  adapters", adapters, 57 - later)] if adapters else []),
            self.row("  memory", [_resident(info.resident_bytes)], 40 - later),
            *([self.row("  of the GPU", memory_parts(info.memory), 38 - later)] if info.memory else []),
        ]

    def _indented(self, sentence: str) -> list[Text]:
        """The first lines of a sentence, below an executor's name."""
        lines = wrap(printable(sentence), max(1, self._width - 2)).splitlines()
        return [Text(f"  {line}"[: self._width], style="red") for line in lines[:_REASON_LINES]]


def _times(figures: ExecutorFigures) -> list[str]:
    """A step's time, p50/p99, then those of its parts."""
    times = [(name, figures.times_s[name]) for name in TIMES if name in figures.times_s]
    return [f"{name} {1e3 * each.p50:,.2f}/{1e3 * each.p99:,.2f}" for name, each in times]


def _drafts(figures: ExecutorFigures) -> list[str]:
    """Nothing if there were no drafts."""
    if figures.acceptance is None:
        return []
    tokens = [] if figures.tokens_per_step is None else [f"{tokens_per_step(figures.tokens_per_step)} tokens a step"]
    return [*tokens, f"{share(figures.acceptance)} accepted", f"{figures.info.max_drafts} at most now"]


def _resident(num_bytes: int) -> str:
    return f"{size(num_bytes)} resident" if num_bytes else "memory not known"


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
