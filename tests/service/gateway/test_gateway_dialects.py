"""KServe's streams and vLLM's engine protocol before a real model on two executors, of which one is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from cadenza import Client, LocalServices, SamplingParams
from tests.helpers.gateway.kserve import kserve, outputs, request
from tests.helpers.gateway.vllm_engine import asked, engine
from tests.helpers.service_scripts import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
PROMPTS = ["Hello", "The fox", "12+34=", "one two three"]
SAMPLED = {"max_tokens": 400, "temperature": 0.8, "seed": 7, "ignore_eos": True}


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServices]:
    """A scheduler, two executors with a tiny model, and a gateway: five processes with this one."""
    from tests.checkpoints import make_llama

    model = make_llama(tmp_path_factory.mktemp("model"), tokenizer=True, vocab_size=261, max_position_embeddings=512)
    options = {
        "device": "cpu",
        "num_threads": 1,
        "executors": 2,
        "kserve": "0",
        "vllm_grpc": "0",
        "served_model_name": "tiny",
    }
    with LocalServices(str(model), **options) as running:
        with Client(running.target) as client:
            until(lambda: [each.state for each in client.server_info().executors] == ["serving"] * 2)
        yield running


@pytest.fixture(scope="module")
def expected(services: LocalServices) -> list[list[int]]:
    """The tokens that our own client gets, by prompt."""
    with Client(services.target) as client:
        return [each.outputs[0].token_ids for each in client.generate(PROMPTS, SamplingParams(**SAMPLED))]


class Streams:
    """All prompts by both dialects at once."""

    def __init__(self, services: LocalServices) -> None:
        self._services = services
        with Client(services.target) as client:
            self._ids = [client.tokenize(prompt) for prompt in PROMPTS]
        self.by_kserve: list[list[int]] = [[] for _ in PROMPTS]
        self.by_engine: list[list[int]] = [[] for _ in PROMPTS]
        self.reasons: list[str] = []

    async def run(self, when_all_have_begun: Callable[[], object] = lambda: None) -> None:
        """Stream to the end; the function is called in a thread when each stream has tokens."""
        places = self._services.gateway
        async with kserve(places["kserve"]) as (_, stream), engine(places["vllm_grpc"]) as stub, asyncio.timeout(60):
            for index, prompt in enumerate(PROMPTS):
                params = {**SAMPLED, "logprobs": 0}
                message = request(
                    prompt, str(index), "tiny", stream=True, sampling_parameters=params, return_logprobs=True
                )
                await stream.send(message)
            reading = [self._read_kserve(stream)]
            for index, ids in enumerate(self._ids):
                call = stub.Generate(asked(ids, request_id=f"engine-{index}", **SAMPLED))
                reading.append(self._read_engine(call, index))
            tasks = [asyncio.create_task(each) for each in reading]
            try:
                while not all((*self.by_kserve, *self.by_engine)):
                    await asyncio.wait(tasks, timeout=0.005, return_when=asyncio.FIRST_EXCEPTION)
                    assert not any(task.done() and task.exception() for task in tasks)
                await asyncio.to_thread(when_all_have_begun)
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()

    async def _read_kserve(self, stream: Any) -> None:
        num_ended = 0
        while num_ended < len(PROMPTS):
            answer = await stream.read()
            assert not answer.error_message
            response = answer.infer_response
            for row in json.loads(outputs(response)["logprobs"][0]):
                (token_id,) = row  # with logprobs=0: the sampled one alone
                self.by_kserve[int(response.id)].append(int(token_id))
            num_ended += response.parameters["triton_final_response"].bool_param

    async def _read_engine(self, call: Any, index: int) -> None:
        while (answer := await call.read()) is not grpc.aio.EOF:
            self.by_engine[index] += answer.chunk.token_ids
            if answer.HasField("complete"):
                self.reasons.append(answer.complete.finish_reason)


async def test_both_dialects_have_the_tokens_of_our_own_client(services, expected) -> None:
    streams = Streams(services)
    await streams.run()
    assert streams.by_kserve == expected
    assert streams.by_engine == expected
    assert streams.reasons == ["length"] * len(PROMPTS)


@pytest.mark.long
async def test_their_streams_go_on_when_an_executor_is_killed(services, expected) -> None:
    streams = Streams(services)
    with Client(services.target) as client:

        def num_running(name: str) -> int:
            infos = {each.target: each for each in client.server_info().executors}
            return infos[services.addresses[name]].num_running

        def kill_one() -> None:
            name = max(services.executors, key=num_running)
            process = services.pids()[name]
            os.kill(process, signal.SIGSTOP)  # what runs there does not end before it is killed
            with contextlib.ExitStack() as stack:
                stack.callback(os.kill, process, signal.SIGKILL)
                assert num_running(name) > 0

        await streams.run(kill_one)
    assert streams.by_kserve == expected
    assert streams.by_engine == expected
    assert streams.reasons == ["length"] * len(PROMPTS)
