"""A model in two ranks, as processes: one is killed or frozen within a load, and every stream goes on."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from cadenza import LLM, RequestOutput, SamplingParams
from tests.checkpoints import make_llama

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PROMPTS = [[5, 7, 9], [20, 21, 22, 23], [60] * 40]


def ranks() -> list[psutil.Process]:
    """Return the processes of ranks 1 and up that are children of this one's."""
    found = psutil.Process().children(recursive=True)
    return [each for each in found if "executor_svc.startup.member" in " ".join(each.cmdline())]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_a_rank_is_killed_and_one_is_frozen_and_no_token_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_llama(tmp_path, tokenizer=True, vocab_size=300, max_position_embeddings=4096)
    sizes = {"num_gpu_blocks": 400, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=700, ignore_eos=True)
    constraint = {"regex": r"(\[[a-e]{1,9}\] ){300}done"}
    structured = SamplingParams(temperature=0.8, seed=2, max_tokens=700, structured_outputs=constraint)
    with (
        LLM(str(folder), dtype="float32", tensor_parallel_size=2, step_timeout_s=3, **sizes) as llm,
        ThreadPoolExecutor(1) as pool,
    ):

        def generate() -> list[list[int]]:
            return tokens(llm.generate(PROMPTS, [params, structured, params], use_tqdm=False))

        expected = generate()
        for number in (signal.SIGKILL, signal.SIGSTOP):
            (rank,) = ranks()
            replica = rank.parent()
            assert replica is not None
            running = pool.submit(generate)
            used = sum(rank.cpu_times()[:2])
            while sum(rank.cpu_times()[:2]) < used + 0.2:
                assert not running.done(), "the load ended before the fault"
            os.kill(rank.pid, number)
            assert running.result() == expected
            _, alive = psutil.wait_procs([rank, replica], timeout=5)
            assert not alive
    assert "rank 1 ended: process" in caplog.text
    assert "killed by SIGKILL" in caplog.text
    assert not ranks()
