"""The benchmark of the front: which rows a choice of groups has, and a short run of each kind of row."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os

import grpc
import pytest

from benchmarks import service_plane
from benchmarks.__main__ import main
from benchmarks.common.benchmark import command_parser
from benchmarks.common.plane_clients import Load, over_streams
from benchmarks.common.plane_services import Extras, Services, plane_services, scraped
from benchmarks.common.rows import BenchmarkError
from cadenza_launcher.services.ports import reserve_port


def titles(*arguments: str) -> list[str]:
    options = command_parser(service_plane.BENCHMARK).parse_args(arguments)
    return [service_plane._title(case.params) for case in service_plane.cases(options)]


def test_the_rows_of_the_chosen_groups() -> None:
    assert titles("--groups", "session,ttft", "--requests", "1,64", "--detokenize", "off") == [
        "session: 1 requests, token ids",
        "session: 64 requests, token ids",
        "ttft: 100.0 requests/s over session",
        "ttft: 100.0 requests/s over streams",
    ]
    assert titles("--groups", "overhead", "--batches", "64", "--step-ms", "5") == [
        "overhead: 64 running, steps of 5.0 ms, over session",
        "overhead: 64 running, steps of 5.0 ms, over streams",
    ]
    assert len(titles()) == 5 * 4 * 2 + 2 * 3 * 2 + 2


def test_an_unknown_group_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["service_plane", "--groups", "session,seance"])
    assert "seance: not among session," in capsys.readouterr().err


def test_a_comparison_has_plain_services_each_extra_alone_and_all_together() -> None:
    assert [each.title() for each in Extras(tls=True, metrics=True, tokens=True).in_turn()] == [
        *("plain", "tls", "metrics", "tokens"),
        "tls+metrics+tokens",
    ]
    assert [each.title() for each in Extras(tls=True).in_turn()] == ["plain", "tls"]


def test_rows_of_a_comparison_name_what_is_on(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (
        *("--groups", "streams", "--requests", "3", "--output-tokens", "20", "--detokenize", "off", "--repeats", "1"),
        *("--quiet-wait-s", "0", "--metrics", "--in-turn"),
    )
    assert main(["service_plane", *arguments, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["params"].get("metrics", False) for row in rows] == [False, True]
    assert [row["params"]["in_turn_with"] for row in rows] == [["metrics"], ["plain"]]
    plain, metrics = (row["medians"] for row in rows)
    assert metrics["speed_of_plain_percent"] == pytest.approx(
        100 * metrics["tokens_per_s"] / plain["tokens_per_s"], 0.01
    )
    assert "speed_of_plain_percent" not in plain


def test_services_with_tls_and_tokens_require_both() -> None:
    async def refusal(services: Services) -> grpc.StatusCode:
        with pytest.raises(ExceptionGroup) as refused:
            await over_streams(services.target, Load(1, 1, text=False))
        error = refused.value.exceptions[0]
        assert isinstance(error, grpc.aio.AioRpcError)
        return error.code()

    async def check() -> None:
        async with plane_services(0.0, Extras(tls=True, tokens=True)) as services:
            assert await refusal(services) is grpc.StatusCode.UNAVAILABLE
            with services.in_use():
                del os.environ["CADENZA_TOKEN"]
                assert await refusal(services) is grpc.StatusCode.UNAUTHENTICATED
                os.environ["CADENZA_TOKEN"] = ""

    asyncio.run(check())
    assert not {"CADENZA_TOKEN", "CADENZA_TLS_CA"} & set(os.environ)


def test_a_scrape_that_fails_fails_the_benchmark() -> None:
    with contextlib.ExitStack() as kept:
        closed = reserve_port("127.0.0.1", kept)
        with pytest.raises(BenchmarkError, match=f"scraping failed: {closed}: ConnectionRefused"), scraped([closed]):
            pass


def test_a_short_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_plane, "_TIMED_STEPS", 150)
    groups = ("session", "sessions8", "streams", "generate", "client_streams", "ttft", "overhead")
    arguments = (
        *("--groups", ",".join(groups)),
        *("--requests", "3", "--output-tokens", "20", "--detokenize", "on", "--repeats", "1"),
        *("--batches", "4", "--step-ms", "2", "--ttft-s", "0.5", "--quiet-wait-s", "0"),
    )
    assert main(["service_plane", *arguments, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["params"]["group"] for row in rows] == [*groups[:5], "ttft", "ttft", "overhead", "overhead"]
    for row in rows[:5]:
        assert row["medians"]["tokens_per_s"] > 0
        assert row["medians"]["tokens_per_message"] >= 1
    # The kernel counts CPU time in ticks of 10 ms.
    assert sum(row["medians"]["scheduler_cpu_us_per_token"] for row in rows[:5]) > 0
    assert all(row["medians"]["overhead_us"] > -2000 for row in rows[7:])
    assert all(0 < row["medians"]["server_ttft_p50_ms"] <= row["medians"]["ttft_p50_ms"] for row in rows[5:7])
    assert all(row["medians"]["empty_stream_p50_ms"] > 0 for row in rows[5:7])
