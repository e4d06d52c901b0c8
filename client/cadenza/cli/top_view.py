"""The view of `cadenza top`."""

from __future__ import annotations

from collections import deque
from datetime import timedelta

from rich.console import Group, RenderableType
from rich.text import Text

from cadenza.cli.text import number, printable, size
from cadenza.top.figures import TIMES, ExecutorFigures, Lost, Snapshot
from cadenza.top.sparkline import sparkline

_HISTORY = 30
"""Intervals that the bars show."""
_NAME_CELLS = 14


class TopView:
    """Draws observations of a server, with bars of earlier intervals."""

    def __init__(self, target: str, *, ascii_only: bool = False) -> None:
        self._target = target
        self._ascii_only = ascii_only
        self._output: deque[float | None] = deque(maxlen=_HISTORY)
        self._kv: deque[float | None] = deque(maxlen=_HISTORY)

    def draw(self, observation: Snapshot | Lost) -> RenderableType:
        """The view after one more interval."""
        if isinstance(observation, Lost):
            self._output.append(None)
            self._kv.append(None)
            return self._lost(observation)
        self._output.append(observation.interval_output_tokens_per_s)
        self._kv.append(observation.kv_use)
        return self._snapshot(observation)

    def _lost(self, lost: Lost) -> RenderableType:
        head = Text.assemble(
            ("cadenza top", "bold"), f"  {self._target}  ", (f"lost for {lost.lost_s:.0f} s", "bold red")
        )
        message = Text(f"{printable(str(lost.error))}\nRetrying.\n", style="red")
        return Group(head, message, *self._bars())

    def _snapshot(self, snapshot: Snapshot) -> RenderableType:
        info = snapshot.info
        head = Text.assemble(("cadenza top", "bold"), f"  {self._target}, {printable(info.version)}, up ")
        head.append(f"{timedelta(seconds=int(info.uptime_s))}, {_resident(info.resident_bytes)}")
        if info.draining:
            head.append(", draining", style="bold yellow")
        parts = [head, Text(f"over {snapshot.window_s:.1f} s\n", style="bright_black")]
        parts += [_line(name, value) for name, value in _server_lines(snapshot)]
        parts += self._bars()
        for index, executor in enumerate(snapshot.executors):
            parts.append(Text())
            parts += _executor_lines(index, executor, snapshot.max_num_seqs)
            parts += _times_lines(executor)
        return Group(*parts)

    def _bars(self) -> list[Text]:
        """A line for each history; none with a single interval."""
        known = [value for value in self._output if value is not None]
        if len(known) < 2:
            return []
        most = max(known)
        lines = []
        for values, top, style, text in (
            (self._output, most, "green", f"output tokens/s, {number(most)} at most"),
            (self._kv, 1.0, "magenta", "KV blocks in use"),
        ):
            bars = sparkline(values, top=top, ascii_only=self._ascii_only)
            lines.append(_line("", Text.assemble((f"{bars:>{_HISTORY}}", style), f"  {text}")))
        return lines


def _server_lines(snapshot: Snapshot) -> list[tuple[str, str]]:
    load = snapshot.info.load
    queues = (
        ("waiting", load.num_waiting, "not empty for", snapshot.waiting_s),
        ("running", load.num_running, "the oldest for", snapshot.running_s),
        ("swapped", load.num_swapped, "the oldest for", snapshot.swapped_s),
    )
    host = f"; host {load.num_used_host_blocks:,} of {load.num_host_blocks:,}" if load.num_host_blocks else ""
    lines = [
        *(
            (name, f"{num:,}" if age_s is None else f"{num:,}, {what} {age_s:.1f} s")
            for name, num, what, age_s in queues
        ),
        (
            "tokens/s",
            f"{number(snapshot.prompt_tokens_per_s)} prompt, {number(snapshot.output_tokens_per_s)} output",
        ),
        (
            "KV blocks",
            f"{load.num_used_device_blocks:,} of {load.num_device_blocks:,} in use ({snapshot.kv_use:.0%}), "
            f"{load.num_cached_device_blocks:,} cached{host}",
        ),
        (
            "preemptions",
            f"{snapshot.num_preemptions:,} ({load.num_preemptions:,} since start); "
            f"{snapshot.num_swapped_out:,} sequences swapped out, {snapshot.num_swapped_in:,} in",
        ),
    ]
    if snapshot.prefix_hit_rate is not None:
        lines.append(("prefix cache", f"{snapshot.prefix_hit_rate:.0%} of the prompt tokens were cached"))
    if snapshot.num_dropped:
        lines.append(("lost", f"{snapshot.num_dropped:,} step records: the figures of steps miss them"))
    return lines


def _executor_lines(index: int, figures: ExecutorFigures, max_num_seqs: int | None) -> list[Text]:
    info = figures.info
    state = Text("connected", style="green") if info.connected else Text("away", style="bold red")
    name = Text.assemble((f"{f'executor {index}':{_NAME_CELLS}}", "bold"), f"{printable(info.target)}, ")
    failed = f", {figures.num_failed_steps:,} failed" if figures.num_failed_steps else ""
    slots = "" if max_num_seqs is None else f" of {max_num_seqs:,}"
    lines = (
        ("", f"incarnation {info.incarnation:016x}, epoch {info.epoch}"),
        (
            "plans",
            f"{info.num_inflight_plans} in flight, step {info.last_step_id:,} done, {_resident(info.resident_bytes)}",
        ),
        ("steps", f"{number(figures.steps_per_s)}/s, busy {figures.busy:.0%}{failed}"),
        ("batch", f"{figures.mean_sequences:.1f}{slots} sequences a step, {figures.max_sequences:,} at most"),
        ("tokens/s", f"{number(figures.prompt_tokens_per_s)} prompt, {number(figures.sampled_tokens_per_s)} sampled"),
    )
    return [name + f"{printable(info.device)}, " + state, *(_line(*line) for line in lines)]


def _times_lines(figures: ExecutorFigures) -> list[Text]:
    """Percentiles of a step's time and of its parts, in milliseconds."""
    lines = [_line("step, ms", Text("".join(f"{name:>8}" for name in TIMES), style="bright_black"))]
    for mark in ("p50", "p99"):
        cells = (figures.times_s.get(name) for name in TIMES)
        values = ("-" if each is None else f"{1e3 * getattr(each, mark):,.2f}" for each in cells)
        lines.append(_line(f"  {mark}", "".join(f"{value:>8}" for value in values)))
    return lines


def _line(name: str, value: str | Text) -> Text:
    return Text.assemble((f"{name:{_NAME_CELLS}}", "cyan"), value)


def _resident(num_bytes: int) -> str:
    return f"{size(num_bytes)} resident" if num_bytes else "memory not known"
