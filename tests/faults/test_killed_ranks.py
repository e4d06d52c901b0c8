"""A model in two ranks, as processes: one is killed, frozen or out of memory within a load, and every stream goes on."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from cadenza import LLM, RequestOutput, SamplingParams
from tests.checkpoints import make_llama
from tests.helpers.memory_limits import limited_addresses, memory_group_or_skip

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
STEP_TIMEOUT_S = 3
VOCAB, NUM_SEQS = 32768, 256
"""So many that the table of a rank's first request with penalties, 4 bytes for each token id of each slot, is a large
request for memory within a step."""
PROMPTS = [[5, 7, 9], [20, 21, 22, 23], [60] * 40]
DRAWN = {"temperature": 0.8, "max_tokens": 700}
PLAIN = SamplingParams(seed=1, ignore_eos=True, **DRAWN)
STRUCTURED = SamplingParams(seed=2, structured_outputs={"regex": r"(\[[a-e]{1,9}\] ){300}done"}, **DRAWN)
PENALISED = SamplingParams(seed=3, ignore_eos=True, frequency_penalty=0.5, temperature=0.8, max_tokens=20)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = make_llama(
        tmp_path_factory.mktemp("model"), tokenizer=True, vocab_size=VOCAB, max_position_embeddings=4096
    )
    sizes = {"num_gpu_blocks": 400, "max_num_seqs": NUM_SEQS, "max_num_batched_tokens": NUM_SEQS}
    with LLM(str(folder), dtype="float32", tensor_parallel_size=2, step_timeout_s=STEP_TIMEOUT_S, **sizes) as running:
        yield running
    assert not ranks()


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    """What the load gives without a fault."""
    return tokens(load(llm))


def ranks() -> list[psutil.Process]:
    """Return the processes of ranks 1 and up that are children of this one's."""
    found = psutil.Process().children(recursive=True)
    return [each for each in found if "executor_svc.startup.member" in " ".join(each.cmdline())]


def load(llm: LLM, *more: SamplingParams) -> list[RequestOutput]:
    prompts = PROMPTS + [[30 + index, 31, 32] for index in range(len(more))]
    return llm.generate(prompts, [PLAIN, STRUCTURED, PLAIN, *more], use_tqdm=False)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_a_rank_is_short_of_memory_and_the_request_that_wants_it_ends_alone(
    llm: LLM, expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """The rank says so before any rank computes; the replica goes on, and has the memory once it is there."""
    (rank,) = ranks()
    with limited_addresses(rank.pid, more_bytes=8 << 20):
        *others, wanting = load(llm, PENALISED)
    assert tokens(others) == expected
    assert (wanting.outputs[0].finish_detail, wanting.outputs[0].token_ids) == ("executor_error", [])
    assert "rank 1: _ArrayMemoryError: Unable to allocate" in caplog.text
    *others, wanting = load(llm, PENALISED)
    assert tokens(others) == expected
    assert wanting.outputs[0].finish_detail == "max_tokens"
    assert ranks() == [rank]


def rank_under_load(running: Future[list[RequestOutput]]) -> psutil.Process:
    """Return rank 1 once it has computed some of the load."""
    (rank,) = ranks()
    used = sum(rank.cpu_times()[:2])
    while sum(rank.cpu_times()[:2]) < used + 0.2:
        assert not running.done(), "the load ended before the fault"
    return rank


def ended(rank: psutil.Process, within_s: float) -> bool:
    """Return whether the rank and its replica have ended by then."""
    replica = rank.parent()
    assert replica is not None
    return not psutil.wait_procs([rank, replica], timeout=within_s)[1]


@pytest.mark.parametrize(
    ("number", "within_s", "last_words"),
    [
        (signal.SIGKILL, 2, r"rank 1 ended: process \d+, killed by SIGKILL"),
        (signal.SIGSTOP, STEP_TIMEOUT_S + 2, f"longer than --step-timeout-s {STEP_TIMEOUT_S}: this process ends"),
    ],
)
def test_a_rank_is_killed_or_frozen_and_no_token_is_lost(
    llm: LLM,
    expected: list[list[int]],
    caplog: pytest.LogCaptureFixture,
    number: signal.Signals,
    within_s: float,
    last_words: str,
) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(load, llm)
        rank = rank_under_load(running)
        rank.send_signal(number)
        assert ended(rank, within_s)
        assert tokens(running.result()) == expected
    assert re.search(last_words, caplog.text)


def test_the_kernel_kills_a_rank_that_is_out_of_memory_and_no_token_is_lost(
    llm: LLM, expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """As a container's limit does. Counting penalised tokens takes another page of the table every few tokens."""
    counting = [replace(PENALISED, max_tokens=700)] * 4
    with memory_group_or_skip(limit_bytes=64 << 10) as group, ThreadPoolExecutor(1) as pool:
        running = pool.submit(load, llm, *counting)
        rank = rank_under_load(running)
        group.write_text(str(rank.pid))
        assert ended(rank, 5)
        outputs = tokens(running.result())
    assert outputs[: len(expected)] == expected
    assert outputs == tokens(load(llm, *counting))
    assert re.search(r"rank 1 ended: process \d+, killed by SIGKILL", caplog.text)
