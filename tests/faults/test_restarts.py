"""Services that die again and again, are stopped, or cannot start: `cadenza up` and `LLM` with real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cadenza import LLM, Client, SamplingParams
from cadenza.errors import LocalServiceError
from cadenza.v1 import generation_pb2, generation_pb2_grpc, types_pb2
from cadenza_launcher.local import LocalServices
from cadenza_launcher.services.supervised_service import RestartPolicy
from tests.faults.test_killed_processes import Up
from tests.helpers.paths import ROOT
from tests.helpers.service_scripts import until

PROMPTS = [[7, 8, 9], [11] * 40, [250, 3]]
PARAMS = SamplingParams(max_tokens=500, temperature=0.8, seed=5, ignore_eos=True)
NUM_KILLS = 7


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A simulated executor whose streams last for some seconds; it starts faster than one with torch."""
    file = tmp_path_factory.mktemp("costs") / "costs.json"
    file.write_text(json.dumps({"step_us": 5000}))
    return file


@pytest.fixture(scope="module")
def up(costs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    running = Up(Path("simulated"), tmp_path_factory.mktemp("up") / "log", "--simulate", str(costs))
    yield running
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(60) == 0, running.log
    assert running.process.stdout is not None
    running.process.stdout.close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder whose config.json the executor reads when it starts: tests break it."""
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "models" / "cadenza-demo", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def health(target: str) -> int:
    with grpc.insecure_channel(target) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        return int(check(health_pb2.HealthCheckRequest(), timeout=10).status)


def wait_for_step(client: Client, before: set[int]) -> None:
    """Return once an executor of a new incarnation has completed a step; adds its incarnation to those before."""

    def has_completed() -> bool:
        (executor,) = client.server_info().executors
        found = executor.connected and executor.last_step_id > 0 and executor.incarnation not in before
        if found:
            before.add(executor.incarnation)
        return found

    until(has_completed)


def test_an_executor_that_is_killed_seven_times_in_a_row_costs_no_token(up: Up) -> None:
    """Each time it has completed a step, so the delay does not grow."""
    with Client(up.target) as client:
        expected = [output.outputs[0].token_ids for output in client.generate(PROMPTS, PARAMS)]
        streams = [client.stream(prompt, PARAMS) for prompt in PROMPTS]
        found = [list(next(stream).outputs[0].token_ids) for stream in streams]
        incarnations: set[int] = set()
        for _ in range(NUM_KILLS):
            wait_for_step(client, incarnations)
            # A few tokens more: a request that is tried alone in each of three deaths would be taken for their cause.
            least = client.server_info().load.num_output_tokens + 6 * len(PROMPTS)
            victim = up.service("executor_svc")
            until(lambda least=least: client.server_info().load.num_output_tokens >= least)
            assert client.server_info().load.num_running == len(PROMPTS)
            victim.kill()
        for tokens, stream in zip(found, streams, strict=True):
            for delta in stream:
                tokens += delta.outputs[0].token_ids
    assert found == expected
    until(lambda: up.log.count("cadenza   │ the executor is back at") == NUM_KILLS)
    died = "cadenza   │ the executor died (killed by signal 9); starting it again in 0.2 s\n"
    assert up.log.count(died) == up.log.count("the executor died") == NUM_KILLS


def test_services_of_cadenza_up_are_forks_like_those_of_tests(up: Up) -> None:
    """A new interpreter takes a second or two of processor time in each, and has no torch in a scheduler."""
    scheduler = up.service("scheduler_svc")
    is_fork = any("libtorch" in each.path for each in scheduler.memory_maps())
    assert is_fork == ("TEST_NEW_INTERPRETERS" not in os.environ and sys.platform == "linux")


def test_an_executor_that_is_stopped_is_killed_and_started_again(up: Up) -> None:
    with Client(up.target) as client:
        expected = client.generate(PROMPTS, PARAMS)[0].outputs[0].token_ids
        victim = up.service("executor_svc")
        stream = client.stream(PROMPTS[0], PARAMS)
        tokens = list(next(stream).outputs[0].token_ids)
        victim.suspend()
        for delta in stream:
            tokens += delta.outputs[0].token_ids
    assert tokens == expected
    assert not victim.is_running()
    up.wait_for_log(
        "cadenza   │ the executor died (killed because a signal had stopped it for 3 s); starting it again in 0.2 s"
    )


@pytest.mark.long
def test_requests_wait_until_their_deadlines_while_the_executor_cannot_start(model: Path, costs: Path) -> None:
    """Six failures, health NOT_SERVING; then the model is whole again, and the stream goes on."""
    params = SamplingParams(max_tokens=200, temperature=0.8, seed=5, ignore_eos=True)
    events: list[str] = []
    policy = RestartPolicy(first_delay_s=0.02, max_delay_s=0.1, max_deaths=None)
    with (
        LocalServices(model, simulate=str(costs), restarts=policy, on_event=events.append) as services,
        Client(services.target) as client,
        grpc.insecure_channel(services.target) as channel,
    ):
        expected = client.generate([PROMPTS[0]], params)[0].outputs[0].token_ids
        stream = client.stream(PROMPTS[0], params)
        tokens = list(next(stream).outputs[0].token_ids)
        config = (model / "config.json").read_text()
        (model / "config.json").write_text("broken")
        os.kill(services.pids()["executor"], signal.SIGKILL)
        until(lambda: health(services.target) == health_pb2.HealthCheckResponse.NOT_SERVING)
        request = generation_pb2.GenerateRequest(timeout_s=0.5)
        request.prompt.add().tokens.ids[:] = PROMPTS[1]
        last = list(generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=20))[-1]
        assert last.outputs[0].finish.detail == types_pb2.FINISH_DETAIL_DEADLINE
        until(lambda: any("it has died 6 times" in event for event in events))
        assert health(services.target) == health_pb2.HealthCheckResponse.NOT_SERVING
        (model / "config.json").write_text(config)
        for delta in stream:
            tokens += delta.outputs[0].token_ids
    assert tokens == expected
    assert any("the executor is back" in event for event in events)


@pytest.mark.long
def test_llm_raises_after_five_deaths_without_progress(model: Path, costs: Path) -> None:
    """The script's call ends with the service's own error, and so does the next one."""
    with LLM(model, simulate=str(costs), use_tqdm_on_load=False) as llm:

        def kill() -> None:
            with Client(llm.target) as client:
                until(lambda: client.server_info().load.num_running == 1)
            (model / "config.json").write_text("broken")
            os.kill(llm._services.pids()["executor"], signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        message = (
            r"^the executor did not start \(.*config.json.*\); it has died 5 times without progress and is given up$"
        )
        with pytest.raises(LocalServiceError, match=message):
            llm.generate([PROMPTS[0]], SamplingParams(max_tokens=2000, ignore_eos=True), use_tqdm=False)
        killer.join()
        with pytest.raises(LocalServiceError, match=message):
            llm.generate([PROMPTS[0]], PARAMS, use_tqdm=False)
