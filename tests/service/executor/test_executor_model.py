"""The executor's service over real gRPC with a real tiny model, and as a process."""

from __future__ import annotations

import itertools
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import grpc
import pytest

from cadenza.v1 import execution_pb2 as pb
from cadenza.v1 import execution_pb2_grpc, types_pb2
from cadenza_common.wire.transport import MAX_STEP_LOGPROBS
from tests.helpers.executor.executor_harness import (
    GREEDY,
    Harness,
    admit,
    first_step_id,
    scheduled,
)


def sampled(seed: int, **fields: Any) -> types_pb2.SequenceSampling:
    return types_pb2.SequenceSampling(**{"temperature": 1, "top_p": 1, "repetition_penalty": 1} | fields, seed=seed)


WORDS = [types_pb2.TokenIds(ids=ids) for ids in ([5], [17, 18], [90, 3, 4], *[[i, i] for i in range(20, 130)])]
PROCESSED = [
    sampled(5, temperature=0, repetition_penalty=1.4, bias_token_ids=[3, 60], biases=[4.5, -3], bad_words=WORDS),
    sampled(6, frequency_penalty=0.9, presence_penalty=-0.4, allowed_token_ids=range(0, 131, 2), top_k=20),
    sampled(
        7, temperature=1.3, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2, bad_words=WORDS,
        allowed_token_ids=range(40), bias_token_ids=range(10), biases=[0.5] * 10, stop_token_ids=range(20, 40),
        min_tokens=12, top_p=0.95, num_logprobs=2, num_prompt_logprobs=3,
    ),
]  # fmt: skip
SAMPLINGS = [sampled(1), sampled(2, top_k=5), sampled(3, top_p=0.8), sampled(4, min_p=0.1), GREEDY, *PROCESSED]
NUM_OUTPUT = 12


def prompt_of(i: int) -> list[int]:
    return [2 + i, 30 + i, 7, 9 * i + 4, 11][: 3 + i % 3]


