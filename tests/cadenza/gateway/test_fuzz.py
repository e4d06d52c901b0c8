"""Any body on any path: never a 500, never a request that is left behind at the scheduler."""

from __future__ import annotations

import asyncio
import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cadenza.gateway.fields.tables import APIS
from cadenza.loop_thread import LoopThread
from tests.helpers.gateway import gateway
from tests.helpers.scheduler_world import world
from tests.helpers.tool_models import hermes_tokenizer, saved

TEXTS = st.one_of(st.text(max_size=20), st.sampled_from(["", "\ud800", "\x00", "user", "toy", "Hello", "a" * 5000]))
NUMBERS = st.one_of(
    st.integers(-2, 9), st.sampled_from([2**31, 2**32, 2**63, 2**64, -(2**65), 0.5, -0.0, 1e308, 1e-320, 10**400])
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=8,
)
PARTS = st.lists(st.one_of(st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}), ANYTHING), max_size=3)
MESSAGES = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "assistant", "system", "refused"]), "content": st.one_of(TEXTS, PARTS)}
        ),
        ANYTHING,
    ),
    max_size=4,
)
PROMPTS = st.one_of(
    TEXTS,
    st.lists(TEXTS, max_size=3),
    st.lists(st.integers(-1, 600), max_size=5),
    st.lists(st.lists(st.integers(0, 511), max_size=3), max_size=3),
)
FUNCTIONS = st.fixed_dictionaries(
    {"name": st.sampled_from(["f", "g", "a b", ""])},
    optional={"parameters": st.one_of(st.just({"type": "object"}), ANYTHING), "strict": SCALARS, "description": TEXTS},
)
TOOLS = st.lists(
    st.one_of(
        st.fixed_dictionaries({"type": st.just("function"), "function": FUNCTIONS}),
        FUNCTIONS.map(lambda function: {"type": "function", **function}),
        st.fixed_dictionaries({"name": st.just("f"), "input_schema": st.one_of(st.just({"type": "object"}), ANYTHING)}),
        ANYTHING,
    ),
    max_size=3,
)
CHOICES = st.one_of(
    st.sampled_from(["auto", "none", "required"]),
    st.fixed_dictionaries({"type": st.sampled_from(["function", "auto", "any", "tool", "allowed_tools"])}),
    st.just({"type": "function", "function": {"name": "f"}}),
    ANYTHING,
)
LIKELY = {
    "tools": TOOLS,
    "tool_choice": CHOICES,
    "thinking": st.one_of(st.fixed_dictionaries({"type": st.one_of(st.just("enabled"), ANYTHING)}), ANYTHING),
    "reasoning": st.one_of(st.fixed_dictionaries({"effort": SCALARS}), ANYTHING),
    "messages": MESSAGES,
    "prompt": PROMPTS,
    "input": st.one_of(TEXTS, MESSAGES),
    "system": st.one_of(TEXTS, PARTS),
}
NEEDED = {
    "/v1/completions": ("prompt",),
    "/v1/chat/completions": ("messages",),
    "/v1/responses": ("input",),
    "/v1/messages": ("messages", "max_tokens"),
    "/v1/messages/count_tokens": ("messages",),
}


@st.composite
def requests(draw):
    """A path, and a body that is right but for a few fields."""
    path = draw(st.sampled_from(sorted(APIS)))
    table = APIS[path]
    right = {"prompt": "Hello", "input": "Hello", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    body = {name: right[name] for name in NEEDED.get(path, ())}
    for name in draw(st.lists(st.sampled_from(sorted(table)), max_size=4, unique=True)):
        body[name] = draw(LIKELY.get(name, ANYTHING))
    if draw(st.integers(0, 9)) == 0:
        body[draw(TEXTS)] = draw(ANYTHING)
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if isinstance(body.get(name), int) and body[name] > 9:
            body[name] = 9
    return path, body


def test_no_body_makes_the_gateway_fail_or_leaves_a_request_behind(tmp_path, caplog):
    loop, opened = LoopThread.shared(), world(tokenizer=saved(hermes_tokenizer(), tmp_path))
    w = loop.run(opened.__aenter__())
    door = gateway(w.target)
    g = loop.run(door.__aenter__())
    statuses = set()

    async def ask(path, body):
        data = json.dumps(body)
        async with asyncio.timeout(20), g.http.post(path, data=data) as response:
            text = await response.text()
            assert response.status < 500, (path, body, text)
            statuses.add(response.status)
            if response.status == 200 and response.content_type == "text/event-stream":
                assert text.rstrip().endswith(("[DONE]", "}")), text
            elif response.status != 200:
                assert "error" in json.loads(text)
        await w.idle()
        assert g.state.link.num_requests == 0

    @settings(max_examples=100, suppress_health_check=list(HealthCheck))
    @given(requests())
    def run(case):
        loop.run(ask(*case))

    try:
        run()
        assert {200, 400} <= statuses
        ours = [each for each in caplog.records if each.name != "asyncio"]  # gRPC's poller may say that it was early
        assert not [each for each in ours if each.levelname == "ERROR"]
    finally:
        loop.run(door.__aexit__(None, None, None))
        loop.run(opened.__aexit__(None, None, None))
