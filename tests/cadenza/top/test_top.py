"""`cadenza top`: the arithmetic over step records, JSON lines, and how it looks."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from datetime import datetime

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from cadenza.cli.app import run
from cadenza.cli.rows import Row, elide, fit, named
from cadenza.cli.text import number, size
from cadenza.cli.top_tenants import age
from cadenza.cli.top_view import Page, TopView
from cadenza.errors import UnavailableError
from cadenza.info import ExecutorInfo, FaultCount, ServerInfo, ServerLoad, TenantInfo
from cadenza.top.figures import Lost, Percentiles, Snapshot, TenantFigures, json_line, percentiles
from cadenza.top.meter import Meter
from cadenza.top.sparkline import sparkline
from cadenza.v1 import admin_pb2 as pb
from cadenza.v1 import execution_pb2

MS = 10**6


def info(now_s: float, *, num_executors: int = 1, **load: int) -> ServerInfo:
    """A server that has been up for `now_s`."""
    executors = [
        ExecutorInfo(f"host:{index}", True, 2**63 + index, 3, "cpu", 16, 2, 40, 2**30, index=index)
        for index in range(num_executors)
    ]
    counts = dict.fromkeys(ServerLoad.__dataclass_fields__, 0) | load
    return ServerInfo("0.1.0", 1, {"max_num_seqs": "4"}, ServerLoad(**counts), executors, now_s, False, 2**20)


def record(
    at_s: float, work=(), *, joined=(), left=(), executor=0, total_ms=10, failed=False, waiting=0, ttfts_ms=(), **fields
):
    """Done at `at_s`. `work`: (sequence, tokens, context length, sampled); `joined`: (sequence, prompt tokens)."""
    columns = list(zip(*work, strict=True)) or [(), (), (), ()]
    status = execution_pb2.STEP_STATUS_FAILED if failed else execution_pb2.STEP_STATUS_OK
    return pb.StepRecord(
        executor_index=executor,
        planned_ns=round(at_s * 1e9),
        applied_ns=round(at_s * 1e9),
        status=status,
        timings=execution_pb2.StepTimings(total_ns=total_ms * MS, device_ns=total_ms * MS // 2),
        sequence_ids=columns[0],
        num_tokens=columns[1],
        context_lens=columns[2],
        num_sampled=columns[3],
        joined=[pb.SequenceJoined(sequence_id=s, num_prompt_tokens=n) for s, n in joined],
        left=[pb.SequenceLeft(sequence_id=s) for s in left],
        first_token_ns=[each * MS for each in ttfts_ms],
        load=pb.StepLoad(num_waiting=waiting),
        **fields,
    )


def busy_interval() -> Snapshot:
    """Two seconds of two sequences on one executor and one on another."""
    meter = Meter(info(10.0, num_executors=2, num_output_tokens=100), 0.0, model="models/a-model")
    records = [
        record(10.5, [(1, 6, 0, 1), (2, 4, 0, 0)], joined=[(1, 6), (2, 5)], waiting=1, ttfts_ms=[20]),
        record(11.0, [(1, 1, 6, 1), (2, 1, 4, 1)], total_ms=30, waiting=1, ttfts_ms=[30]),
        record(11.2, [(7, 1, 9, 1)], executor=1, total_ms=4, waiting=1),
        record(11.5, [(1, 1, 7, 1)], preempted_ids=[2], swapped_out_ids=[2], total_ms=20, waiting=1),
        record(11.6, failed=True, waiting=1),
    ]
    meter.add(records, 0)
    counts = {"num_output_tokens": 105, "num_preemptions": 1, "num_prefix_queries": 20, "num_prefix_hits": 5}
    now = {"num_waiting": 1, "num_running": 2, "num_swapped": 1, "num_device_blocks": 8, "num_used_device_blocks": 2}
    return meter.snapshot(info(12.0, num_executors=2, **counts, **now))


def alone() -> Snapshot:
    """The same server with its first executor alone."""
    return replace(busy_interval(), executors=busy_interval().executors[:1])


def test_rates_are_of_the_window():
    snapshot = busy_interval()
    assert snapshot.window_s == snapshot.watched_s == 2.0
    assert snapshot.output_tokens_per_s == snapshot.interval_output_tokens_per_s == 2.5
    assert snapshot.prompt_tokens_per_s == 5.5, "a chunk of one token that ends its prompt is no output"
    assert (snapshot.num_preemptions, snapshot.num_swapped_out, snapshot.num_swapped_in) == (1, 1, 0)
    assert (snapshot.prefix_hit_rate, snapshot.kv_use, snapshot.max_num_seqs) == (0.25, 0.25, 4)
    assert snapshot.info.load.num_output_tokens == 105


def test_each_executor_has_its_own_steps():
    first, second = busy_interval().executors
    assert (first.num_steps, first.num_failed_steps, first.steps_per_s) == (3, 1, 1.5)
    assert first.mean_sequences == pytest.approx(5 / 3)
    assert (first.max_sequences, first.sampled_tokens_per_s, first.prompt_tokens_per_s) == (2, 2.0, 5.5)
    assert first.busy == pytest.approx(0.06 / 2)
    assert first.times_s["total"] == Percentiles(0.02, pytest.approx(0.0298))
    assert first.times_s["device"].p50 == 0.01
    assert set(first.times_s) == {"total", "device"}, "what is always 0 is not reported"
    assert (second.num_steps, second.sampled_tokens_per_s) == (1, 0.5)
    assert second.times_s["total"] == Percentiles(0.004, 0.004)


def test_time_to_first_token_is_of_the_window_and_of_the_interval():
    assert busy_interval().ttft_s == busy_interval().interval_ttft_s == Percentiles(0.025, pytest.approx(0.0299))
    meter = Meter(info(0.0), 2.0)
    meter.add([record(0.5, ttfts_ms=[10]), record(0.7, ttfts_ms=[30])], 0)
    assert meter.snapshot(info(1.0)).ttft_s == Percentiles(0.02, pytest.approx(0.0298))
    meter.add([record(1.5, [(1, 6, 0, 1)], joined=[(1, 6)], ttfts_ms=[50])], 0)
    snapshot = meter.snapshot(info(2.0))
    assert (snapshot.ttft_s.p50, snapshot.interval_ttft_s.p50) == (0.03, 0.05)
    assert (snapshot.prompt_tokens_per_s, snapshot.interval_prompt_tokens_per_s) == (3.0, 6.0)
    assert meter.snapshot(info(3.0)).interval_ttft_s is None, "no request got its first token"


def test_ages():
    snapshot = busy_interval()
    assert snapshot.waiting_s == pytest.approx(1.5), "the queue has not been empty since"
    assert snapshot.running_s == pytest.approx(1.5), "since the sequence joined"
    assert snapshot.swapped_s == pytest.approx(0.5)
    meter = Meter(info(0.0), 0.0)
    meter.add([record(1.0, [(5, 1, 9, 1)])], 0)
    assert meter.snapshot(info(3.0, num_running=1)).running_s == 2.0, "since it was first seen"
    # Computed once more after its end, since plans run ahead.
    meter.add([record(4.0, [(5, 1, 10, 1)], left=[5]), record(4.1, [(5, 1, 11, 0), (6, 2, 0, 1)], joined=[(6, 2)])], 0)
    assert meter.snapshot(info(5.1, num_running=1)).running_s == pytest.approx(1.0)
    assert meter.snapshot(info(6.0)).running_s is None, "nobody runs, though no record has said so"
    assert meter.snapshot(info(7.0, num_running=1)).running_s is None, "not known"


def test_one_that_comes_back_from_the_host_is_no_longer_swapped():
    meter = Meter(info(0.0), 0.0)
    meter.add([record(1.0, [(1, 4, 0, 1), (2, 4, 0, 1)], joined=[(1, 4), (2, 4)])], 0)
    meter.add([record(2.0, preempted_ids=[1, 2], swapped_out_ids=[1, 2])], 0)
    assert meter.snapshot(info(3.0, num_swapped=2)).swapped_s == 1.0
    meter.add([record(4.0, [(1, 1, 4, 1)], joined=[(1, 4)], swapped_in_ids=[1])], 0)
    snapshot = meter.snapshot(info(6.0, num_swapped=1, num_running=1))
    assert (snapshot.running_s, snapshot.swapped_s, snapshot.num_swapped_in) == (2.0, 4.0, 1)


def test_each_record_is_in_one_interval():
    meter = Meter(info(10.0), 0.0)
    step = [(1, 1, 9, 1)]
    meter.add([record(9.9, step), record(10.5, step), record(11.3, step)], 0)  # before the watch, in time, ahead of it
    assert meter.snapshot(info(11.0)).executors[0].num_steps == 1
    meter.add([record(10.9, step), record(11.5, step)], 0)  # late, in time
    assert meter.snapshot(info(12.0)).executors[0].num_steps == 3
    snapshot = meter.snapshot(info(13.0))
    assert (snapshot.executors[0].num_steps, snapshot.executors[0].times_s) == (0, {})
    assert snapshot.executors[0].busy == snapshot.executors[0].mean_sequences == 0.0


def test_a_window_may_be_longer_than_an_interval():
    meter = Meter(info(0.0), 2.5)
    windows = []
    for second in range(1, 7):
        meter.add([record(second - 0.5, [(1, 1, 9, 1)])], 0)
        snapshot = meter.snapshot(info(float(second), num_output_tokens=second * second))
        windows.append((snapshot.window_s, snapshot.executors[0].num_steps, snapshot.interval_output_tokens_per_s))
        assert snapshot.output_tokens_per_s == (second**2 - (second - snapshot.window_s) ** 2) / snapshot.window_s
    assert windows == [(1, 1, 1), (2, 2, 3), (3, 3, 5), (3, 3, 7), (3, 3, 9), (3, 3, 11)]


def test_after_lost_records_ages_begin_anew():
    meter = Meter(info(0.0), 0.0)
    meter.add([record(1.0, [(1, 4, 0, 1)], joined=[(1, 4)])], 0)
    meter.add([record(3.0, [(2, 1, 8, 1)])], 7)
    snapshot = meter.snapshot(info(4.0, num_running=1))
    assert (snapshot.num_dropped, snapshot.running_s) == (7, 1.0)


def test_percentiles():
    assert percentiles([3.0]) == Percentiles(3.0, 3.0)
    assert percentiles([1.0, 2.0]) == Percentiles(1.5, pytest.approx(1.99))
    assert percentiles([float(value) for value in range(101)]) == Percentiles(50.0, 99.0)


def test_json_lines():
    line = json_line(busy_interval(), target="host:1", time_s=5.0)
    assert "\n" not in line
    data = json.loads(line)
    assert (data["time_s"], data["target"], data["connected"], data["uptime_s"]) == (5.0, "host:1", True, 12.0)
    assert (data["load"]["num_waiting"], data["max_num_seqs"]) == (1, 4)
    assert (data["model"], data["ttft_s"]["p50"], data["kv_use"]) == ("models/a-model", 0.025, 0.25)
    first, second = data["executors"]
    assert (first["index"], second["index"], second["target"]) == (0, 1, "host:1")
    assert second["incarnation"] == "8000000000000001", "too large for a number of JSON"
    assert first["times_s"]["total"]["p50"] == 0.02
    lost = json.loads(json_line(Lost(UnavailableError("gone"), 2.0), target="host:1", time_s=6.0))
    assert lost == {"time_s": 6.0, "target": "host:1", "connected": False, "error": "gone", "lost_s": 2.0}


def test_sparkline():
    assert sparkline([0.0, 1.0, None, 4.0, 9.0], top=8.0) == "▁▂ ▅█"
    assert sparkline([0.0, 8.0, None], top=8.0, ascii_only=True) == "_# "
    assert sparkline([0.0, 0.0], top=0.0) == "▁▁"
    assert sparkline([], top=1.0) == ""


NOON = datetime(2026, 11, 23, 12, 0).timestamp()
LOST = Lost(UnavailableError("no service at 127.0.0.1:50051\x1b[2J: nothing listens there"), 3.4)
SIZES = [(80, 24), (50, 12)]


def view_of(*observations: Snapshot | Lost, ascii_only: bool = False) -> TopView:
    view = TopView("127.0.0.1:50051", ascii_only=ascii_only, now=lambda: NOON)
    for each in observations:
        view.add(each)
    return view


def screen(view: TopView, size: tuple[int, int], *, page: Page = Page.OVERVIEW) -> list[str]:
    """The lines that a terminal of this size shows."""
    console = Console(file=io.StringIO(), width=size[0], height=size[1])
    text = view.screen(*size, page=page, foot="q quit  d details")
    console.print(text, no_wrap=True, overflow="crop")
    lines = [line.rstrip() for line in console.file.getvalue().removesuffix("\n").split("\n")]
    assert len(lines) == size[1]
    assert lines[-1] == "q quit  d details"
    return lines


def large(*, num_executors: int = 1, num_dropped: int = 0) -> Snapshot:
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


def two_lanes() -> Snapshot:
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
    lines = screen(view_of(two_lanes()), (80, 40), page=Page.DETAILS)
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
@pytest.mark.parametrize("page", list(Page))
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
        if page is Page.DETAILS and observations == [large(num_executors=num_executors)]:
            shown = [line for line in lines if line.startswith("executor ")]
            assert shown, "an executor is shown"
            assert any(line.startswith("preemptions") for line in lines), "executors do not push it out"
            rest = num_executors - len(shown)
            assert any(f"{rest} more executors" in line for line in lines) is (rest > 0)


@pytest.mark.parametrize("size", [(26, 8), (10, 3), (1, 1)])
def test_a_terminal_too_small_for_it_is_no_error(size):
    for observations in ([large(num_executors=3)] * 3, [LOST], []):
        for page in Page:
            console = Console(file=io.StringIO(), width=size[0], height=size[1])
            text = view_of(*observations).screen(*size, page=page, foot="q")
            console.print(text, no_wrap=True, overflow="crop")
            lines = console.file.getvalue().removesuffix("\n").split("\n")
            assert len(lines) == size[1]
            assert max(map(cell_len, lines)) <= size[0]


def test_details():
    lines = screen(view_of(busy_interval()), (80, 24), page=Page.DETAILS)
    for line in (
        "KV blocks     2 of 8, 0 cached", "preemptions   1 in 2 s, 1 since the start",
        "swapped       1 now, 1 out, 0 in",
        "executor 1    host:1, cpu, connected", "  plans       2 in flight, step 40 done",
        "  steps       1.5/s, busy 3%, 1 failed", "  p50/p99 ms  total 20.00/29.80", "  of it       device 10.00/14.90",
    ):  # fmt: skip
        assert line in lines
    with_host = info(12.0, num_host_blocks=64, num_used_host_blocks=3)
    lines = screen(view_of(replace(busy_interval(), info=with_host)), (80, 24), page=Page.DETAILS)
    assert "swapped       0 now, 1 out, 0 in, host blocks 3 of 64" in lines
    lines = screen(view_of(alone()), (80, 24), page=Page.DETAILS)
    assert "  session     incarnation 8000000000000000, epoch 3" in lines
    assert "oldest        waiting 1.5 s, running 1.5 s, swapped 0.5 s" in lines
    assert not any(line.startswith("lost") for line in lines)
    low = screen(view_of(replace(alone(), num_dropped=2)), (50, 12), page=Page.DETAILS)
    assert "lost          2 step records" in low
    assert "  p50/p99 ms  total 20.00/29.80" in low


def shared(*, num_tenants: int = 2, num_kinds: int = 2) -> Snapshot:
    """A server with tenants, the second of which was refused something, and with faults."""
    tenants = [
        TenantFigures(TenantInfo(f"team-{place}", 1, 2 * place, 900, 5_000, 7 * place, 4.0), 12.5, place)
        for place in range(num_tenants)
    ]
    kinds = (
        "executor_lost",
        "request_failed",
        "step_failed",
        "request_moved",
        "executor_stalled",
        "request_refused",
        "executor_restarted",
        "executor_refused",
        "request_suspected",
        "journal_failed",
    )[:num_kinds]
    faults = [
        FaultCount(kind, 3 + place, (200.0, 12.0, 7_300.0, *[90_000.0] * 7)[place], "host:1")
        for place, kind in enumerate(kinds)
    ]
    snapshot = busy_interval()
    return replace(snapshot, tenants=tenants, info=replace(snapshot.info, faults=faults))


def test_tenants_and_faults_have_a_screen():
    lines = screen(view_of(shared(num_kinds=3)), (80, 24), page=Page.TENANTS)
    assert lines[1:10] == [
        "tenant  running  waiting  tokens/s  refused  queued tokens  weight",
        "team-0        0        1      12.5        0            900       4",
        "team-1        2        1      12.5        7            900       4",
        "",
        "fault           count       last  executor",
        "request failed      4   12 s ago    host:1",
        "executor lost       3  3 min ago    host:1",
        "step failed         5    2 h ago    host:1",
        "",
    ]
    red = [line.plain for line in view_of(shared())._lines(80, 23, Page.TENANTS) if "red" in str(line.spans)]
    assert [line.split("  ")[0] for line in red] == ["team-1", "request failed"], "refused lately, failed lately"
    assert [age(each) for each in (0.4, 59.9, 60.0, 3_600.0, 200_000.0)] == [
        "0 s ago", "59 s ago", "1 min ago", "1 h ago", "2 d ago"
    ]  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
def test_many_tenants_and_all_kinds_of_faults_share_a_screen(size):
    lines = screen(view_of(shared(num_tenants=40, num_kinds=10)), size, page=Page.TENANTS)
    shown = [line for line in lines if line.startswith("team-")]
    assert len(shown) >= 2
    assert any(line.startswith(f"{40 - len(shown)} more tenants") for line in lines)
    assert lines[lines.index("") + 2].startswith("request failed"), "the newest fault comes first"
    assert max(map(len, lines)) <= size[0]


def test_a_server_without_tenants_and_faults_says_so():
    lines = screen(view_of(busy_interval()), (80, 24), page=Page.TENANTS)
    assert lines[1:4] == ["tenants: the server has no tenants file", "", "no faults since the start"]


@pytest.mark.parametrize("size", SIZES)
def test_the_first_screen_names_the_newest_faults(size):
    lines = screen(view_of(shared(num_kinds=4)), size)
    at = next(place for place, line in enumerate(lines) if line.startswith("faults"))
    text = " ".join(line[17:] for line in lines[at : at + 3])
    assert text.startswith("request failed 4 (12 s ago), executor lost 3 (3 min ago), 2 more kinds")
    assert any(line.startswith("KV used") for line in lines), "faults do not push the totals out"
    assert not any(line.startswith("faults") for line in screen(view_of(busy_interval()), size))


def test_the_figures_of_a_tenant_are_of_the_window():
    def server(now_s: float, *counts: tuple[str, int, int]) -> ServerInfo:
        return replace(info(now_s), tenants=[TenantInfo(name, 0, 0, 0, tokens, no, 1.0) for name, tokens, no in counts])

    meter = Meter(server(10.0, ("gone", 5, 0), ("a", 100, 2)), 0.0)
    a, b = meter.snapshot(server(12.0, ("a", 150, 5), ("b", 8, 1))).tenants
    assert (a.output_tokens_per_s, a.num_rejected_in_window) == (25.0, 3)
    assert (b.output_tokens_per_s, b.num_rejected_in_window) == (4.0, 1), "it is new"


def test_tenants_and_faults_are_in_json_and_in_a_pipe():
    data = json.loads(json_line(shared(), target="host:1", time_s=5.0))
    assert (data["tenants"][1]["name"], data["tenants"][1]["num_rejected"]) == ("team-1", 7)
    assert data["tenants"][1]["num_rejected_in_window"] == 1
    assert data["faults"][0] == {
        "kind": "executor_lost", "count": 3, "last_age_s": 200.0, "last_executor": "host:1"
    }  # fmt: skip
    assert "team-1        2        1" in view_of(shared()).whole(100).plain


def test_without_the_characters_for_bars():
    for observations in ([large()] * 50, [large(num_executors=3)], [busy_interval(), LOST]):
        view = view_of(*observations, ascii_only=True)
        for each in SIZES:
            for page in Page:
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
    rows = [Row([Text("a"), Text("b")], 1), Row([Text("c")], 3), Row([Text("d"), Text("e")], 2)]
    assert [[line.plain for line in fit(rows, height)] for height in (1, 2, 3, 5)] == [
        ["c"], ["c"], ["c", "d", "e"], ["a", "b", "c", "d", "e"]
    ]  # fmt: skip
    assert [elide("abcdef", width) for width in (6, 5, 1, 0)] == ["abcdef", "…cdef", "…", ""]
    assert cell_len(elide("你好你好", 5)) == 5
    lines = named("name", ["one", "two", "three and more"], name_cells=6, width=16)
    assert [line.plain for line in lines] == ["name  one, two,", "      …and more"]


@pytest.mark.parametrize("interval", ["0", "nan", "1e9"])
def test_an_interval_that_cannot_be(interval, capsys):
    assert run(["top", "--interval", interval]) == 2
    assert capsys.readouterr().err.startswith("cadenza: option interval: must be 0.1 to 600 seconds, not ")


def test_numbers_and_sizes():
    assert [number(value) for value in (0, 12.345, 999.4, 999.6, 12345.6, None)] == [
        "0", "12.3", "999", "1,000", "12,346", "-"
    ]  # fmt: skip
    assert [size(value) for value in (512, 3 * 2**30, 2**50)] == ["0.5 KiB", "3.0 GiB", "1024.0 TiB"]
