"""Two executors of one scheduler, with real processes: `executors=2`, `cadenza executors` and `cadenza top`."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from cadenza import LLM, Client, SamplingParams
from cadenza_cli.app import run
from cadenza_launcher.local import LocalServices
from tests.helpers.service_scripts import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
PROMPTS = [[7, 8, 9], [11] * 40, [250, 3], [5, 6], [90] * 20, [12, 13, 14]]
PARAMS = SamplingParams(max_tokens=4000, temperature=0.8, seed=5, ignore_eos=True)
EVENTS: list[str] = []


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServices]:
    """Simulated executors whose streams last for some seconds."""
    costs = tmp_path_factory.mktemp("costs") / "costs.json"
    costs.write_text(json.dumps({"step_us": 4000}))
    with LocalServices("simulated", simulate=str(costs), executors=2, on_event=EVENTS.append) as running:
        yield running


@pytest.fixture
def client(services: LocalServices) -> Iterator[Client]:
    """A client of the server, when both executors serve and nothing runs."""
    with Client(services.target) as made:
        until(lambda: [each.state for each in made.server_info().executors] == ["serving"] * 2)
        yield made


@pytest.fixture
def command(services: LocalServices, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that succeeds on the server; returns its output."""

    def run_it(*arguments: str) -> str:
        assert run([*arguments, "--target", services.target]) == 0
        return capsys.readouterr().out

    return run_it


def tokens_of(client: Client, while_running: Callable[[], Any]) -> list[list[int]]:
    """Stream all prompts, which would last for 8 s and more; `while_running` is called when each executor has computed
    some of their tokens. Return those of each prompt until it has 20 more than when `while_running` was done."""
    before = [each.num_output_tokens for each in client.server_info().executors]
    streams = [client.stream(prompt, PARAMS) for prompt in PROMPTS]
    found = [list(next(stream).outputs[0].token_ids) for stream in streams]

    def have_both_moved() -> bool:
        now = [each.num_output_tokens for each in client.server_info().executors]
        return all(count > old for count, old in zip(now, before, strict=True))

    until(have_both_moved)
    while_running()
    for tokens, stream in zip(found, streams, strict=True):
        for number, delta in enumerate(stream):
            tokens += delta.outputs[0].token_ids
            if number == 20:
                break
        stream.close()
    until(lambda: client.server_info().load.num_running == 0)
    return found


def undisturbed(client: Client, lengths: list[int]) -> list[list[int]]:
    """Return so many tokens of each prompt."""
    params = [replace(PARAMS, max_tokens=length) for length in lengths]
    return [list(output.outputs[0].token_ids) for output in client.generate(PROMPTS, params)]


def test_a_killed_executors_requests_go_on_at_the_other_until_it_is_back(services, client) -> None:
    name = services.executors[1]
    found = tokens_of(client, lambda: os.kill(services.pids()[name], signal.SIGKILL))
    assert EVENTS[0] == f"{name} died (killed by signal 9); starting it again in 0.2 s"
    until(lambda: EVENTS[-1] == f"{name} is back at {services.addresses[name]}")
    until(lambda: client.server_info().executors[1].state == "serving")
    assert found == undisturbed(client, [len(tokens) for tokens in found])


def test_drain_resume_remove_and_add_under_load(services, client, command) -> None:
    address = services.addresses[services.executors[0]]

    def change() -> None:
        assert command("executors", "drain", address) == f"{address} is empty and takes no new requests\n"
        listed = [json.loads(line) for line in command("executors", "list", "--json").splitlines()]
        drained = next(each for each in listed if each["target"] == address)
        assert (drained["state"], drained["num_running"], drained["num_used_device_blocks"]) == ("draining", 0, 0)
        assert client.server_info().load.num_running == len(PROMPTS), "all go on at the other"
        command("executors", "resume", address)
        assert command("executors", "remove", address) == f"{address} is removed\n"
        (left,) = client.server_info().executors
        assert run(["executors", "remove", left.target, "--target", services.target]) == 1, "the last one stays"
        command("executors", "add", address)
        until(lambda: [each.state for each in client.server_info().executors] == ["serving"] * 2)

    found = tokens_of(client, change)
    assert found == undisturbed(client, [len(tokens) for tokens in found])


def test_top_has_a_line_for_each_executor_under_load(services, client, command) -> None:
    streams = [client.stream(prompt, PARAMS) for prompt in PROMPTS]
    for stream in streams:
        next(stream)
    shown = command("top", "--once", "--interval", "0.5").splitlines()
    data = json.loads(command("top", "--json", "--once", "--interval", "0.5"))
    for stream in streams:
        stream.close()
    until(lambda: client.server_info().load.num_running == 0)
    lanes = [line.split() for line in shown if line.startswith("127.0.0.1:")]
    assert [lane[:2] for lane in lanes] == [[each.target, "serving"] for each in client.server_info().executors]
    assert sum(int(lane[2]) for lane in lanes) == len(PROMPTS)
    for figures in data["executors"]:
        assert figures["num_steps"] > 0, "step ids of the two are not confused"
        assert figures["output_tokens_per_s"] > 0
        assert figures["times_s"]["total"]["p50"] == pytest.approx(0.004, rel=0.5)
    total = data["output_tokens_per_s"]
    assert sum(each["output_tokens_per_s"] for each in data["executors"]) == pytest.approx(total)


@pytest.mark.long
def test_llm_with_two_executors() -> None:
    with LLM("simulated", simulate="instant", executors=2, use_tqdm_on_load=False) as llm:
        until(lambda: [each.state for each in llm.server_info().executors] == ["serving"] * 2)
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        outputs = llm.generate([[index + 5] * 20 for index in range(64)], params, use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [5] * 64
        assert all(each.num_output_tokens > 0 for each in llm.server_info().executors)
