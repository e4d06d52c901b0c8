"""The gateway before the demo model: the SDKs of OpenAI and Anthropic, unmodified, and `cadenza up --http`."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from cadenza import Client, LocalServices, SamplingParams
from tests.helpers.paths import ROOT

pytestmark = pytest.mark.slow
MODEL = ROOT / "models" / "cadenza-demo"
USER = [{"role": "user", "content": "What is 27 + 48?"}]


@pytest.fixture(scope="module")
def services() -> Iterator[LocalServices]:
    with LocalServices(
        str(MODEL), http="0", device="cpu", num_threads=1, max_num_seqs=16, served_model_name="demo"
    ) as running:
        yield running


@pytest.fixture
def url(services: LocalServices) -> str:
    return f"http://{services.http}"


def post(url: str, body: object) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


def test_http_gives_the_tokens_of_grpc(services, url):
    with Client(services.target) as client:
        (expected,) = client.generate(["12+34="], SamplingParams(temperature=0, max_tokens=12))
    body = {"prompt": "12+34=", "temperature": 0, "max_tokens": 12, "return_token_ids": True}
    answer = post(f"{url}/v1/completions", body)
    choice = answer["choices"][0]
    assert choice["token_ids"] == expected.outputs[0].token_ids
    assert choice["text"] == expected.outputs[0].text
    assert answer["model"] == "demo"


def test_echo_has_the_logprobs_of_the_prompt(url):
    """As lm-eval asks for a continuation's likelihood."""
    body = {"prompt": "12+34=46", "echo": True, "max_tokens": 0, "logprobs": 1, "temperature": 0}
    answer = post(f"{url}/v1/completions", body)
    (choice,) = answer["choices"]
    columns = choice["logprobs"]
    assert choice["text"] == "12+34=46"
    assert len(columns["tokens"]) == answer["usage"]["prompt_tokens"] > 2
    assert columns["token_logprobs"][0] is None
    assert all(each < 0 for each in columns["token_logprobs"][1:])
    assert all(
        max(top.values()) >= each
        for top, each in zip(columns["top_logprobs"][1:], columns["token_logprobs"][1:], strict=True)
    )
    streamed = urllib.request.Request(f"{url}/v1/completions", json.dumps({**body, "stream": True}).encode())
    with urllib.request.urlopen(streamed, timeout=30) as response:
        events = [json.loads(line[6:]) for line in response if line.startswith(b"data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == "12+34=46"
    assert events[0]["choices"][0]["logprobs"] == columns


def test_beams_and_prompt_logprobs(url):
    beams = post(
        f"{url}/v1/completions",
        {"prompt": "12+34=", "use_beam_search": True, "n": 3, "max_tokens": 4, "temperature": 0},
    )
    assert len({choice["text"] for choice in beams["choices"]}) == 3
    answer = post(f"{url}/v1/chat/completions", {"messages": USER, "prompt_logprobs": 1, "max_tokens": 2})
    rows = answer["prompt_logprobs"]
    assert rows[0] is None
    assert len(rows) == answer["usage"]["prompt_tokens"]
    assert all(entry["rank"] >= 1 for row in rows[1:] for entry in row.values())


def test_openais_sdk(clients, url):
    import openai

    client = clients.enter_context(openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0))
    assert [model.id for model in client.models.list()] == ["demo"]
    options = {"model": "demo", "messages": USER, "temperature": 0, "max_completion_tokens": 20}
    whole = client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
    text = whole.choices[0].message.content
    assert text
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage == whole.usage
    completion = client.completions.create(model="demo", prompt=["12+34=", "5+5="], max_tokens=4, n=2, temperature=0.5)
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    answer = client.responses.create(model="demo", input="What is 27 + 48?", temperature=0, max_output_tokens=20)
    assert answer.output_text == text
    with client.responses.stream(model="demo", input="What is 27 + 48?", temperature=0, max_output_tokens=20) as stream:
        assert "".join(each.delta for each in stream if each.type == "response.output_text.delta") == text
        assert stream.get_final_response().output_text == text
    with pytest.raises(openai.NotFoundError, match="other"):
        client.chat.completions.create(**{**options, "model": "other"})
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**options, tools=[{"type": "function", "function": {"name": "f"}}])
    assert refused.value.param == "tools"
    with pytest.raises(openai.BadRequestError):
        client.embeddings.create(model="demo", input="a")


def test_anthropics_sdk(clients, url):
    import anthropic

    client = clients.enter_context(anthropic.Anthropic(base_url=url, api_key="any", max_retries=0))
    options = {"model": "demo", "max_tokens": 20, "messages": USER, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**options)
    text = whole.content[0].text
    assert text
    with client.messages.stream(**options) as stream:
        assert "".join(stream.text_stream) == text
        final = stream.get_final_message()
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    counted = client.messages.count_tokens(model="demo", messages=USER)
    assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    with pytest.raises(anthropic.BadRequestError, match="tools"):
        client.messages.create(**options, tools=[{"name": "f", "input_schema": {"type": "object"}}])


SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}, "even": {"type": "boolean"}},
    "required": ["sum", "even"],
    "additionalProperties": False,
}


ANSWERS = {"enum": ["seventy-five", 75, None]}
"""Without objects or lists, in which the model could write spaces until its last token."""


def test_constraints_in_the_words_of_each_api(clients, url):
    import anthropic
    import openai

    client = clients.enter_context(openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0))
    options = {"model": "demo", "messages": USER, "max_completion_tokens": 60}
    named = {"name": "sum", "schema": ANSWERS, "strict": True}
    compact = {"json": SCHEMA, "disable_any_whitespace": True}
    answer = client.chat.completions.create(**options, response_format={"type": "json_schema", "json_schema": named})
    assert json.loads(answer.choices[0].message.content) in ANSWERS["enum"]
    answer = client.chat.completions.create(**options, n=2, extra_body={"structured_outputs": compact})
    for choice in answer.choices:
        assert set(json.loads(choice.message.content)) == {"sum", "even"}
    answer = client.chat.completions.create(**options, extra_body={"structured_outputs": {"choice": ["yes", "no"]}})
    assert answer.choices[0].message.content in ("yes", "no")
    body = {"structured_outputs": {"regex": "[0-9]{3}"}}
    assert len(client.completions.create(model="demo", prompt="5+5=", extra_body=body).choices[0].text) == 3
    formatted = {"format": {"type": "json_schema", **named}}
    answer = client.responses.create(model="demo", input="Sum?", text=formatted, max_output_tokens=60)
    assert json.loads(answer.output_text) in ANSWERS["enum"]
    assert answer.text.format.type == "json_schema"
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**options, response_format=bad)
    assert refused.value.param == "response_format"
    assert refused.value.body["message"].startswith("response_format: ")
    with pytest.raises(openai.BadRequestError, match="response_format: "):
        client.completions.create(model="demo", prompt="5+5=", extra_body={"response_format": bad})
    other = clients.enter_context(anthropic.Anthropic(base_url=url, api_key="any", max_retries=0))
    config = {"format": {"type": "json_schema", "schema": ANSWERS}}
    message = other.messages.create(model="demo", max_tokens=60, messages=USER, output_config=config)
    assert json.loads(message.content[0].text) in ANSWERS["enum"]


def test_a_killed_gateway_is_started_again_at_its_port(services, url):
    before = services.pids()["gateway"]
    os.kill(before, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            answer = post(f"{url}/v1/chat/completions", {"messages": USER, "max_tokens": 1})
            break
        except (urllib.error.URLError, ConnectionError):
            continue
    assert answer["choices"]
    assert services.pids()["gateway"] != before
