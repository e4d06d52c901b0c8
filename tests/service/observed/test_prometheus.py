"""A real Prometheus scrapes both services of `cadenza up`: it counts what clients do, and all queries answer."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
import yaml

from cadenza import AsyncClient, QueueFullError, RequestOutput, SamplingParams
from cadenza.errors import InvalidRequestError
from cadenza.info import ServerInfo
from cadenza_common.metrics.listener_counts import EXECUTOR_REFUSALS, SCHEDULER_REFUSALS
from cadenza_common.wire.tls import TLS
from cadenza_common.wire.transport import aio_channel
from cadenza_launcher.local import LocalServices
from executor_svc.service.metrics import DEFINITIONS as EXECUTOR_DEFINITIONS
from scheduler_svc.metrics.definitions import DEFINITIONS as SCHEDULER_DEFINITIONS
from tests.helpers.certificates import certificates
from tests.helpers.prometheus import WATCH, Prometheus, needs_prometheus, prometheus
from tests.helpers.service_scripts import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120), needs_prometheus]

LENGTH = SamplingParams(max_tokens=150, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)
STOP = SamplingParams(max_tokens=50, temperature=0, allowed_token_ids=[7], stop_token_ids=[7])
INVALID = SamplingParams(logprobs=10**6)
SHARED = list(range(100, 148))
"""A prompt of three blocks: the second request that has it finds them in the prefix cache."""
PANELS = [panel for panel in json.loads((WATCH / "dashboard.json").read_text())["panels"] if panel["type"] != "row"]


@dataclass
class Seen:
    """What the clients saw."""

    ended: Counter[str] = field(default_factory=Counter)
    """Requests by finish reason."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_first_tokens: int = 0
    num_refused: int = 0
    num_invalid: int = 0
    num_without_message: int = 0
    """Calls without a message to the scheduler, and as many to each executor."""

    def take(self, output: RequestOutput) -> None:
        """Add a request that has ended."""
        metrics = output.metrics
        assert metrics is not None
        self.ended[str(output.outputs[0].finish_reason)] += 1
        self.num_output_tokens += metrics.num_completion_tokens
        self.num_preemptions += metrics.num_preemptions
        if metrics.num_completion_tokens:
            self.num_first_tokens += 1
            self.num_prompt_tokens += metrics.num_prompt_tokens
            self.num_cached_tokens += metrics.num_cached_tokens


async def call_without_a_message(address: str, method: str, tls: TLS | None) -> None:
    async with aio_channel(address, tls) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="the call has no message"):
            await channel.stream_unary(f"/cadenza.v1.{method}")(iter(()))


async def run_all(services: LocalServices) -> tuple[Seen, ServerInfo]:
    """Requests that end in every way; so many at once that the queue is full, and pools of blocks are."""
    seen, tls = Seen(), services.tls
    async with AsyncClient(services.target, tls=tls) as client:

        async def one(prompt: list[int], params: SamplingParams, *, aborts: bool = False) -> None:
            try:
                async for delta in client.stream(prompt, params):
                    if aborts and not delta.finished:
                        await client.abort(delta.request_id)
                    last = delta
                seen.take(last)
            except QueueFullError:
                seen.num_refused += 1
            except InvalidRequestError:
                seen.num_invalid += 1

        for _ in range(2):
            seen.num_without_message += 1
            await call_without_a_message(services.target, "GenerationService/GetModelInfo", tls)
            for executor in (await client.server_info()).executors:
                await call_without_a_message(executor.target, "ExecutionService/Describe", None)
        await asyncio.gather(*(one([*SHARED, index], LENGTH) for index in range(10)))
        await asyncio.gather(*(one([5, 6, index], STOP) for index in range(5)))
        await asyncio.gather(*(one([9, index], LONG, aborts=True) for index in range(4)))
        await asyncio.gather(*(one([5], INVALID) for _ in range(2)))
        await asyncio.gather(*(one([4, index], LENGTH) for index in range(40)))
        return seen, await client.server_info()


