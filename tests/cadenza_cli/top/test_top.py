"""`cadenza top`: the arithmetic over step records, and JSON lines."""

from __future__ import annotations

import json

import pytest

from cadenza.errors import UnavailableError
from cadenza_cli.app import run
from cadenza_cli.text import number, size
from cadenza_cli.top.figures import Lost, Percentiles, json_line, percentiles
from cadenza_cli.top.meter import Meter
from cadenza_cli.top.rows import sparkline
from tests.helpers.client.top_figures import busy_interval, drafting, info, record


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


def test_tokens_a_step_are_of_sequences_that_decode():
    """Neither prompts, nor a first token with a prompt's last one, nor what was dropped counts."""
    snapshot = drafting()
    first, second = snapshot.executors
    assert (first.tokens_per_step, first.acceptance) == ((3 + 4 + 1 + 1) / 4, 5 / 8)
    assert (second.tokens_per_step, second.acceptance) == (None, None), "it has no drafts"
    assert snapshot.tokens_per_step == snapshot.interval_tokens_per_step == 10 / 5
    assert snapshot.acceptance == snapshot.interval_acceptance == 5 / 8
    assert snapshot.prompt_tokens_per_s == (6 + 1 + 1) / 2
    assert busy_interval().tokens_per_step is busy_interval().acceptance is None
    data = json.loads(json_line(snapshot, target="host:1", time_s=5.0))
    assert (data["tokens_per_step"], data["executors"][0]["acceptance"]) == (2.0, 0.625)
    assert (data["load"]["num_drafts"], data["executors"][0]["max_drafts"]) == (108, 3)


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


@pytest.mark.parametrize("interval", ["0", "nan", "1e9"])
def test_an_interval_that_cannot_be(interval, capsys):
    assert run(["top", "--interval", interval]) == 2
    assert capsys.readouterr().err.startswith("cadenza: option interval: must be 0.1 to 600 seconds, not ")


def test_numbers_and_sizes():
    assert [number(value) for value in (0, 12.345, 999.4, 999.6, 12345.6, None)] == [
        "0", "12.3", "999", "1,000", "12,346", "-"
    ]  # fmt: skip
    assert [size(value) for value in (512, 3 * 2**30, 2**50)] == ["0.5 KiB", "3.0 GiB", "1024.0 TiB"]
