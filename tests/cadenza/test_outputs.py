"""Outputs put together from responses: several samples, logprob columns, prompt logprobs, lost tokens."""

from __future__ import annotations

import pytest

from cadenza.calls.output_collector import OutputCollector
from cadenza.calls.reconnect import Positions
from cadenza.errors import InternalError
from cadenza.outputs import Logprob, RequestOutput
from cadenza.prompts import Prompt
from cadenza.v1 import generation_pb2 as pb
from cadenza.v1 import types_pb2 as types


def collect(*responses: pb.GenerateResponse, prompt_token_ids=None) -> tuple[list[RequestOutput], RequestOutput]:
    collector, positions, deltas = (
        OutputCollector("r", Prompt("p", prompt_token_ids)),
        Positions("r"),
        [],
    )
    for response in responses:
        positions.advance(response)
        deltas.append(collector.add(response))
    return deltas, collector.result()


def sample(index, first, ids, text, offset, **fields) -> pb.SampleOutput:
    return pb.SampleOutput(
        sample_index=index, first_token_index=first, token_ids=ids, text=text, text_offset=offset, **fields
    )


def test_samples_are_put_together_in_order():
    eos = types.Finish(reason=types.FINISH_REASON_STOP, detail=types.FINISH_DETAIL_EOS)
    stop = types.Finish(reason=types.FINISH_REASON_STOP, detail=types.FINISH_DETAIL_STOP_STRING, stop_string="END")
    deltas, total = collect(
        pb.GenerateResponse(
            request_id="r",
            info=pb.RequestInfo(seed=2**64 - 1, num_prompt_tokens=2, prompt_token_ids=[8, 9]),
            outputs=[sample(1, 0, [5], "你", 0)],
        ),
        pb.GenerateResponse(outputs=[sample(0, 0, [1, 2], "ab", 0), sample(1, 1, [6], "", 1)]),
        pb.GenerateResponse(outputs=[sample(1, 2, [7], "好", 1, finish=stop, cumulative_logprob=-1.5)]),
        pb.GenerateResponse(
            outputs=[sample(0, 2, [3], "c", 2, finish=eos)],
            stats=pb.RequestStats(
                num_prompt_tokens=2, num_cached_tokens=1, num_completion_tokens=6, first_token_ns=10**9
            ),
        ),
    )
    assert [[s.text for s in delta.outputs] for delta in deltas] == [["你"], ["ab", ""], ["好"], ["c"]]
    assert [delta.finished for delta in deltas] == [False, False, False, True]
    assert all(delta.prompt_token_ids == [8, 9] and delta.seed == 2**64 - 1 for delta in deltas)
    first, second = total.outputs
    assert (first.index, first.text, first.token_ids) == (0, "abc", [1, 2, 3])
    assert (first.finish_reason, first.finish_detail, first.stop_reason) == ("stop", "eos", None)
    assert (second.text, second.token_ids, second.cumulative_logprob) == ("你好", [5, 6, 7], -1.5)
    assert (second.finish_reason, second.finish_detail, second.stop_reason) == ("stop", "stop_string", "END")
    assert total.finished
    assert total.prompt == "p"
    assert total.num_cached_tokens == 1
    assert total.metrics.num_completion_tokens == 6
    assert total.metrics.first_token_s == 1.0


@pytest.mark.parametrize(
    ("finish", "expected"),
    [
        (types.Finish(reason=types.FINISH_REASON_LENGTH, detail=types.FINISH_DETAIL_KV_CAPACITY),
         ("length", "kv_capacity", None)),
        (types.Finish(reason=types.FINISH_REASON_ABORT, detail=types.FINISH_DETAIL_DEADLINE),
         ("abort", "deadline", None)),
        (types.Finish(reason=types.FINISH_REASON_ERROR, detail=types.FINISH_DETAIL_NON_FINITE_LOGITS),
         ("error", "non_finite_logits", None)),
        (types.Finish(reason=types.FINISH_REASON_STOP, detail=types.FINISH_DETAIL_STOP_TOKEN, stop_token_id=0),
         ("stop", "stop_token", 0)),
    ],
)  # fmt: skip
def test_finish_reasons(finish, expected):
    _, total = collect(pb.GenerateResponse(outputs=[sample(0, 0, [1], "", 0, finish=finish)]))
    (output,) = total.outputs
    assert (output.finish_reason, output.finish_detail, output.stop_reason) == expected


