"""Live requests with several samples: what readers get, and the choice of the best."""

from __future__ import annotations

import pytest

from cadenza.v1 import generation_pb2 as pb
from cadenza_common.plan.result import TokenLogprobs
from cadenza_common.plan.sampling import SequenceSampling
from scheduler_svc.convert.generation import fill_response
from scheduler_svc.core.types import BeamSpec, Finish, FinishDetail, RequestSpec
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.engine.reader import RequestReader
from scheduler_svc.plan_loop.ports import BestOf, EngineRequest
from scheduler_svc.requests.detokenizer import StoppedText
from tests.helpers.executor.prompt_columns import made_up_prompt_logprobs
from tests.helpers.models.toy_tokenizers import byte_level

TOKENIZER = byte_level()
END = Finish(FinishDetail.MAX_TOKENS)


def make(samples, best_of=None, *, stop=(), logprobs=None, prompt_logprobs=None, beams=None):
    sampling = SequenceSampling(num_logprobs=logprobs, num_prompt_logprobs=prompt_logprobs)
    spec = RequestSpec("r", (1, 2, 3), sampling, num_samples=samples, beams=beams)
    request = EngineRequest(spec, lambda: StoppedText(TOKENIZER, stop=stop), best_of=best_of)
    return LiveRequest(request, arrival_ns=1)


def give(live, index, text, logprob=-1.0, finish=END):
    """Tokens of a text, all of the same logprob, and an end."""
    ids = TOKENIZER.encode(text)
    entry = TokenLogprobs(logprob, 1, (), ())
    live.samples[index].extend(ids, [entry] * len(ids), finish)
    return ids


def respond(live, reader):
    message = pb.GenerateResponse()
    fill_response(message, live, reader.take(), with_prompt_ids=False)
    return message


def test_samples_end_one_by_one():
    live = make(3)
    reader = RequestReader(live)
    give(live, 2, "c", finish=None)
    chunk = reader.take()
    assert [(part.sample_index, part.text) for part in chunk.samples] == [(2, "c")]
    give(live, 0, "a")
    give(live, 2, "cc")
    assert not live.finish_if_all_ended()
    chunk = reader.take()
    assert [(part.sample_index, part.first_token_index, part.text) for part in chunk.samples] == [
        (0, 0, "a"), (2, 1, "cc"),
    ]  # fmt: skip
    assert not chunk.is_last
    give(live, 1, "b")
    assert live.finish_if_all_ended()
    chunk = reader.take()
    assert [part.sample_index for part in chunk.samples] == [1]
    assert chunk.is_last
    assert live.num_completion_tokens == 5


def test_many_samples_go_on_in_the_next_chunk_where_the_last_was_full():
    live = make(4)
    for index in range(4):
        give(live, index, "Hello there. " * 40)
    reader = RequestReader(live)
    texts, chunks = [""] * 4, []
    while (chunk := reader.take(1500)) is not None:
        for part in chunk.samples:
            assert part.text_offset == len(texts[part.sample_index])
            texts[part.sample_index] += part.text
        chunks.append(chunk)
    assert texts == ["Hello there. " * 40] * 4
    assert len(chunks) > 4
    assert all(chunk.num_bytes <= 1500 + 150 for chunk in chunks)
    assert [chunk.is_whole for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert [chunk.is_last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_the_best_come_first_and_nothing_before_the_end():
    live = make(4, BestOf(2, returns_logprobs=False), logprobs=0)
    reader = RequestReader(live)
    give(live, 0, "aa", -1.0)  # -2
    give(live, 1, "b", -3.0)
    give(live, 2, "ccc", -0.5)  # -1.5
    assert not live.finish_if_all_ended()
    assert reader.take() is None
    give(live, 3, "d", -2.0)
    assert live.finish_if_all_ended()
    message = respond(live, reader)
    assert [(out.sample_index, out.text, out.cumulative_logprob) for out in message.outputs] == [
        (0, "ccc", -1.5), (1, "aa", -2.0),
    ]  # fmt: skip
    assert not any(out.HasField("logprobs") for out in message.outputs), "not requested"
    assert message.HasField("info")
    assert message.stats.num_completion_tokens == 7, "of all that were drawn"
    assert reader.done


def test_of_equal_ones_the_first_drawn_is_better():
    live = make(3, BestOf(2, returns_logprobs=False), logprobs=0)
    for index in range(3):
        give(live, index, "abc"[index])
    assert live.finish_if_all_ended()
    assert [sample.text.text for sample in live.returned] == ["a", "b"]


@pytest.mark.parametrize(
    "detail",
    [FinishDetail.ABORTED, FinishDetail.DEADLINE, FinishDetail.NON_FINITE_LOGITS, FinishDetail.EXECUTOR_ERROR],
)
def test_a_failed_sample_is_last_whatever_its_logprob(detail):
    live = make(3, BestOf(3, returns_logprobs=False), logprobs=0)
    live.samples[0].extend((), (), Finish(detail))
    give(live, 1, "b", -9.0)
    give(live, 2, "c", -8.0, Finish(FinishDetail.EOS))
    assert live.finish_if_all_ended()
    assert [sample.finish.detail for sample in live.returned] == [FinishDetail.EOS, FinishDetail.MAX_TOKENS, detail]


def test_tokens_after_a_stop_string_do_not_count():
    live = make(2, BestOf(1, returns_logprobs=True), stop=["x"], logprobs=0)
    give(live, 0, "axbb", -1.0)  # -2 after the cut
    give(live, 1, "ccc", -1.0)
    assert live.finish_if_all_ended()
    (best,) = live.returned
    assert (best.text.text, best.cumulative_logprob, best.finish.detail) == ("a", -2.0, FinishDetail.STOP_STRING)


def test_logprobs_of_the_best_are_returned_if_requested():
    live = make(2, BestOf(1, returns_logprobs=True), logprobs=0)
    give(live, 0, "aa", -2.0)
    give(live, 1, "bb", -1.0)
    assert live.finish_if_all_ended()
    (output,) = respond(live, RequestReader(live)).outputs
    assert list(output.logprobs.chosen_logprobs) == [-1.0, -1.0]


@pytest.mark.parametrize("final_only", [False, True])
def test_prompt_logprobs_come_before_the_choice_unless_all_comes_at_the_end(final_only):
    live = make(2, BestOf(1, returns_logprobs=False), logprobs=0, prompt_logprobs=1)
    reader = RequestReader(live, final_only=final_only)
    live.prompt_logprobs.extend(made_up_prompt_logprobs((1, 2, 3), 1))
    give(live, 0, "a")
    first = reader.take()
    assert (first is None) is final_only
    give(live, 1, "b")
    live.finish_if_all_ended()
    last = reader.take()
    assert (last.prompt_logprobs is not None) is final_only
    assert last.is_last


def test_a_beam_brings_its_cumulative_logprob():
    live = make(2, beams=BeamSpec(3))
    reader = RequestReader(live)
    for index, (text, total) in enumerate([("ab", -0.25), ("c", -4.0)]):
        ids = [*TOKENIZER.encode(text), 2]
        live.samples[index].extend(ids, (), Finish(FinishDetail.EOS), total)
    assert live.finish_if_all_ended()
    message = respond(live, reader)
    assert [(out.text, len(out.token_ids), out.cumulative_logprob) for out in message.outputs] == [
        ("ab", 3, -0.25), ("c", 2, -4.0),
    ]  # fmt: skip
    assert message.stats.num_completion_tokens == 5
