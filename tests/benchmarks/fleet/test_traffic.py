"""A fleet's traffic: public traces in their own formats, copies of them, and days drawn from statistics."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.fleet.arrivals import (
    DAY_S,
    MIXES,
    Arrivals,
    ChunkedTraffic,
    DrawnTraffic,
    MixName,
    day_factor,
    day_peak,
)
from benchmarks.fleet.traces import TraceTraffic, read_trace
from cadenza_loadtest.requests import LoadTestError

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:56.6805900,879,55
"""
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,API log
"""


def mooncake(*rows: tuple[int, int, int, list[int]]) -> str:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    return "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)


def write(folder: Path, text: str, name: str = "trace.csv") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def all_of(source: ChunkedTraffic, until_s: float, slice_s: float) -> list[tuple[float, int, int, int, int]]:
    found, count = [], round(until_s / slice_s)
    for place in range(count):
        taken = source.take(place * slice_s, (place + 1) * slice_s)
        assert ((taken.due_s >= place * slice_s) & (taken.due_s < (place + 1) * slice_s)).all()
        columns = (taken.due_s, taken.prompt, taken.output, taken.session, taken.shared)
        found += list(zip(*(column.tolist() for column in columns), strict=True))
    return found


def test_azures_and_bursts_traces(tmp_path: Path) -> None:
    azure = read_trace(write(tmp_path, AZURE)).requests
    assert azure.due_s == pytest.approx([0, 4.314579, 10.0])
    assert (azure.prompt.tolist(), azure.output.tolist()) == ([374, 396, 879], [44, 109, 55])
    assert azure.session.tolist() == [-1, -1, -1]
    burst = read_trace(write(tmp_path, BURST)).requests
    assert (burst.due_s.tolist(), burst.prompt.tolist()) == ([0.0, 113.0], [472, 417])


def test_mooncakes_trace_has_sessions_and_a_shared_beginning(tmp_path: Path) -> None:
    """Block 0 begins all prompts, and nine different ones follow it; the last two requests continue the first."""
    rows = [(1000 * place, 900, 10, [0, 100 + place]) for place in range(9)]
    rows += [(9000, 1500, 20, [0, 100, 50]), (9500, 1400, 20, [0, 100, 60])]
    trace = read_trace(write(tmp_path, mooncake(*rows), "trace.jsonl"))
    assert (trace.num_sessions, trace.num_groups) == (9, 1)
    found = trace.requests
    assert found.session.tolist() == [*range(9), 0, 0]
    assert found.fresh.tolist() == [True] * 9 + [False] * 2
    assert found.shared.tolist() == [0] * 9 + [1024, 1024]
    assert found.group_tokens.tolist() == [512] * 11


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (AZURE.replace("396", "many"), "line 3: prompt_tokens: input should be a valid integer"),
        (AZURE.replace("18:15:56", "18:15:40"), "line 4: timestamp: is earlier than the one before; sort the file"),
        ("prompt_tokens,output_len\n1,2\n", "line 2: timestamp is missing"),
        ("timestamp,prompt_tokens\n1,2\n", "line 2: output_len is missing"),
        ("timestamp,prompt_tokens,output_len,session\n1,2,3,4\n", "line 2: session: turns have no times"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no request"),
        (mooncake((0, 600, 5, [1])), "line 1: block_ids must have one id for each 512"),
        (mooncake((0, 6, 5, [1])) + '{"timestamp": 3, "input_length": 4}\n', "line 2: output_length is missing"),
        (mooncake((0, 6, 5, [1])) + "oops\n", "line 2: this is not JSON"),
        (mooncake((0, 6, 5, [1])).replace("0, ", '"0", ', 1), "line 1: timestamp: must be milliseconds, not '0'"),
    ],
)
def test_a_wrong_trace_is_named_with_its_line(tmp_path: Path, text: str, problem: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(LoadTestError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"--traffic {path}")
    assert problem in str(caught.value)


def test_a_missing_trace(tmp_path: Path) -> None:
    with pytest.raises(LoadTestError, match=r"--traffic /nowhere.csv: no such file"):
        read_trace("/nowhere.csv")


def test_a_trace_repeats_as_it_is(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, AZURE))
    assert trace.duration_s == pytest.approx(15.0)
    found = all_of(TraceTraffic(trace, None, seed=0), 30.0, 2.5)
    assert [row[0] for row in found] == pytest.approx([0, 4.314579, 10, 15, 19.314579, 25])
    assert [row[1] for row in found] == [374, 396, 879] * 2


def test_copies_have_their_own_sessions_and_the_whole_rate(tmp_path: Path) -> None:
    rows = [(100 * place, 600, 10, [place // 2, 5000 + place]) for place in range(200)]
    trace = read_trace(write(tmp_path, mooncake(*rows), "trace.jsonl"))
    found = all_of(TraceTraffic(trace, 2.5 * trace.per_s, seed=4), 3 * trace.duration_s, trace.duration_s / 10)
    assert len(found) == pytest.approx(2.5 * 600, rel=0.05)
    assert len({row[3] for row in found if row[3] >= 2 * trace.num_sessions}) == pytest.approx(50, abs=20)
    # What is thinned out are whole sessions: each session of a round has both requests.
    third = [row[3] for row in found if row[3] >= 2 * trace.num_sessions and row[0] < trace.duration_s]
    assert sum(third.count(session) == 2 for session in set(third)) >= len(set(third)) - 2


@pytest.mark.parametrize("name", MIXES)
def test_a_day_does_not_depend_on_the_slices(name: MixName) -> None:
    one, other = (all_of(DrawnTraffic(name, 5.0, seed=9), 240.0, slice_s) for slice_s in (0.5, 60.0))
    assert one == other
    assert all_of(DrawnTraffic(name, 5.0, seed=8), 240.0, 60.0) != other


def test_drawn_lengths_and_rates_are_those_published() -> None:
    source = DrawnTraffic("mooncake-conversation", 30.0, seed=1, daily=False)
    parts = [source.take(60.0 * minute, 60.0 * (minute + 1)) for minute in range(120)]
    late = parts[60:]
    prompt = np.concatenate([part.prompt for part in late])
    assert len(prompt) == pytest.approx(30 * 3600, rel=0.02)
    assert prompt.mean() == pytest.approx(12_035, rel=0.04)
    assert np.concatenate([part.output for part in late]).mean() == pytest.approx(343, rel=0.03)
    fresh = np.concatenate([part.fresh for part in late])
    assert 1 - fresh.mean() == pytest.approx(0.387, abs=0.01)
    shared = np.concatenate([part.shared for part in late])
    assert shared.sum() / prompt.sum() == pytest.approx(0.36, abs=0.05)
    sessions = np.concatenate([part.session for part in late])
    assert sessions.max() < source.num_sessions


def test_the_day_has_its_mean_and_its_peak() -> None:
    factors = [day_factor(second) for second in np.arange(0, DAY_S, 600)]
    assert np.mean(factors) == pytest.approx(1.0, rel=0.005)
    assert max(factors) == pytest.approx(day_peak(), rel=0.01)
    assert max(factors) / min(factors) == pytest.approx(0.99 / 0.69, rel=0.02)
    assert day_factor(0.0) == pytest.approx(day_factor(DAY_S))


def test_a_session_continues_what_came_before() -> None:
    source, begun = DrawnTraffic("mooncake-conversation", 20.0, seed=2), set[int]()
    for minute in range(60):
        taken: Arrivals = source.take(60.0 * minute, 60.0 * (minute + 1))
        for session, fresh in zip(taken.session.tolist(), taken.fresh.tolist(), strict=True):
            assert fresh != (session in begun)
            begun.add(session)