def test_logprob_columns_become_rows():
    columns = types.LogprobColumns(
        chosen_logprobs=[-3.0, -0.5],
        chosen_ranks=[9, 1],
        num_top=2,
        top_token_ids=[4, 5, 2, 6],
        top_logprobs=[-0.25, -1.0, -0.5, -2.0],
        chosen_tokens=["x", "y"],
        top_tokens=["a", "b", "y", "c"],
    )
    deltas, total = collect(
        pb.GenerateResponse(outputs=[sample(0, 0, [1, 2], "xy", 0, logprobs=columns)]),
        pb.GenerateResponse(outputs=[sample(0, 2, [3], "z", 2, logprobs=types.LogprobColumns(chosen_logprobs=[-1.0]))]),
    )
    rows = total.outputs[0].logprobs
    assert rows[0] == {1: Logprob(-3.0, 9, "x"), 4: Logprob(-0.25, 1, "a"), 5: Logprob(-1.0, 2, "b")}
    assert list(rows[0]) == [1, 4, 5]
    assert rows[1] == {2: Logprob(-0.5, 1, "y"), 6: Logprob(-2.0, 2, "c")}
    assert rows[2] == {3: Logprob(-1.0, None, None)}
    assert len(deltas[1].outputs[0].logprobs) == 1


def test_prompt_logprobs_start_with_none():
    def part(start, *logprobs):
        return pb.GenerateResponse(
            prompt_logprobs=types.LogprobColumns(chosen_logprobs=logprobs), prompt_logprobs_start=start
        )

    deltas, total = collect(part(1, -1.0), part(2, -2.0, -3.0), prompt_token_ids=[7, 8, 9, 10])
    assert total.prompt_logprobs == [None, {8: Logprob(-1.0)}, {9: Logprob(-2.0)}, {10: Logprob(-3.0)}]
    assert [row for delta in deltas for row in delta.prompt_logprobs] == total.prompt_logprobs
    assert collect(part(1), prompt_token_ids=[7])[1].prompt_logprobs == [None], "a prompt of one token"
    with pytest.raises(InternalError, match="prompt logprobs from 2 where 1"):
        collect(part(2, -1.0), prompt_token_ids=[7, 8, 9])


def test_no_logprobs_means_none():
    _, total = collect(pb.GenerateResponse(outputs=[sample(0, 0, [1], "a", 0)]))
    assert total.outputs[0].logprobs is None
    assert total.prompt_logprobs is None


def test_lost_and_repeated_output_is_an_error():
    first = pb.GenerateResponse(outputs=[sample(0, 0, [1, 2], "ab", 0)])
    for second in (sample(0, 3, [4], "", 2), sample(0, 1, [2], "", 2)):
        with pytest.raises(InternalError, match="where 2 was next"):
            collect(first, pb.GenerateResponse(outputs=[second]))
    both = pb.GenerateResponse(outputs=[sample(0, 2, [3], "c", 2), sample(1, 3, [4], "", 0)])
    positions = Positions("r")
    positions.advance(first)
    with pytest.raises(InternalError, match="sample 1: the server sent token 3 where 0 was next"):
        positions.advance(both)
    (position,) = positions.message(pb.GenerateRequest(request_id="r"), again=True).resume.positions
    assert (position.sample_index, position.token_index) == (0, 2), "of such a response nothing is taken"
    ended = pb.GenerateResponse(outputs=[sample(0, 2, [3], "c", 2)])
    ended.outputs[0].finish.reason = types.FINISH_REASON_LENGTH
    with pytest.raises(InternalError, match="output after its finish"):
        collect(first, ended, pb.GenerateResponse(outputs=[pb.SampleOutput(finish=ended.outputs[0].finish)]))
    with pytest.raises(InternalError, match="text from 3 where 2"):
        collect(first, pb.GenerateResponse(outputs=[sample(0, 2, [3], "c", 3)]))
