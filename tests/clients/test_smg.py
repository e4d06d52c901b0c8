"""SMG (`smg launch`), unmodified, in front of two Cadenzas by vLLM's engine protocol."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from anthropic import Anthropic
from openai import OpenAI

from cadenza import Client, LocalServices, SamplingParams
from cadenza_launcher.services.ports import reserve_port
from tests.clients.asking import MAX_TOKENS, MODEL, PROMPTS, QUESTION, python_of

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]
_START_S = 90.0


@contextlib.contextmanager
def smg(python: Path, folder: Path, *workers: str) -> Iterator[str]:
    """The URL of a router in front of these workers."""
    kept = contextlib.ExitStack()
    address, metrics = reserve_port("127.0.0.1", kept), reserve_port("127.0.0.1", kept)
    command = [
        *(python.parent / "smg", "launch", "--host", "127.0.0.1", "--port", address.rpartition(":")[2]),
        *("--backend", "vllm", "--policy", "cache_aware", "--worker-urls", *(f"grpc://{each}" for each in workers)),
        *("--prometheus-port", metrics.rpartition(":")[2]),
    ]
    with open(folder / "smg.log", "wb") as log:
        router = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    url = f"http://{address}"
    try:
        until = time.monotonic() + _START_S
        while not _serves(url, len(workers)):
            tail = (folder / "smg.log").read_text(errors="replace")[-3000:]
            assert router.poll() is None, tail
            assert time.monotonic() < until, tail
            time.sleep(0.2)  # there is no event of its own
        yield url
    finally:
        router.kill()
        router.wait()
        kept.close()


def _serves(url: str, num_workers: int) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/workers", timeout=2) as response:
            workers = json.load(response)["workers"]
    except (OSError, KeyError, ValueError):
        return False
    return sum(bool(each.get("is_healthy")) for each in workers) == num_workers


def num_served(target: str) -> tuple[int, int]:
    """(output tokens, tokens found in the prefix cache) of a scheduler."""
    with Client(target) as client:
        load = client.server_info().load
        return load.num_output_tokens, load.num_prefix_hits


def test_two_cadenzas_behind_smg(tmp_path):
    python = python_of("smg")
    options = {"vllm_grpc": "0", "device": "cpu", "served_model_name": "demo"}
    with contextlib.ExitStack() as stack:
        first, second = [stack.enter_context(LocalServices(str(MODEL), port=0, **options)) for _ in range(2)]
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
        with Client(first.target) as client:
            (chat,) = client.chat([{"role": "user", "content": QUESTION}], params)
            # SMG tokenizes texts without special tokens.
            ids = [client.tokenize(prompt, add_special_tokens=False) for prompt in PROMPTS]
            outputs = client.generate(ids, params)
        workers = [each.gateway["vllm_grpc"] for each in (first, second)]
        with smg(python, tmp_path, *workers) as url:
            client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=3)
            _ask_all(client, Anthropic(base_url=url, api_key="none"), chat.outputs[0].text)
            for prompt, output in zip(PROMPTS, outputs, strict=True):
                answer = client.completions.create(model="demo", prompt=prompt, temperature=0, max_tokens=MAX_TOKENS)
                assert answer.choices[0].text == output.outputs[0].text
            _check_cache_aware(client, [first.target, second.target])
            first.close()
            for _ in range(6):
                assert _chat(client) == chat.outputs[0].text, "the other one serves alone"


def _chat(client: OpenAI) -> str | None:
    messages = [{"role": "user", "content": QUESTION}]
    answer = client.chat.completions.create(model="demo", messages=messages, temperature=0, max_tokens=MAX_TOKENS)
    return answer.choices[0].message.content


def _ask_all(client: OpenAI, anthropic: Anthropic, text: str) -> None:
    """Chat, responses and messages, whole and streamed, have the text that our own client gets."""
    messages = [{"role": "user", "content": QUESTION}]
    given = {"model": "demo", "temperature": 0}
    assert _chat(client) == text
    chunks = client.chat.completions.create(
        **given, messages=messages, max_tokens=MAX_TOKENS, stream=True, stream_options={"include_usage": True}
    )
    seen = list(chunks)
    assert "".join(each.choices[0].delta.content or "" for each in seen if each.choices) == text
    assert seen[-1].usage.completion_tokens > 0
    response = client.responses.create(**given, input=QUESTION, max_output_tokens=MAX_TOKENS)
    assert response.output_text == text
    message = anthropic.messages.create(
        model="demo", messages=messages, max_tokens=MAX_TOKENS, extra_body={"temperature": 0}
    )
    assert message.content[0].text == text


def _check_cache_aware(client: OpenAI, targets: list[str]) -> None:
    """Requests with one long prefix go where it is cached: one of the two finds it, and the other is not asked."""
    before = [num_served(target)[1] for target in targets]
    prefix = "1+1=2, 2+2=4, 3+3=6, 4+4=8, 5+5=10. " * 6
    for number in range(6):
        client.completions.create(model="demo", prompt=f"{prefix}{number}+", max_tokens=2, temperature=0)
    hits = sorted(num_served(target)[1] - each for target, each in zip(targets, before, strict=True))
    assert hits[0] == 0
    assert hits[1] >= 5 * 64
