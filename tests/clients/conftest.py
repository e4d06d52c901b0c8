"""One server for all clients, and what gRPC gives of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cadenza import Client, LocalServices, SamplingParams
from tests.clients.asking import MAX_TOKENS, MODEL, PROMPTS, QUESTION, Answers, Server

TEMPLATE = r"""
{{- bos_token }}
{%- if tools %}{{- "<|system|>" + (tools | tojson) + eos_token }}{% endif %}
{%- for message in messages %}
    {{- "<|" + ("user" if message.role == "tool" else message.role) + "|>" + (message.content or "") }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\n{"name": ' + (call.function.name | tojson) }}
        {{- ', "arguments": ' + (call.function.arguments | tojson) + '}\n</tool_call>' }}
    {%- endfor %}
    {{- eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|assistant|>" }}{% endif %}
"""
"""The demo's own, with tools and their results, which it does not know."""


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    options = {
        "http": "0",
        "device": "cpu",
        "max_num_seqs": 16,
        "served_model_name": "demo",
        "chat_template": TEMPLATE,
        "tool_call_parser": "hermes",
    }
    with LocalServices(str(MODEL), port=0, **options) as running:
        yield Server(f"http://{running.http}", running.target, "demo")


@pytest.fixture(scope="session")
def answers(server: Server) -> Answers:
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    with Client(server.target) as client:
        (chat,) = client.chat([{"role": "user", "content": QUESTION}], params)
        outputs = client.generate(list(PROMPTS), params)
    return Answers(
        chat.outputs[0].text, {each: found.outputs[0].text for each, found in zip(PROMPTS, outputs, strict=True)}
    )
