"""Readers: cursors over a live request."""

from __future__ import annotations

from scheduler_svc.core.types import Finish, FinishDetail, RequestSpec, SampleDelta, Sampling, TokenLogprobs
from scheduler_svc.detokenizer import TextStream
from scheduler_svc.live_request import LiveRequest
from scheduler_svc.ports import EngineRequest
from scheduler_svc.reader import RequestReader
from tests.helpers.toy_tokenizers import byte_level

TOKENIZER = byte_level()
END = Finish(FinishDetail.MAX_TOKENS)


def make(*, stop=(), logprobs=None, samples=1, text=True):
    spec = RequestSpec("r", (1, 2), Sampling(num_logprobs=logprobs), num_samples=samples)
    make_text = (lambda: TextStream(TOKENIZER, stop=stop)) if text else None
    return LiveRequest(EngineRequest(spec, make_text), arrival_ns=1)


def give(live, text_or_ids, finish=None, sample=0, logprobs=()):
    ids = TOKENIZER.encode(text_or_ids) if isinstance(text_or_ids, str) else text_or_ids
    live.samples[sample].extend(SampleDelta(("", "r"), sample, tuple(ids), tuple(logprobs), finish))
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
