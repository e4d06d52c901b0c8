"""Structured output while executors die: a grammar's state is a function of the tokens, so that each stream goes on."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from cadenza import Client, RequestOutput, SamplingParams
from tests.checkpoints import make_checkpoint
from tests.faults.test_killed_processes import Up

PATTERN = r"(\[[a-e]{1,9}\] ){25}done"
PARAMS = [
    SamplingParams(max_tokens=400, temperature=temperature, seed=3, structured_outputs={"regex": PATTERN})
    for temperature in (0.0, 1.1)
]
_ITEMS = {"enum": ["ab", "c", 1.5, None]}
OTHERS = [
    SamplingParams(max_tokens=300, seed=9, **fields)
    for fields in (
        {"structured_outputs": {"json": {"type": "array", "items": _ITEMS, "minItems": 40, "maxItems": 60}}, "n": 2},
        {"structured_outputs": {"json_object": True}, "ignore_eos": True},
        {"structured_outputs": {"choice": ["yes", "no"]}, "logprobs": 1},
        {"structured_outputs": {"grammar": 'start: "a" start "b" | "c"{90}'}, "best_of": 3},
        {"structured_outputs": {"regex": "[a-d]{60,80}"}, "beam_width": 3, "n": 2},
        {
            "structured_outputs": {
                "structural_tag": {"structures": [{"begin": "<", "schema": _ITEMS, "end": ">"}], "triggers": ["<"]}
            }
        },
    )
]
"""The other forms, as samples and as beams."""
FREE = SamplingParams(max_tokens=250, temperature=0.8, seed=5, ignore_eos=True)

SIZES = ("--num-gpu-blocks", "120", "--num-cpu-blocks", "80", "--max-num-seqs", "16", "--preemption", "swap")


@pytest.fixture(scope="module")
def up(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """Of a family's model."""
    folder, sizes = tmp_path_factory.mktemp("up"), {"vocab_size": 300, "max_position_embeddings": 2048}
    model = make_checkpoint(folder / "model", request.param, tokenizer=True, **sizes)
    running = Up(model, folder / "log", *SIZES)
    yield running
    children = psutil.Process(running.process.pid).children(recursive=True)
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(60) == 0, running.log
    assert running.process.stdout is not None
    running.process.stdout.close()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive, "the process that compiles grammars ends with the scheduler"


def summary(result: RequestOutput) -> list[Any]:
    return [(each.token_ids, each.text, each.logprobs, each.finish_detail) for each in result.outputs]


def kill(up: Up, name: str) -> None:
    """Kill the process of this name, once there is one: what was killed before is started again."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for child in psutil.Process(up.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if name in child.cmdline():
                    child.kill()
                    return
    pytest.fail(f"there is no {name}")


@pytest.mark.parametrize(
    ("up", "victims"),
    [
        pytest.param("llama", ["executor_svc"], marks=pytest.mark.long),  # the first of those that follow
        pytest.param("llama", ["executor_svc", "cadenza_common.grammar.child", "executor_svc"], marks=pytest.mark.long),
        pytest.param("qwen3_moe", ["executor_svc"], marks=pytest.mark.slow),
    ],
    indirect=["up"],
    scope="module",
)
def test_killed_processes_cost_no_token(up: Up, victims: list[str]) -> None:
    prompts = [[7, 8, 9], [11] * 40, [250, 3]]
    params = [*PARAMS, FREE]
    with Client(up.target) as client, Client(up.target) as other, ThreadPoolExecutor(1) as pool:
        others = [summary(output) for output in other.generate([[5, 6]] * len(OTHERS), OTHERS)]
        expected = [output.outputs[0] for output in client.generate(prompts, params)]
        for output in expected[:2]:
            assert output.finish_detail == "eos"
            assert re.fullmatch(PATTERN, output.text)
        running = pool.submit(other.generate, [[5, 6]] * len(OTHERS), OTHERS)
        streams = [client.stream(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
        found = [list(next(stream).outputs[0].token_ids) for stream in streams]
        for victim in victims:
            kill(up, victim)
            for tokens, stream in zip(found, streams, strict=True):
                tokens += next(stream).outputs[0].token_ids
        for tokens, stream in zip(found, streams, strict=True):
            for delta in stream:
                tokens += delta.outputs[0].token_ids
        assert found == [output.token_ids for output in expected]
        assert [summary(output) for output in running.result()] == others
        (again,) = client.generate([[5]], SamplingParams(max_tokens=9, structured_outputs={"regex": "new [ab]"}))
        assert re.fullmatch("new [ab]", again.outputs[0].text)
