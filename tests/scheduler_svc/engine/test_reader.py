"""Readers: cursors over a live request."""

from __future__ import annotations

import pytest

from cadenza.v1 import generation_pb2
from cadenza_common.plan.result import TokenLogprobs
from cadenza_common.plan.sampling import SequenceSampling
from scheduler_svc.convert.generation import fill_response
from scheduler_svc.core.types import Finish, FinishDetail, RequestSpec
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.engine.reader import RequestReader
from scheduler_svc.plan_loop.ports import EngineRequest
from scheduler_svc.requests.detokenizer import StoppedText
from tests.helpers.executor.prompt_columns import made_up_prompt_logprobs
from tests.helpers.models.toy_tokenizers import byte_level

TOKENIZER = byte_level()
END = Finish(FinishDetail.MAX_TOKENS)


def make(*, stop=(), logprobs=None, samples=1, text=True, prompt=(1, 2), prompt_logprobs=None):
    sampling = SequenceSampling(num_logprobs=logprobs, num_prompt_logprobs=prompt_logprobs)
    spec = RequestSpec("r", prompt, sampling, num_samples=samples)
    make_text = (lambda: StoppedText(TOKENIZER, stop=stop)) if text else None
    return LiveRequest(EngineRequest(spec, make_text), arrival_ns=1)


def give(live, text_or_ids, finish=None, sample=0, logprobs=()):
    ids = TOKENIZER.encode(text_or_ids) if isinstance(text_or_ids, str) else text_or_ids
    live.samples[sample].extend(tuple(ids), tuple(logprobs), finish)
    return ids


def read_all(reader, max_bytes=1 << 20):
    ids, text, chunks = [], "", []
    while (chunk := reader.take(max_bytes)) is not None:
        (sample,) = chunk.samples
        assert sample.first_token_index == len(ids)
        assert sample.text_offset == len(text)
        ids += sample.token_ids
        text += sample.text
        chunks.append(chunk)
    return ids, text, chunks


def test_deltas():
    live = make()
    reader = RequestReader(live)
    assert reader.take() is None
    first = give(live, "Hello")
    chunk = reader.take()
    assert chunk.is_first
    assert not chunk.is_last
    assert (chunk.samples[0].token_ids, chunk.samples[0].text) == (first, "Hello")
    assert reader.take() is None
    give(live, " you")
    give(live, " there", END)
    chunk = reader.take()
    assert not chunk.is_first
    assert chunk.is_last
    assert (chunk.samples[0].text, chunk.samples[0].finish) == (" you there", END)
    assert chunk.samples[0].first_token_index == len(first)
    assert reader.done
    assert reader.take() is None


def test_the_end_alone():
    live = make()
    give(live, [], Finish(FinishDetail.ABORTED))
    chunk = RequestReader(live).take()
    assert chunk.is_first
    assert chunk.is_last
    assert chunk.samples[0].token_ids == []


def test_held_text_comes_with_the_end():
    live = make(stop=["there"])
    reader = RequestReader(live)
    give(live, "Hello the")
    assert reader.take().samples[0].text == "Hello "
    give(live, [], END)
    chunk = reader.take()
    assert (chunk.samples[0].token_ids, chunk.samples[0].text) == ([], "the")


def test_every_reader_has_its_own_place():
    live = make()
    one, two = RequestReader(live), RequestReader(live)
    give(live, "Hello")
    one.take()
    ids = give(live, " you", END)
    assert one.take().samples[0].token_ids == ids
    assert read_all(two)[1] == "Hello you"


def test_final_only():
    live = make(samples=2)
    reader = RequestReader(live, final_only=True)
    give(live, "Hello")
    give(live, "one", sample=1)
    assert reader.take() is None
    give(live, "", END, sample=1)
    chunk = reader.take()
    assert [s.sample_index for s in chunk.samples] == [1]
    assert chunk.is_first
    assert not chunk.is_last
    give(live, "", END)
    chunk = reader.take()
    assert [(s.sample_index, s.text) for s in chunk.samples] == [(0, "Hello")]
    assert chunk.is_last


