"""Calls that keep to their schemas: a tiny random model, which never wants to, before the gateway and both SDKs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from cadenza.calls.loop_thread import LoopThread
from tests.checkpoints import make_llama
from tests.helpers.gateway.gateway import gateway
from tests.helpers.marks import short_and_long
from tests.helpers.models.chat_templates import HERMES, MISTRAL
from tests.helpers.services import cadenza_services

pytestmark = pytest.mark.slow

WEATHER = {
    "name": "get_weather",
    "description": "The weather",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"enum": ["Paris", "天津"]},
            "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 2},
            "exact": {"$ref": "#/$defs/flag"},
        },
        "required": ["city", "exact"],
        "additionalProperties": False,
        "$defs": {"flag": {"type": "boolean"}},
    },
}
TIME = {"name": "get-time", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
SCHEMAS = {tool["name"]: tool["parameters"] for tool in (WEATHER, TIME)}
TOOLS: list[Any] = [{"type": "function", "function": tool} for tool in (WEATHER, TIME)]
USER: list[Any] = [{"role": "user", "content": "Weather?"}]
MARKERS = {
    "hermes": ("<tool_call>", "</tool_call>", "<think>", "</think>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
}
STYLES = ("hermes", "qwen3_coder", "hermes-plain", "mistral", "mistral-list", "llama3_json", "pythonic")
STRICT = ("hermes", "hermes-plain", "mistral")


def add_markers(folder: Path, style: str) -> None:
    """Write the format's markers and a template into the tokenizer's files."""
    family = style.partition("-")[0]
    markers = MARKERS.get(family, ())
    if style == "hermes-plain":
        markers = ()
    if style == "mistral-list":
        markers = ("[TOOL_CALLS]",)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    first = max(token["id"] for token in content["added_tokens"])
    first = max(first, *content["model"]["vocab"].values()) + 1
    for index, text in enumerate(markers):
        content["added_tokens"].append(
            {
                "id": first + index, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False, "special": family == "mistral",
            }
        )  # fmt: skip
    path.write_text(json.dumps(content), encoding="utf-8")
    config_path = folder / "tokenizer_config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    config["chat_template"] = MISTRAL if family == "mistral" else HERMES
    config_path.write_text(json.dumps(config), encoding="utf-8")


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A gateway for each style, before services of its own; started as they are asked for."""
    loop, stack = LoopThread.shared(), AsyncExitStack()

    async def serve(style: str) -> str:
        folder = tmp_path_factory.mktemp(style)
        make_llama(folder, tokenizer=True, vocab_size=300, max_position_embeddings=1024)
        add_markers(folder, style)
        running = await stack.enter_async_context(
            cadenza_services(folder, max_num_seqs=8, num_gpu_blocks=300, num_threads=1)
        )
        family = style.partition("-")[0]
        it = await stack.enter_async_context(
            gateway(running.target, served_model_name=["tiny"], tool_call_parser=family)
        )
        return f"http://{it.address}"

    class Started(dict[str, str]):
        def __missing__(self, style: str) -> str:
            self[style] = loop.run(serve(style))
            return self[style]

    yield Started()
    loop.run(stack.aclose())


def openai_client(clients: ExitStack, url: str) -> Any:
    import openai

    return clients.enter_context(openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0))


def check(name: str, arguments: str) -> None:
    jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("style", short_and_long(STYLES, [each for each in STYLES if each not in STRICT[1:]]))
def test_every_required_call_is_valid(clients, urls, style):
    client = openai_client(clients, urls[style])
    options = {"model": "tiny", "messages": USER, "tools": TOOLS, "tool_choice": "required", "max_tokens": 130}
    names = set()
    for seed in range(2):
        options |= {"seed": seed, "temperature": 1.2}
        answer = client.chat.completions.create(**options, parallel_tool_calls=bool(seed % 2))
        (choice,) = answer.choices
        calls = choice.message.tool_calls
        assert choice.message.content is None
        if choice.finish_reason == "tool_calls":
            assert calls
            for call in calls:
                check(call.function.name, call.function.arguments)
                names.add(call.function.name)
            assert seed % 2 or len(calls) == 1
        else:
            assert choice.finish_reason == "length"
            assert seed % 2, "one call fits"
        streamed: list[list[str]] = []
        for chunk in client.chat.completions.create(**options, parallel_tool_calls=bool(seed % 2), stream=True):
            for call in chunk.choices[0].delta.tool_calls or ():
                if call.id:
                    streamed.append([call.function.name, ""])
                streamed[call.index][1] += call.function.arguments
        assert streamed == [[call.function.name, call.function.arguments] for call in calls or ()]
    assert names