def test_the_logprobs_that_a_step_may_return_fit_one_message(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message of 56 MB held the scheduler's event loop for 85 ms."""
    from executor_svc.app import build_executor
    from executor_svc.config import ExecutorConfig

    size = types_pb2.LogprobColumns(
        top_token_ids=[1 << 20] * MAX_STEP_LOGPROBS, top_logprobs=[-1.0] * MAX_STEP_LOGPROBS
    ).ByteSize()
    assert size < 1_000_000
    limit, max_num_seqs = 800, 8
    monkeypatch.setattr("executor_svc.plan.description.MAX_STEP_LOGPROBS", limit)
    config = ExecutorConfig(
        model=str(checkpoint), num_gpu_blocks=64, max_num_seqs=max_num_seqs, max_num_batched_tokens=64, num_threads=1
    )
    limits = build_executor(config, Future()).limits
    assert limits.max_logprobs == limit // max_num_seqs < limits.vocab_size


async def generate(
    real: Harness, depth: int, samplings: list[types_pb2.SequenceSampling], order: list[int]
) -> list[list[int]]:
    """NUM_OUTPUT tokens for each sampling, slot = place in `order`, with `depth` plans in flight."""
    stream, step_id = await first_step_id(real)
    prompts = {i: prompt_of(i) for i in order}
    admitted = [
        admit(slot, prompts[i], [3 * slot, 3 * slot + 1, 3 * slot + 2], samplings[i]) for slot, i in enumerate(order)
    ]
    rows = [(slot, len(prompts[i]), True) for slot, i in enumerate(order)]
    plans: list[dict[str, Any]] = [{"admitted": admitted, "scheduled": scheduled(*rows)}]
    plans += [{"decode_ready": True}] * (NUM_OUTPUT - 1)
    outputs: dict[int, list[int]] = {i: [] for i in order}
    sent = 0
    for received in range(len(plans)):
        while sent < len(plans) and sent < received + depth:
            await stream.plan(step_id + sent, **plans[sent])
            sent += 1
        result = await stream.result()
        assert result.status == pb.STEP_STATUS_OK, result.error_message
        for slot, token in zip(result.slots, result.token_ids, strict=True):
            outputs[order[slot]].append(token)
    stream.call.cancel()
    return [outputs[i] for i in order]


async def test_same_tokens_whatever_is_in_flight_and_in_the_batch(real: Harness) -> None:
    everyone = list(range(len(SAMPLINGS)))
    together = await generate(real, 1, SAMPLINGS, everyone)
    assert all(len(tokens) == NUM_OUTPUT for tokens in together)
    assert len({tuple(tokens) for tokens in together}) == len(SAMPLINGS)
    assert await generate(real, 2, SAMPLINGS, everyone) == together
    assert await generate(real, 4, SAMPLINGS, everyone[::-1]) == together[::-1]
    for i in everyone:
        assert await generate(real, 2, SAMPLINGS, [i]) == [together[i]]


async def test_every_processor_does_its_work_in_one_batch(real: Harness) -> None:
    """What the definitions promise of any output, whatever the model says; `tests/golden` compares the values."""
    tokens = await generate(real, 2, SAMPLINGS, list(range(len(SAMPLINGS))))
    greedy, frequent, mixture = tokens[-3:]
    for output in (greedy, mixture):
        pairs = list(itertools.pairwise(output))
        assert 5 not in output
        assert (17, 18) not in pairs
        assert not any(a == b and 20 <= a < 130 for a, b in pairs)
    assert all(token % 2 == 0 for token in frequent)
    assert all(token < 20 for token in mixture), "20 to 39 stop, which min_tokens forbids"
    plain = [sampled(5, temperature=0), sampled(6, top_k=20), sampled(7, temperature=1.3, top_p=0.95)]
    without = await generate(real, 2, [*SAMPLINGS[:5], *plain], list(range(len(SAMPLINGS))))
    assert without[:5] == tokens[:5], "rows without processors do not notice the others"
    assert all(a != b for a, b in zip(without[5:], tokens[5:], strict=True)), "the processors change something"


@pytest.mark.parametrize("cut", [1, 4, 9])
async def test_histories_are_rebuilt_from_token_ids(real: Harness, cut: int) -> None:
    """Every sequence is preempted after `cut` tokens and comes back elsewhere: counts, words and min_tokens go on."""
    everyone = list(range(len(SAMPLINGS)))
    expected = await generate(real, 2, SAMPLINGS, everyone)
    stream, step = await first_step_id(real)
    admitted, rows = [], []
    for slot, i in enumerate(reversed(everyone)):
        tokens = prompt_of(i) + expected[i][:cut]
        blocks = [3 * slot, 3 * slot + 1, 3 * slot + 2]
        admitted.append(admit(slot, tokens, blocks, SAMPLINGS[i], num_prompt_tokens=len(prompt_of(i))))
        rows.append((slot, len(tokens), True))
    result = await stream.step(step, admitted=admitted, scheduled=scheduled(*rows))
    found = [[token] for token in result.token_ids]
    for further in range(1, NUM_OUTPUT - cut):
        result = await stream.step(step + further, decode_ready=True)
        for output, token in zip(found, result.token_ids, strict=True):
            output.append(token)
    assert found[::-1] == [output[cut:] for output in expected]
    stream.call.cancel()


async def test_prompt_logprobs_come_chunk_by_chunk_in_columns(real: Harness) -> None:
    stream, step = await first_step_id(real)
    prompt = list(range(3, 23))
    asking = sampled(1, num_prompt_logprobs=2)
    admitted = [admit(0, prompt, [0, 1, 2], asking), admit(1, [4, 5], [3], SAMPLINGS[1])]
    first = await stream.step(step, admitted=admitted, scheduled=scheduled((0, 11, False), (1, 2, True)))
    second = await stream.step(step + 1, scheduled=scheduled((0, 9, True)), decode_ready=True)
    third = await stream.step(step + 2, decode_ready=True)
    (head,), (tail,) = first.prompt_logprobs, second.prompt_logprobs
    assert (head.slot, head.start, len(head.columns.chosen_logprobs)) == (0, 1, 11)
    assert (tail.slot, tail.start, len(tail.columns.chosen_logprobs)) == (0, 12, 8)
    assert (head.columns.num_top, len(head.columns.top_token_ids), len(head.columns.top_logprobs)) == (2, 22, 22)
    assert not first.logprobs
    assert not third.prompt_logprobs
    stream.call.cancel()
    stream, step = await first_step_id(real)
    whole = await stream.step(step, admitted=[admit(3, prompt, [5, 6, 7], asking)], scheduled=scheduled((3, 20, True)))
    (item,) = whole.prompt_logprobs
    assert list(item.columns.chosen_logprobs) == [*head.columns.chosen_logprobs, *tail.columns.chosen_logprobs]
    assert list(item.columns.top_token_ids) == [*head.columns.top_token_ids, *tail.columns.top_token_ids]
    stream.call.cancel()


async def test_chunks_swaps_and_given_tokens_change_nothing(real: Harness) -> None:
    stream, step = await first_step_id(real)
    prompt = list(range(3, 23))
    result = await stream.step(
        step, admitted=[admit(0, prompt, [0, 1, 2], SAMPLINGS[0])], scheduled=scheduled((0, 20, True))
    )
    expected = list(result.token_ids)
    for i in range(3):
        expected += (await stream.step(step + 1 + i, decode_ready=True)).token_ids
    step += 4
    # In two chunks, then swapped out, released, swapped in elsewhere, and come back with the tokens so far.
    await stream.step(
        step,
        released_slots=[0],
        admitted=[admit(5, prompt, [9, 8, 7], SAMPLINGS[0])],
        scheduled=scheduled((5, 11, False)),
    )
    tokens = list((await stream.step(step + 1, scheduled=scheduled((5, 9, True)))).token_ids)
    await stream.step(step + 2, released_slots=[5], swap_out=[pb.BlockMoves(sources=[9, 8, 7], destinations=[0, 1, 2])])
    result = await stream.step(
        step + 3,
        swap_in=[pb.BlockMoves(sources=[0, 1, 2], destinations=[20, 21, 22])],
        admitted=[
            admit(
                1, prompt + tokens, [20, 21, 22], SAMPLINGS[0], num_prompt_tokens=20, num_computed_tokens=20, held=True
            )
        ],
        decode_ready=True,
    )
    assert not result.slots
    tokens += (await stream.step(step + 4, resumed_slots=[1], decode_ready=True)).token_ids
    # The next token is computed without sampling, and given.
    assert not (await stream.step(step + 5, scheduled=scheduled((1, 1, False)))).slots
    given = pb.GivenTokens(slots=[1], token_ids=[expected[2]])
    tokens += [expected[2], *(await stream.step(step + 6, given=given, decode_ready=True)).token_ids]
    assert tokens == expected
    stream.call.cancel()


# ---------------------------------------------------------------- the process


def start(checkpoint: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "executor_svc", "--model", str(checkpoint), "--num-gpu-blocks", "32", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_process_serves_refuses_a_taken_port_and_stops(checkpoint: Path) -> None:
    process = start(checkpoint, "--listen", "127.0.0.1:0")
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("ready 127.0.0.1:")
        address = line.split()[1]
        with grpc.insecure_channel(address) as channel:
            described = execution_pb2_grpc.ExecutionServiceStub(channel).Describe(pb.DescribeRequest(), timeout=20)
        assert described.kv.num_device_blocks == 32
        second = start(checkpoint, "--listen", address)
        _, errors = second.communicate(timeout=60)
        assert second.returncode == 1
        assert errors.strip().splitlines() == [f"error: cannot listen on {address}: the port is taken or not permitted"]
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "Traceback" not in errors
