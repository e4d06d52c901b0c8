"""What the servers of docs/errors.md refuse, as the exceptions of the client."""

from __future__ import annotations

import asyncio
import re

import grpc
import pytest

from cadenza import AsyncClient, SamplingParams, errors
from cadenza.v1 import generation_pb2, generation_pb2_grpc
from tests.checkpoints import make_llama
from tests.helpers.errors import error_servers
from tests.helpers.errors.error_table import PAGE

pytestmark = pytest.mark.timeout(60)
BAD_TOP_P = generation_pb2.GenerateRequest(prompt=[{"tokens": {"ids": [5]}}], sampling_params={"top_p": 1.5})
CHAT = [{"role": "user", "content": "Hi"}]


async def streamed(client, prompt, request_id=None):
    return [delta async for delta in client.stream(prompt, SamplingParams(max_tokens=4), request_id)]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("server", "ask", "kind", "words"),
    [
        ("own", lambda client: client.generate([[5, 6], [5, 512]]), errors.InvalidRequestError,
         "prompt 1: prompt[0].tokens.ids[1]: token id 512 is not below the vocabulary size 512"),
        ("own", lambda client: streamed(client, [5] * 256), errors.InvalidRequestError,
         "prompt: has 256 tokens; with one for the output that exceeds max_model_len = 256"),
        ("no_tokenizer", lambda client: client.generate("Hi"), errors.FailedPreconditionError,
         "prompt[0].text: the model has no tokenizer: send token ids"),
        ("no_template", lambda client: client.chat(CHAT), errors.FailedPreconditionError,
         "prompt[0].chat: the tokenizer has no chat template: send text or token ids, or start the service with "
         "--chat-template"),
        ("full", lambda client: streamed(client, [5, 6]), errors.QueueFullError,
         "1 requests wait already (max_queued_requests)"),
        ("busy", lambda client: streamed(client, [5, 6], "taken"), errors.AlreadyExistsError,
         "request id 'taken' is in use with another body"),
        ("starting", lambda client: client.model_info(), errors.UnavailableError, "the service is starting: it waits"),
        ("starting", lambda client: client.generate("Hi"), errors.UnavailableError, "the service is starting: it"),
        ("draining", lambda client: client.generate([5, 6]), errors.UnavailableError, "the service is draining"),
    ],
)  # fmt: skip
async def test_exceptions(tokenizer_folders, server, ask, kind, words):
    async with error_servers.server(server, tokenizer_folders) as it, AsyncClient(it.target) as client:
        with pytest.raises(errors.CadenzaError) as caught:
            await ask(client)
        assert type(caught.value) is kind
        assert str(caught.value).startswith(words)
        if server == "full":
            assert caught.value.retry_after_s > 0


@pytest.mark.parametrize(
    ("server", "message", "said"),
    [
        (
            "own",
            BAD_TOP_P,
            ["StatusCode.INVALID_ARGUMENT sampling_params.top_p: must", "sampling_params.top_p must be over 0"],
        ),
        ("full", error_servers.TAKEN, ["StatusCode.RESOURCE_EXHAUSTED 1 requests wait already", "again in 0:00:01"]),
        ("starting", error_servers.TAKEN, ["StatusCode.UNAVAILABLE the service is starting", "again in 0:00:01"]),
    ],
)
async def test_the_pages_program_for_bare_stubs(tokenizer_folders, capsys, server, message, said):
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)

    def run(target):
        with grpc.insecure_channel(target) as channel:
            exec(program, {"stub": generation_pb2_grpc.GenerationServiceStub(channel), "request": message})

    async with error_servers.server(server, tokenizer_folders) as it:
        await asyncio.to_thread(run, it.target)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(said)
    assert all(line.startswith(words) for line, words in zip(printed, said, strict=True))


async def test_a_message_that_is_too_large(tmp_path):
    """It is refused before it is sent; trying again, as with a full queue, would not end."""
    async with (
        error_servers.main_server(make_llama(tmp_path, tokenizer=True, vocab_size=300)) as services,
        AsyncClient(services.target) as client,
        asyncio.timeout(30),
    ):
        with pytest.raises(errors.InvalidRequestError, match="larger than max"):
            await anext(client.stream("x" * 67_108_864))
