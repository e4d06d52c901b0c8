"""How `cadenza top` looks."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from cadenza.info import ExecutorInfo, ServerLoad
from cadenza_cli.top.figures import Percentiles, ServerFigures
from cadenza_cli.top.meter import Meter
from cadenza_cli.top.rows import LineGroup, elide, fit, named
from cadenza_cli.top.view import Screen
from tests.helpers.client.top_figures import LOST, SIZES, alone, busy_interval, drafting, info, record, screen, view_of


def large(*, num_executors: int = 1, num_dropped: int = 0) -> ServerFigures:
    """A snapshot with the largest numbers and names that are likely."""
    one, load = busy_interval().executors[0], dict.fromkeys(ServerLoad.__dataclass_fields__, 1234567)
    about = replace(one.info, target="executor-7.inference.example.org:50052", device="cuda:0 (NVIDIA H100 80GB HBM3)")
    times = {name: Percentiles(1.23456, 12.3456) for name in ("total", "queue", "device", "sample", "moves")}
    about = replace(about, num_running=1234567, num_waiting=1234567, num_device_blocks=9, num_used_device_blocks=9)
    one = replace(one, times_s=times, output_tokens_per_s=1_234_567.8, prefix_hit_rate=1.0)
    executors = [replace(one, info=replace(about, epoch=2**50, index=index)) for index in range(num_executors)]
    return replace(
        busy_interval(),
        info=replace(info(1e7), load=ServerLoad(**load)),
        model="organisation-with-a-name/A-Model-Of-Some-Size-70B-Instruct-v2.5-FP8",
        prompt_tokens_per_s=1_234_567.8, output_tokens_per_s=123_456.7, interval_output_tokens_per_s=99_999_999.0,
        waiting_s=98_765.4, running_s=98_765.4, swapped_s=98_765.4, num_preemptions=1_234_567, num_swapped_in=999_999,
        num_dropped=num_dropped, executors=executors,
    )  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
def test_the_first_screen_is_in_users_words(size):
    lines = screen(view_of(*[alone()] * 3), size)
    for name, value in (
        ("model", "models/a-model"), ("device", "cpu"), ("up since", "11:59 (0:00:12)"), ("running", "2 "),
        ("waiting", "1 "), ("prompt tokens/s", "5.5 "), ("output tokens/s", "2.5 "), ("TTFT p50", "25 ms "),
        ("KV used", "25% "), ("prefix hit rate", "25% "),
    ):  # fmt: skip
        assert any(line.startswith(f"{name:17}{value}") for line in lines), name
    assert not any(word in " ".join(lines) for word in ("incarnation", "epoch", "plans", "p99", "preempt", "swap"))
    assert sum("███" in line for line in lines) == 5, "bars of the last three intervals"
    assert sum("▃▃▃" in line for line in lines) == 2, "shares have the full height at 100%"


def two_lanes() -> ServerFigures:
    """An executor that serves, and one that is refused."""
    first, second = busy_interval().executors
    serving = replace(
        first.info, num_running=3, num_waiting=12, num_device_blocks=8, num_used_device_blocks=2, max_num_seqs=7
    )
    refused = replace(second.info, connected=False, refusal="it serves another model, models/b\x1b")
    executors = [
        replace(first, info=serving, output_tokens_per_s=1234.5, prefix_hit_rate=0.5),
        replace(second, info=refused, times_s={}),
    ]
    return replace(busy_interval(), executors=executors)


def test_drafts_are_shown_where_there_are_any():
    lines = screen(view_of(drafting()), (80, 24))
    assert "tokens a step    2.00" in lines
    assert "drafts accepted  62%" in lines
    wide = screen(view_of(drafting()), (120, 24))
    (heading,) = (line for line in wide if line.startswith("executor"))
    assert heading.split()[-3:] == ["hits", "tokens/step", "accepted"]
    rows = [line.split() for line in wide if line.startswith("host:")]
    assert [row[-2:] for row in rows] == [["2.25", "62%"], ["-", "-"]]
    details = screen(view_of(drafting()), (80, 40), page=Screen.DETAILS)
    assert [line for line in details if line.startswith("  drafts")] == [
        "  drafts      2.25 tokens a step, 62% accepted, 3 at most now"
    ]
    for size, page in ((each, page) for each in ((120, 40), *SIZES) for page in Screen):
        text = " ".join(screen(view_of(two_lanes()), size, page=page))
        assert "draft" not in text
        assert "accepted" not in text
        assert max(map(cell_len, screen(view_of(drafting()), size, page=page))) <= size[0]
    view = view_of(drafting(), busy_interval())
    assert "tokens a step    -" in [line[:18] for line in screen(view, (80, 24))], "there were some lately"


def test_the_figures_of_each_executor_are_of_the_window():
    """Counts are compared by index: an executor that left does not shift those after it."""

    def executor(index: int, tokens: int, queries: int, hits: int) -> ExecutorInfo:
        counts = {"num_output_tokens": tokens, "num_prefix_queries": queries, "num_prefix_hits": hits}
        return replace(info(0.0).executors[0], index=index, **counts)

    meter = Meter(replace(info(10.0), executors=[executor(0, 9, 9, 9), executor(1, 100, 40, 10)]), 0.0)
    meter.add([record(10.5, [(1, 1, 9, 1)], executor=1), record(11.0, [(2, 1, 9, 1)], executor=2)], 0)
    now = replace(info(12.0), executors=[executor(1, 150, 60, 15), executor(2, 8, 0, 0)])
    second, third = meter.snapshot(now).executors
    assert (second.output_tokens_per_s, second.prefix_hit_rate, second.num_steps) == (25.0, 0.25, 1)
    assert (third.output_tokens_per_s, third.prefix_hit_rate, third.num_steps) == (4.0, None, 1), "it joined"


def test_several_executors_have_a_line_each_below_the_totals():
    lines = screen(view_of(two_lanes()), (80, 24))
    start = next(place for place, line in enumerate(lines) if line.startswith("executor"))
    assert lines[start : start + 3] == [
        "executor  state     running  waiting    KV  tokens/s     step  hits",
        "host:0    serving         3       12   25%     1,234    20 ms   50%",
        "host:1    refused         0        0     -         0        -     -",
    ]
    assert "running          2" in [line[:18] for line in lines[:start]]
    narrow = screen(view_of(two_lanes()), (50, 12))
    assert "executor  state     running    KV  tokens/s" in narrow, "less important columns are left out"
    assert [line[:16] for line in narrow if line.startswith("host:")] == ["host:0    servin", "host:1    refuse"]
    assert any(line.startswith("TTFT p50") for line in narrow), "executors do not push the totals out"
    many = replace(two_lanes(), executors=[two_lanes().executors[0]] * 30)
    lines = screen(view_of(many), (80, 24))
    num_shown = sum(line.startswith("host:") for line in lines)
    assert num_shown > 5
    assert f"{30 - num_shown} more executors" in lines
    assert not any(line.startswith("host:") for line in screen(view_of(alone()), (80, 24)))


def test_the_state_of_an_executor_and_its_reason_are_in_the_details():
    lines = screen(view_of(two_lanes()), (80, 40), page=Screen.DETAILS)
    at = lines.index("executor 1    host:1, cpu, refused")
    assert lines[at + 1] == "  it serves another model, models/b"
    assert "  batch         1.7 of 7, 2 at most" in lines or "  batch       1.7 of 7, 2 at most" in lines
    one = info(0.0).executors[0]
    states = [
        replace(one, refusal="no").state, replace(one, connected=False, stalled_step_id=3).state,
        replace(one, stalled_step_id=3, draining=True).state, replace(one, draining=True).state, one.state,
    ]  # fmt: skip
    assert states == ["refused", "lost", "stalled", "draining", "serving"]
    assert replace(one, stalled_step_id=3, stalled_s=12.4).reason == "step 3 has run for 12 s"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("page", list(Screen))
@pytest.mark.parametrize("num_executors", [1, 2, 9])
def test_every_screen_fits(size, page, num_executors):
    for observations in (
        [large(num_executors=num_executors)], [large(num_executors=num_executors, num_dropped=10**6)] * 99,
        [busy_interval()] * 99, [LOST], [busy_interval(), LOST],
    ):  # fmt: skip
        view = view_of(*observations)
        text = view.screen(*size, page=page, foot="q quit  d details").plain.splitlines()
        assert len(text) == size[1]
        assert max(map(cell_len, text)) <= size[0], "no line is wrapped or cut"
        lines = screen(view, size, page=page)
        assert lines[0].startswith("cadenza top  127.0.0.1:50051")
        if page is Screen.DETAILS and observations == [large(num_executors=num_executors)]:
            shown = [line for line in lines if line.startswith("executor ")]
            assert shown, "an executor is shown"
            assert any(line.startswith("preemptions") for line in lines), "executors do not push it out"
            rest = num_executors - len(shown)
            assert any(f"{rest} more executors" in line for line in lines) is (rest > 0)


@pytest.mark.parametrize("size", [(26, 8), (10, 3), (1, 1)])
def test_a_terminal_too_small_for_it_is_no_error(size):
    for observations in ([large(num_executors=3)] * 3, [LOST], []):
        for page in Screen:
            console = Console(file=io.StringIO(), width=size[0], height=size[1])
            text = view_of(*observations).screen(*size, page=page, foot="q")
            console.print(text, no_wrap=True, overflow="crop")
            lines = console.file.getvalue().removesuffix("\n").split("\n")
            assert len(lines) == size[1]
            assert max(map(cell_len, lines)) <= size[0]


def test_details():
    lines = screen(view_of(busy_interval()), (80, 24), page=Screen.DETAILS)
    for line in (
        "KV blocks     2 of 8, 0 cached", "preemptions   1 in 2 s, 1 since the start",
        "swapped       1 now, 1 out, 0 in",
        "executor 1    host:1, cpu, connected", "  plans       2 in flight, step 40 done",
        "  steps       1.5/s, busy 3%, 1 failed", "  p50/p99 ms  total 20.00/29.80", "  of it       device 10.00/14.90",
    ):  # fmt: skip
        assert line in lines
    with_host = info(12.0, num_host_blocks=64, num_used_host_blocks=3)
    lines = screen(view_of(replace(busy_interval(), info=with_host)), (80, 24), page=Screen.DETAILS)
    assert "swapped       0 now, 1 out, 0 in, host blocks 3 of 64" in lines
    lines = screen(view_of(alone()), (80, 24), page=Screen.DETAILS)
    assert "  session     incarnation 8000000000000000, epoch 3" in lines
    assert "oldest        waiting 1.5 s, running 1.5 s, swapped 0.5 s" in lines
    assert not any(line.startswith("lost") for line in lines)
    low = screen(view_of(replace(alone(), num_dropped=2)), (50, 12), page=Screen.DETAILS)
    assert "lost          2 step records" in low
    assert "  p50/p99 ms  total 20.00/29.80" in low


def test_without_the_characters_for_bars():
    for observations in ([large()] * 50, [large(num_executors=3)], [busy_interval(), LOST]):
        view = view_of(*observations, ascii_only=True)
        for each in SIZES:
            for page in Screen:
                assert "\n".join(screen(view, each, page=page)).isascii()


def test_everything_goes_into_a_pipe():
    text = view_of(busy_interval()).whole(100).plain
    assert text.startswith("cadenza top  127.0.0.1:50051\nmodel            models/a-model\n")
    assert "TTFT p50         25 ms\n" in text, "one interval has no history"
    assert "executor 1    host:1, cpu, connected\n" in text
    assert all(line == line.rstrip() for line in text.splitlines())


@pytest.mark.parametrize("size", SIZES)
def test_the_picture_of_a_server_that_is_lost(size):
    lines = screen(view_of(busy_interval(), busy_interval(), LOST), size)
    assert lines[0] == "cadenza top  127.0.0.1:50051  lost for 3 s"
    assert " ".join(lines[1:3]).startswith("no service at 127.0.0.1:50051[2J: nothing listens there")
    assert any(line.startswith("output tokens/s  -          ██") for line in lines)
    away = replace(busy_interval().executors[0], info=replace(busy_interval().executors[0].info, connected=False))
    lines = screen(view_of(replace(busy_interval(), executors=[away])), size)
    assert "away             1 of 1 executors" in lines


def test_what_matters_most_is_kept():
    rows = [LineGroup([Text("a"), Text("b")], 1), LineGroup([Text("c")], 3), LineGroup([Text("d"), Text("e")], 2)]
    assert [[line.plain for line in fit(rows, height)] for height in (1, 2, 3, 5)] == [
        ["c"], ["c"], ["c", "d", "e"], ["a", "b", "c", "d", "e"]
    ]  # fmt: skip
    assert [elide("abcdef", width) for width in (6, 5, 1, 0)] == ["abcdef", "…cdef", "…", ""]
    assert cell_len(elide("你好你好", 5)) == 5
    lines = named("name", ["one", "two", "three and more"], name_cells=6, width=16)
    assert [line.plain for line in lines] == ["name  one, two,", "      …and more"]