def test_a_named_tool_is_called_on_each_api(clients, urls):
    import anthropic

    url = urls["hermes"]
    client = openai_client(clients, url)
    named = {"type": "function", "function": {"name": "get_weather"}}
    answer = client.chat.completions.create(
        model="tiny", messages=USER, tools=TOOLS, tool_choice=named, parallel_tool_calls=False, max_tokens=500
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    check(call.function.name, call.function.arguments)
    flat = [{"type": "function", **tool} for tool in (WEATHER, TIME)]
    options = {
        "model": "tiny", "input": "Weather?", "tools": flat, "max_output_tokens": 500, "parallel_tool_calls": False,
        "tool_choice": {"type": "function", "name": "get_weather"},
    }  # fmt: skip
    response = client.responses.create(**options)
    (item,) = [each for each in response.output if each.type == "function_call"]
    check(item.name, item.arguments)
    with client.responses.stream(**options) as stream:
        kinds = [event.type for event in stream]
        (item,) = [each for each in stream.get_final_response().output if each.type == "function_call"]
    assert "response.function_call_arguments.delta" in kinds
    check(item.name, item.arguments)
    other = clients.enter_context(anthropic.Anthropic(base_url=url, api_key="any", max_retries=0))
    tools = [{"name": tool["name"], "input_schema": tool["parameters"]} for tool in (WEATHER, TIME)]
    asked = {
        "model": "tiny", "max_tokens": 500, "messages": USER, "tools": tools,
        "tool_choice": {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True},
    }  # fmt: skip
    message = other.messages.create(**asked)
    (block,) = [each for each in message.content if each.type == "tool_use"]
    jsonschema.validate(block.input, SCHEMAS[block.name])
    assert message.stop_reason == "tool_use"
    with other.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    (block,) = [each for each in final.content if each.type == "tool_use"]
    jsonschema.validate(block.input, SCHEMAS[block.name])
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "21"}
    turns = [*USER, {"role": "assistant", "content": final.content}, {"role": "user", "content": [result]}]
    after = other.messages.create(**{**asked, "messages": turns, "tool_choice": {"type": "auto"}, "max_tokens": 3})
    before, behind = (each.usage.input_tokens + each.usage.cache_read_input_tokens for each in (message, after))
    assert behind > before


@pytest.mark.sampled(1)
@pytest.mark.parametrize("style", STRICT)
def test_strict_tools_hold_calls_alone_to_their_schemas(clients, urls, style):
    """A bias makes the model write the marker now and then."""
    client = openai_client(clients, urls[style])
    strict = [{"type": "function", "function": {**tool, "strict": True}} for tool in (WEATHER, TIME)]
    options = {"model": "tiny", "messages": USER, "tools": strict, "max_tokens": 130, "temperature": 1.0}
    marker = MARKERS[style.partition("-")[0]][0]
    bias = {}
    if style != "hermes-plain":
        found = openai_tokens(urls[style], marker)
        bias = {str(found[-1]): 6}
    num_calls = 0
    for seed in range(4):
        answer = client.chat.completions.create(**options, seed=seed, logit_bias=bias)
        (choice,) = answer.choices
        for call in choice.message.tool_calls or ():
            if choice.finish_reason == "length" and call is choice.message.tool_calls[-1]:
                continue
            check(call.function.name, call.function.arguments)
            num_calls += 1
    assert num_calls or style == "hermes-plain"


def openai_tokens(url: str, text: str) -> list[int]:
    import urllib.request

    request = urllib.request.Request(f"{url}/tokenize", json.dumps({"prompt": text}).encode())
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)["tokens"]


def test_a_format_holds_behind_the_thought(clients, urls):
    client = openai_client(clients, urls["hermes"])
    schema = {"enum": ["yes", "no"]}
    named = {"name": "answer", "schema": schema, "strict": True}
    end = openai_tokens(urls["hermes"], "</think>")[-1]
    texts = set()
    for seed in range(4):
        answer = client.chat.completions.create(
            model="tiny", messages=USER, response_format={"type": "json_schema", "json_schema": named}, seed=seed,
            max_tokens=300, logit_bias={str(end): 4}, temperature=1.0,
        )  # fmt: skip
        (choice,) = answer.choices
        if choice.finish_reason == "stop":
            texts.add(json.loads(choice.message.content))
    assert texts
    assert texts <= {"yes", "no"}


def test_a_tool_that_cannot_be_followed_is_named(clients, urls):
    import openai

    client = openai_client(clients, urls["hermes"])
    bad = {"type": "function", "function": {"name": "bad", "parameters": {"type": "object", "if": {}, "then": {}}}}
    bad["function"]["parameters"] |= {"properties": {"a": {"type": "nothing"}}}
    for tools, index in (([*TOOLS, bad], 2), ([bad, *TOOLS], 0)):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(
                model="tiny", messages=USER, tools=tools, tool_choice="required", max_tokens=5
            )
        assert refused.value.param == "tools"
        assert f"tools[{index}]" in refused.value.message
    client.chat.completions.create(model="tiny", messages=USER, tools=[bad], max_tokens=1)
