"""A model in two ranks, as processes: one is killed, frozen or out of memory in a load, and every stream goes on."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import psutil
import pytest

from cadenza import Client, RequestOutput, SamplingParams
from tests.checkpoints import make_checkpoint
from tests.faults.test_killed_processes import Up
from tests.helpers.machine.memory_limits import limited_addresses, memory_group_or_skip
from tests.helpers.service_scripts import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
STEP_TIMEOUT_S = 3
VOCAB, NUM_SEQS = 16384, 512
"""So many that the table of a rank's first request with penalties, 4 bytes for each token id of each slot, is a large
request for memory within a step."""
MAX_TOKENS = 250
PROMPTS = [[5, 7, 9], [20, 21, 22, 23], [60] * 40]
DRAWN = {"temperature": 0.8, "max_tokens": MAX_TOKENS}
PLAIN = SamplingParams(seed=1, ignore_eos=True, **DRAWN)
STRUCTURED = SamplingParams(seed=2, structured_outputs={"regex": r"(\[[a-e]{1,9}\] ){300}done"}, **DRAWN)
PENALISED = SamplingParams(seed=3, ignore_eos=True, frequency_penalty=0.5, temperature=0.8, max_tokens=20)


@pytest.fixture(scope="module", params=["llama", pytest.param("qwen3_5_moe_text", marks=pytest.mark.long)])
def up(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, request.param, tokenizer=True, vocab_size=VOCAB, max_position_embeddings=4096)
    sizes = "--num-gpu-blocks", "400", "--max-num-seqs", f"{NUM_SEQS}", "--max-num-batched-tokens", f"{NUM_SEQS}"
    options = "--tensor-parallel-size", "2", "--dtype", "float32", "--step-timeout-s", f"{STEP_TIMEOUT_S}"
    slow = "--speculative", "off"  # the load is to last until the fault
    running = Up(folder, tmp_path_factory.mktemp("up") / "log", *options, *sizes, *slow)
    yield running
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(60) == 0, running.log
    assert running.process.stdout is not None
    running.process.stdout.close()
    assert not ranks()


@pytest.fixture(scope="module")
def expected(up: Up) -> list[list[int]]:
    """What the load gives without a fault."""
    return tokens(load(up))


def ranks() -> list[psutil.Process]:
    """Return the processes of ranks 1 and up that are children of this one's."""
    found = []
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended while we looked
            if "executor_svc.startup.member" in each.cmdline():
                found.append(each)
    return found


def load(up: Up, *more: SamplingParams) -> list[RequestOutput]:
    prompts = PROMPTS + [[30 + index, 31, 32] for index in range(len(more))]
    with Client(up.target) as client:
        return client.generate(prompts, [PLAIN, STRUCTURED, PLAIN, *more])


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_a_rank_is_short_of_memory_and_the_request_that_wants_it_ends_alone(up: Up, expected: list[list[int]]) -> None:
    """The rank says so before any rank computes; the replica goes on, and has the memory once it is there."""
    (rank,) = ranks()
    with limited_addresses(rank.pid, more_bytes=8 << 20):
        *others, wanting = load(up, PENALISED)
    assert tokens(others) == expected
    assert (wanting.outputs[0].finish_detail, wanting.outputs[0].token_ids) == ("executor_error", [])
    up.wait_for_log("RankError: rank 1: MemoryError: Unable to allocate")
    *others, wanting = load(up, PENALISED)
    assert tokens(others) == expected
    assert wanting.outputs[0].finish_detail == "max_tokens"
    assert ranks() == [rank]


def rank_under_load(running: Future[list[RequestOutput]]) -> psutil.Process:
    """Return rank 1 once it has computed some of the load."""
    (rank,) = ranks()
    used = sum(rank.cpu_times()[:2])
    while sum(rank.cpu_times()[:2]) < used + 0.1:
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
        (signal.SIGKILL, 10, "rank 1 ended: process {}, killed by SIGKILL; this executor ends"),
        # A second more than the time for a step, if this machine has nothing else to do.
        pytest.param(
            *(signal.SIGSTOP, STEP_TIMEOUT_S + 10, f"longer than --step-timeout-s {STEP_TIMEOUT_S}: this process ends"),
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_rank_is_killed_or_frozen_and_no_token_is_lost(
    up: Up, expected: list[list[int]], number: signal.Signals, within_s: float, last_words: str
) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(load, up)
        rank = rank_under_load(running)
        rank.send_signal(number)
        assert ended(rank, within_s)
        assert tokens(running.result()) == expected
    # Of a killed rank the step in flight may hear first, from its connection.
    words = [last_words.format(rank.pid), *(["rank 1 is gone: "] if number == signal.SIGKILL else [])]
    until(lambda: any(each in up.log for each in words))


@pytest.mark.long
def test_the_kernel_kills_a_rank_that_is_out_of_memory_and_no_token_is_lost(up: Up, expected: list[list[int]]) -> None:
    """As a container's limit does. Counting penalised tokens takes another page of the table every few tokens."""
    counting = [replace(PENALISED, max_tokens=MAX_TOKENS)] * 4
    with memory_group_or_skip(limit_bytes=64 << 10) as group, ThreadPoolExecutor(1) as pool:
        running = pool.submit(load, up, *counting)
        rank = rank_under_load(running)
        group.write_text(str(rank.pid))
        assert ended(rank, within_s=20)
        outputs = tokens(running.result())
    assert outputs[: len(expected)] == expected
    assert [len(output) for output in outputs[len(expected) :]] == [MAX_TOKENS] * 4
    up.wait_for_log(f"rank 1 ended: process {rank.pid}, killed by SIGKILL; this executor ends")
