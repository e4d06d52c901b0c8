"""Sampling parameters that the model's files suggest, for requests that leave them out."""

from __future__ import annotations

import pytest

from cadenza import AsyncClient
from gateway_svc.fields.sampling import unset_sampling
from tests.helpers.gateway.gateway import gateway
from tests.helpers.scheduler.scheduler_world import world
from tests.helpers.scheduler.scripted_executor import ScriptedExecutor

SUGGESTED = {"temperature": 0.25, "top_p": 0.5, "top_k": 7, "min_p": 0.125, "max_tokens": 3}
USER = {"role": "user", "content": "Hello"}
ASKED = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 3},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"messages": [USER], "max_tokens": 3},
}
FIELDS = ("temperature", "top_p", "top_k", "min_p")


@pytest.fixture
async def executor(tokenizer_folder):
    return ScriptedExecutor(default_sampling=SUGGESTED)


@pytest.fixture
async def g(executor, tokenizer_folder):
    async with world(executor, tokenizer=tokenizer_folder) as w, gateway(w.target) as it:
        yield it


@pytest.mark.slow
@pytest.mark.parametrize("path", ASKED)
async def test_what_a_request_leaves_out_is_the_models(executor, g, path):
    answer = await g.post(path, ASKED[path])
    sampling = executor.samplings[-1]
    assert {name: getattr(sampling, name) for name in FIELDS} == {name: SUGGESTED[name] for name in FIELDS}
    usage = answer["usage"]
    assert usage.get("completion_tokens", usage.get("output_tokens")) == 3
    if path == "/v1/responses":
        assert (answer["temperature"], answer["top_p"]) == (0.25, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("path", ASKED)
async def test_what_a_request_says_holds(executor, g, path):
    await g.post(path, ASKED[path] | {"temperature": 1.0, "top_p": 1.0})
    sampling = executor.samplings[-1]
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 0.0, 7)  # top_p of 1 is off


async def test_greedy_requests_stay_greedy(executor, g):
    await g.post("/v1/chat/completions", {"messages": [USER], "temperature": 0})
    assert executor.samplings[-1].temperature == 0


def test_beams_take_the_limit_alone():
    assert unset_sampling({"use_beam_search": True, "n": 2}) == {"max_tokens"}
    assert unset_sampling({"use_beam_search": True}, 5) == frozenset()


async def test_clients_are_told(executor, tokenizer_folder):
    async with world(executor, tokenizer=tokenizer_folder) as w, AsyncClient(w.target) as client:
        assert (await client.model_info()).default_sampling == SUGGESTED
