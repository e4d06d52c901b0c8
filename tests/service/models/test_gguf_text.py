"""Text in and text out of a GGUF file through the services: its tokenizer, its chat template, its special tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest

from cadenza import Client, SamplingParams
from cadenza.calls.loop_thread import LoopThread
from cadenza_launcher.services.options import route_options
from tests.checkpoints import make_llama
from tests.helpers.models.gguf_files import all_of, write_gguf
from tests.helpers.models.gguf_vocabularies import full_keys, recorded, vocabulary
from tests.helpers.services import executor_service, scheduler_service

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    pairs = vocabulary("bpe-llama-bpe") | {"tokenizer.chat_template": TEMPLATE}
    make_llama(folder, vocab_size=len(pairs["tokens"]))
    kinds = all_of(gguf.GGMLQuantizationType.F16)
    return write_gguf(folder, folder / "model.gguf", kinds, metadata=full_keys(pairs))


@pytest.fixture(scope="module")
def target(path: Path) -> Iterator[str]:
    stack = contextlib.AsyncExitStack()

    async def start() -> str:
        executor = await stack.enter_async_context(executor_service(path))
        return (await stack.enter_async_context(scheduler_service(executor))).target

    yield LoopThread.shared().run(start())
    LoopThread.shared().run(stack.aclose())


def test_text_is_answered_with_text(target: str) -> None:
    text = recorded("texts")[-20]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with Client(target) as client:
        ids = recorded("ids")["bpe-llama-bpe"][-20]
        assert client.tokenize(text) == ids
        (answer,) = client.generate(text, params)
        assert list(answer.prompt_token_ids) == ids
        assert answer.outputs[0].text == client.detokenize(answer.outputs[0].token_ids)
        (same,) = client.generate(ids, params)
        assert same.outputs[0].text == answer.outputs[0].text != ""


def test_a_chat_is_rendered_with_the_files_template(target: str) -> None:
    with Client(target) as client:
        ids = client.tokenize([{"role": "user", "content": "Hi"}])
        assert client.detokenize(ids, skip_special_tokens=False) == "<|im_start|>Hi<|im_end|>"
        assert len(ids) == len(client.tokenize("Hi", add_special_tokens=False)) + 2
        (answer,) = client.chat([{"role": "user", "content": "Hi"}], SamplingParams(temperature=0, max_tokens=3))
        assert list(answer.prompt_token_ids) == ids


def test_cadenza_up_names_the_file_to_the_scheduler(path: Path, tmp_path: Path) -> None:
    assert route_options(str(path), {}).scheduler == [f"--tokenizer={path.resolve()}"]
    kinds = all_of(gguf.GGMLQuantizationType.F16)
    bare = write_gguf(
        path.parent, tmp_path / "bare.gguf", kinds, tokens=True, metadata={"tokenizer.ggml.model": "none"}
    )
    assert route_options(str(bare), {}).scheduler == []
