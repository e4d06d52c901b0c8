"""The demo's views: answers side by side as they stream, and the measured summary."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from cadenza_cli.demo.schedule import ScheduleStats

_PROMPT_CELLS = 32


@dataclass(slots=True)
class DemoAnswer:
    """The answer to one prompt as it arrives; times are on the client's monotonic clock, in seconds."""

    index: int  # from 1
    prompt: str
    text: str = ""
    num_tokens: int = 0
    sent_s: float = 0.0
    first_s: float | None = None
    last_s: float | None = None
    finish: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token."""
        return None if self.first_s is None else self.first_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per further token; None with fewer than two tokens."""
        if self.first_s is None or self.last_s is None or self.num_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.num_tokens - 1)

    @property
    def state(self) -> str:
        """The answer's state, in a word."""
        return self.finish or ("answering" if self.num_tokens else "waiting")


def live_table(answers: Sequence[DemoAnswer], width: int) -> Table:
    """All answers, a line each; of long answers the newest part."""
    prompt_cells = min(_PROMPT_CELLS, width // 3)
    table = Table(box=None, padding=(0, 1), width=width)
    table.add_column("", justify="right", style="bright_black", width=2, no_wrap=True)
    table.add_column("prompt", width=prompt_cells, no_wrap=True, overflow="ellipsis", style="bold")
    table.add_column("", width=10, no_wrap=True, style="bright_black")
    table.add_column("tok", justify="right", width=4, no_wrap=True)
    room = max(10, width - prompt_cells - 26)  # 16 for the other columns, 2 of padding for each of the five
    table.add_column("answer", width=room, no_wrap=True)
    for answer in answers:
        shown = Text(tail(answer.text.replace("\n", " "), room), style="" if answer.finish else "green")
        table.add_row(str(answer.index), Text(answer.prompt), answer.state, str(answer.num_tokens), shown)
    return table


def answers_table(answers: Sequence[DemoAnswer], width: int) -> Table:
    """All answers in full; Chinese has no spaces to break at, so full lines are folded."""
    table = Table(box=None, padding=(0, 1), width=width)
    table.add_column("", justify="right", style="bright_black", no_wrap=True)
    table.add_column("prompt", width=min(_PROMPT_CELLS, width // 3), style="bold", overflow="fold")
    table.add_column("answer", ratio=1, overflow="fold")
    for answer in answers:
        table.add_row(str(answer.index), Text(answer.prompt), Text(answer.text))
    return table


def plain_line(answer: DemoAnswer) -> str:
    """One finished answer on one line."""
    text = " ".join(answer.text.split())
    return f"[{answer.index:2}] {answer.prompt} -> {text} ({answer.num_tokens} tokens, {answer.state})"


def tail(text: str, width: int) -> str:
    """The end of `text` that fits `width` terminal cells, after an ellipsis if it was truncated."""
    if cell_len(text) <= width:
        return text
    start = len(text)
    used = 1
    while start > 0 and used + cell_len(text[start - 1]) <= width:
        start -= 1
        used += cell_len(text[start])
    return "…" + text[start:]


def summary_lines(answers: Sequence[DemoAnswer], stats: ScheduleStats, num_slots: int) -> list[tuple[str, str]]:
    """Names and values of all measurements: steps and memory from the records, latencies from the client's clock."""
    occupancy = stats.mean_occupancy / num_slots
    more = stats.num_static_steps - stats.num_steps
    saved = f", {more} more" if more > 0 else ""
    lines = [
        ("steps", f"{stats.num_steps} in {stats.duration_s:.2f} s"),
        (
            "tokens",
            f"{stats.num_prefill_tokens} prompt, {stats.num_output_tokens} output, "
            f"{stats.output_tokens_per_s:.0f} output tokens/s",
        ),
        ("batch", f"{stats.mean_occupancy:.2f} sequences per step, {occupancy:.0%} of {num_slots} slots"),
        (
            "KV blocks",
            f"{stats.mean_used_blocks:.1f} in use on average, {stats.peak_used_blocks} at most, "
            f"{stats.num_blocks} in the pool",
        ),
        ("KV waste", f"{stats.waste:.1%} of the slots in held blocks had no token"),
        ("TTFT", _latency([a.ttft_s for a in answers])),
        ("TPOT", _latency([a.tpot_s for a in answers])),
    ]
    if stats.num_drafts:
        accepted = stats.num_accepted_drafts / stats.num_drafts
        tokens = f"{stats.tokens_per_step:.2f} tokens of a sequence in a step"
        lines.insert(3, ("drafts", f"{tokens}, {accepted:.0%} of {stats.num_drafts} drafts accepted"))
    else:
        static = f"of {num_slots} would take {stats.num_static_steps} steps{saved} (from the same lengths)"
        lines.insert(3, ("static batches", static))
    if stats.num_preemptions:
        lines.insert(3, ("preemptions", str(stats.num_preemptions)))
    if stats.num_unused:
        lines.insert(3, ("dropped", f"{stats.num_unused} tokens computed past an end, since plans run ahead"))
    return lines


def _latency(values: Sequence[float | None]) -> str:
    known = [value * 1000 for value in values if value is not None]
    if not known:
        return "not measured"
    return f"{statistics.median(known):.1f} ms median, {max(known):.1f} ms at most"