def test_what_is_large_comes_in_parts():
    live = make()
    ids = give(live, "Hello, 你好 there. " * 2000, END)
    got, text, chunks = read_all(RequestReader(live), max_bytes=10_000)
    assert (got, text) == (ids, live.samples[0].text.text)
    assert len(chunks) > 5
    assert all(chunk.num_bytes <= 10_000 + 64 for chunk in chunks)
    assert [chunk.is_last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert [chunk.samples[0].finish for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_a_token_always_fits():
    live = make(logprobs=20)
    entry = TokenLogprobs(-1.0, 1, tuple(range(20)), (-1.0,) * 20)
    ids = give(live, [40, 41, 42], END, logprobs=[entry] * 3)
    got, _, chunks = read_all(RequestReader(live), max_bytes=1)
    assert got == ids
    assert len(chunks) == 3
    assert all(len(chunk.samples[0].logprobs) == 1 for chunk in chunks)


def test_without_text():
    live = make(text=False)
    give(live, [3, 4], END)
    chunk = RequestReader(live).take()
    assert (chunk.samples[0].token_ids, chunk.samples[0].text) == ([3, 4], "")


def test_after_a_stop_string_the_rest_is_cut():
    live = make(stop=["b"])
    reader = RequestReader(live)
    give(live, "a")
    reader.take()
    give(live, TOKENIZER.encode("b") + TOKENIZER.encode("c"))
    chunk = reader.take()
    assert chunk.samples[0].token_ids == TOKENIZER.encode("b")
    assert chunk.samples[0].finish == Finish(FinishDetail.STOP_STRING, stop_string="b")
    assert chunk.is_last


PROMPT = tuple(range(3, 43))


def know(live, start, end, num_top):
    """The prompt logprobs of these tokens become known."""
    live.prompt_logprobs.extend(made_up_prompt_logprobs(PROMPT, num_top).rows(start, end))


def prompt_rows(chunks):
    """[(start, end)] of what they carry, each checked against what it ought to be."""
    spans = []
    for part in (chunk.prompt_logprobs for chunk in chunks if chunk.prompt_logprobs is not None):
        whole = made_up_prompt_logprobs(PROMPT, part.num_top).rows(part.start, part.end)
        assert [list(part.logprobs), list(part.ranks)] == [whole.logprobs, whole.ranks]
        assert [list(part.top_token_ids), list(part.top_logprobs)] == [whole.top_token_ids, whole.top_logprobs]
        spans.append((part.start, part.end))
    return spans


def test_prompt_logprobs_come_as_they_become_known():
    live = make(prompt=PROMPT, prompt_logprobs=2)
    reader = RequestReader(live)
    assert reader.take() is None
    know(live, 1, 9, 2)
    first = reader.take()
    assert (first.is_first, first.is_last, first.is_whole, first.samples) == (True, False, True, [])
    assert reader.take() is None
    know(live, 9, 40, 2)
    give(live, "a", END)
    last = reader.take()
    assert (last.is_first, last.is_last) == (False, True)
    assert last.samples[0].text == "a"
    assert prompt_rows([first, last]) == [(1, 9), (9, 40)]


@pytest.mark.parametrize("final_only", [False, True])
def test_large_prompt_logprobs_come_in_parts_before_the_output(final_only):
    live = make(prompt=PROMPT, prompt_logprobs=5)
    know(live, 1, 40, 5)
    give(live, "Hello", END)
    reader = RequestReader(live, final_only=final_only)
    chunks = []
    while (chunk := reader.take(1000)) is not None:
        chunks.append(chunk)
    spans = prompt_rows(chunks)
    assert len(spans) > 3
    assert [start for start, _ in spans[1:]] == [end for _, end in spans[:-1]]
    assert (spans[0][0], spans[-1][1]) == (1, 40)
    assert all(chunk.num_bytes <= 1000 + 64 for chunk in chunks)
    assert not any(chunk.samples for chunk in chunks[:-2]), "output waits for the prompt"
    assert not any(chunk.is_whole for chunk in chunks[: len(spans) - 1])
    assert [chunk.is_last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert [chunk.is_first for chunk in chunks] == [True] + [False] * (len(chunks) - 1)


def test_final_only_holds_prompt_logprobs_back():
    live = make(prompt=PROMPT, prompt_logprobs=0)
    reader = RequestReader(live, final_only=True)
    know(live, 1, 40, 0)
    assert reader.take() is None
    give(live, "a", END)
    assert prompt_rows([reader.take()]) == [(1, 40)]


def test_a_row_of_prompt_logprobs_always_fits():
    live = make(prompt=PROMPT, prompt_logprobs=3)
    know(live, 1, 4, 3)
    reader = RequestReader(live)
    assert prompt_rows([reader.take(1), reader.take(1), reader.take(1)]) == [(1, 2), (2, 3), (3, 4)]
    assert reader.take(1) is None


@pytest.mark.parametrize("text", [True, False])
def test_no_rows_are_said_once(text):
    """A prompt of one token, or a request that ended while it waited: the client learns that none will come."""
    live = make(prompt=(7,), prompt_logprobs=3, text=text)
    reader = RequestReader(live)
    give(live, [40])
    assert prompt_rows([reader.take()]) == [(1, 1)]
    give(live, [41], END)
    assert reader.take().prompt_logprobs is None


def test_every_reader_gets_all_prompt_logprobs():
    live = make(prompt=PROMPT, prompt_logprobs=1)
    early = RequestReader(live)
    know(live, 1, 20, 1)
    first = early.take()
    know(live, 20, 40, 1)
    assert prompt_rows([first, early.take()]) == [(1, 20), (20, 40)]
    assert prompt_rows([RequestReader(live).take()]) == [(1, 40)]


def test_estimated_sizes_are_no_smaller_than_real_ones():
    """The estimate keeps a response near 1 MiB, texts of the tokens included."""
    prompt = tuple(TOKENIZER.encode("Hello, 你好 there 😀. " * 400))
    live = make(prompt=prompt, prompt_logprobs=8)
    live.prompt_logprobs.extend(made_up_prompt_logprobs(prompt, 8))
    chunk = RequestReader(live).take(200_000)
    message = generation_pb2.GenerateResponse()
    fill_response(message, live, chunk, with_prompt_ids=False)
    assert 50_000 < message.ByteSize() <= chunk.num_bytes <= 200_000
    end = message.prompt_logprobs_start + len(message.prompt_logprobs.chosen_logprobs)
    assert list(message.prompt_logprobs.chosen_tokens) == [TOKENIZER.token_text(i) for i in prompt[1:end]]
    assert len(message.prompt_logprobs.top_tokens) == 8 * (end - 1)
