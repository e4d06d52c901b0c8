"""Tenants and faults on the screens of `cadenza top`, and as JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from cadenza.info import FaultCount, ServerInfo, TenantInfo
from cadenza_cli.top.figures import ServerFigures, TenantFigures, json_line
from cadenza_cli.top.meter import Meter
from cadenza_cli.top.tenants import age
from cadenza_cli.top.view import Screen
from tests.helpers.client.top_figures import SIZES, busy_interval, info, screen, view_of


def shared(*, num_tenants: int = 2, num_kinds: int = 2) -> ServerFigures:
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
    lines = screen(view_of(shared(num_kinds=3)), (80, 24), page=Screen.TENANTS)
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
    red = [line.plain for line in view_of(shared())._lines(80, 23, Screen.TENANTS) if "red" in str(line.spans)]
    assert [line.split("  ")[0] for line in red] == ["team-1", "request failed"], "refused lately, failed lately"
    assert [age(each) for each in (0.4, 59.9, 60.0, 3_600.0, 200_000.0)] == [
        "0 s ago", "59 s ago", "1 min ago", "1 h ago", "2 d ago"
    ]  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
def test_many_tenants_and_all_kinds_of_faults_share_a_screen(size):
    lines = screen(view_of(shared(num_tenants=40, num_kinds=10)), size, page=Screen.TENANTS)
    shown = [line for line in lines if line.startswith("team-")]
    assert len(shown) >= 2
    assert any(line.startswith(f"{40 - len(shown)} more tenants") for line in lines)
    assert lines[lines.index("") + 2].startswith("request failed"), "the newest fault comes first"
    assert max(map(len, lines)) <= size[0]


def test_a_server_without_tenants_and_faults_says_so():
    lines = screen(view_of(busy_interval()), (80, 24), page=Screen.TENANTS)
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