@dataclass
class Watched:
    """Services after all requests have ended, and the Prometheus that has seen it."""

    services: LocalServices
    prometheus: Prometheus
    seen: Seen
    info: ServerInfo


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder, logs = tmp_path_factory.mktemp("prometheus"), []
    costs = folder / "costs.json"
    costs.write_text(json.dumps({"step_us": 1000}))
    options: dict[str, Any] = {"num_gpu_blocks": 40, "max_num_seqs": 6, "max_queued_requests": 16}
    options |= {"inject": "non-finite@90:0", **certificates(folder / "certs", days=5).listener("scheduler")}
    with LocalServices(
        "simulated", simulate=str(costs), executors=2, metrics_port=0, on_log=lambda *line: logs.append(line), **options
    ) as services:
        found = [(service, re.search(r"metrics at http://(\S+)/metrics", line)) for service, line in logs]
        addresses = {service: match[1] for service, match in found if match is not None}
        targets = {
            "cadenza-scheduler": [addresses["scheduler"]],
            "cadenza-executor": [addresses[name] for name in services.executors],
        }
        with prometheus(folder, targets) as running:
            running.until("sum(up)", 3)
            seen, info = asyncio.run(run_all(services))
            total = seen.ended.total()
            answered = 'sum(cadenza_executor_answered_plans_total{status="ok"})'
            running.hold({"sum(up)": 3, "sum(vllm:request_success_total)": total, answered: info.load.num_steps})
            yield Watched(services, running, seen, info)


def test_the_run_has_requests_that_end_in_every_way(watched: Watched) -> None:
    seen = watched.seen
    assert set(seen.ended) == {"length", "stop", "abort", "error"}
    assert (seen.ended["stop"], seen.ended["abort"], seen.num_invalid) == (5, 4, 2)
    assert min(seen.num_preemptions, seen.num_refused, seen.num_cached_tokens, seen.ended["error"]) > 0


def test_counts_are_those_of_the_clients(watched: Watched) -> None:
    value, by, seen = watched.prometheus.value, watched.prometheus.by, watched.seen
    assert by("finished_reason", "vllm:request_success_total") == seen.ended
    details = {"max_tokens": "length", "stop_token": "stop", "aborted": "abort", "non_finite_logits": "error"}
    ours = by("reason", "cadenza_requests_ended_total")
    assert {details[detail]: count for detail, count in ours.items()} == seen.ended
    assert value("cadenza_requests_admitted_total") == seen.ended.total()
    assert value("vllm:generation_tokens_total") == seen.num_output_tokens
    assert value("cadenza_output_tokens_total") == seen.num_output_tokens
    assert value("sum(cadenza_lane_output_tokens_total)") == seen.num_output_tokens

    assert value("vllm:prompt_tokens_total") == seen.num_prompt_tokens
    assert value("vllm:prompt_tokens_cached_total") == seen.num_cached_tokens
    assert value("vllm:num_preemptions_total") == seen.num_preemptions
    assert value('sum(cadenza_lane_preemptions_total{kind="recompute"})') == seen.num_preemptions
    assert by("reason", "vllm:admission_rejections_total") == {"max_num_queued_reqs": seen.num_refused}
    assert by("limit", "cadenza_admission_rejections_total") == {"max_queued_requests": seen.num_refused}
    refused = {"INVALID_ARGUMENT": seen.num_invalid, "RESOURCE_EXHAUSTED": seen.num_refused}
    assert by("code", "cadenza_requests_refused_total") == refused
    for name in ("e2e_request_latency", "request_queue_time"):
        assert value(f"vllm:{name}_seconds_count") == seen.ended.total()
    for name in ("time_to_first_token", "request_prefill_time", "request_decode_time", "request_inference_time"):
        assert value(f"vllm:{name}_seconds_count") == seen.num_first_tokens
    assert value("vllm:inter_token_latency_seconds_count") == seen.num_output_tokens - seen.num_first_tokens
    assert value("vllm:request_generation_tokens_sum") == seen.num_output_tokens


def test_listeners_count_what_they_refuse_and_say_when_certificates_expire(watched: Watched) -> None:
    value, by, count = watched.prometheus.value, watched.prometheus.by, watched.seen.num_without_message
    cases = (("scheduler", count, SCHEDULER_REFUSALS), ("executor", 2 * count, EXECUTOR_REFUSALS))
    for service, expected, reasons in cases:
        query = f'sum by (reason) (cadenza_refused_calls_total{{job="cadenza-{service}"}})'
        assert by("reason", query) == {"no_message": expected}
        assert {labels["reason"] for labels, _ in watched.prometheus.series(query)} == set(map(str, reasons))
    assert value('sum(cadenza_connections{job="cadenza-executor"})') >= 2
    assert value("sum(cadenza_closed_connections_total)") == 0
    days = by("option", "(cadenza_tls_certificate_expiry_seconds - time()) / 86400")
    assert set(days) == {"--tls-cert", "--tls-client-ca"}
    assert 4.9 < days["--tls-cert"] < 5

    def firing() -> set[str]:
        return {alert["labels"]["alertname"] for alert in watched.prometheus.get("alerts")["alerts"]}

    # Prometheus evaluates rules after it has scraped what they are about.
    until(lambda: "CadenzaCertificateExpires" in firing())


def test_counts_are_those_of_get_server_info(watched: Watched) -> None:
    value, load = watched.prometheus.value, watched.info.load
    assert value("vllm:generation_tokens_total") == load.num_output_tokens
    assert value("vllm:num_preemptions_total") == load.num_preemptions
    assert value("vllm:prefix_cache_queries_total") == load.num_prefix_queries
    assert value("vllm:gpu_prefix_cache_hits_total") == load.num_prefix_hits
    assert value("sum(cadenza_lane_steps_total)") == load.num_steps
    for executor in watched.info.executors:
        label = f'{{executor="{executor.target}"}}'
        assert value(f"cadenza_lane_output_tokens_total{label}") == executor.num_output_tokens
        assert value(f"cadenza_lane_prefix_queried_tokens_total{label}") == executor.num_prefix_queries
        assert value(f"sum by (executor) (cadenza_lane_kv_blocks{label})") == executor.num_device_blocks == 40
    assert value("vllm:num_requests_running") == value("vllm:num_requests_waiting") == 0
    (config,) = watched.prometheus.series("vllm:cache_config_info")
    assert (config[0]["block_size"], config[0]["num_gpu_blocks"]) == ("16", "80")


def test_both_services_agree_on_steps_and_plans(watched: Watched) -> None:
    value = watched.prometheus.value
    num_steps = value('sum(cadenza_executor_answered_plans_total{status="ok"})')
    assert value("sum(cadenza_lane_step_seconds_count)") == value("sum(cadenza_lane_plan_bytes_count)") == num_steps
    # Slots of sequences that have failed compute nothing.
    for name in ("step_tokens", "step_sequences"):
        planned, computed = value(f"sum(cadenza_lane_{name}_sum)"), value(f"sum(cadenza_executor_{name}_sum)")
        assert 0.99 * planned < computed <= planned
    assert value("sum(cadenza_executor_session_open)") == value("cadenza_executors_serving") == 2
    assert value("sum(cadenza_lane_step_seconds_sum)") == pytest.approx(
        value('sum(cadenza_executor_step_seconds_sum{phase="total"})')
    )


def expression(panel: str) -> str:
    """A panel's query as Grafana sends it: for all instances, and over four scrapes."""
    scope = re.sub(r"\$(scheduler|executor)", ".+", panel)
    return scope.replace("$__rate_interval", "20s")


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_each_panel_has_data(watched: Watched, panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        assert watched.prometheus.series(expression(target["expr"])), target["expr"]


def test_each_alert_can_be_evaluated_and_its_series_exist(watched: Watched) -> None:
    (group,) = yaml.safe_load((WATCH / "alerts.yml").read_text())["groups"]
    names = set(watched.prometheus.get("label/__name__/values"))
    for rule in group["rules"]:
        watched.prometheus.series(rule["expr"])
        used = set(re.findall(r"(?:vllm:|cadenza_)\w+", rule["expr"]))
        assert used <= names, f"{rule['alert']} reads what nobody exports: {used - names}"
    rules = watched.prometheus.get("rules")["groups"][0]["rules"]
    assert {rule["name"]: rule["health"] for rule in rules} == {rule["alert"]: "ok" for rule in group["rules"]}


@pytest.mark.parametrize(
    ("job", "definitions"),
    [("cadenza-scheduler", SCHEDULER_DEFINITIONS), ("cadenza-executor", EXECUTOR_DEFINITIONS)],
)
def test_the_families_are_those_that_are_documented(watched: Watched, job: str, definitions: Any) -> None:
    found = watched.prometheus.get("targets/metadata", match_target=f'{{job="{job}"}}')
    exported = {each["metric"]: each["type"] for each in found}
    expected = {each.name: each.kind for each in definitions}
    assert {name: kind for name, kind in exported.items() if not name.startswith("process_")} == expected
    for each in definitions:
        suffix = "_count" if each.kind == "histogram" else ""
        for labels, _ in watched.prometheus.series(f'{{__name__="{each.name}{suffix}", job="{job}"}}'):
            assert set(labels) - {"__name__", "job", "instance"} <= set(each.labels), each.name
