"""A model with recurrent layers behind both services: requests share prefixes behind copies of states, have samples
and beams, are preempted, and lose their executor. They get what each gets without all that, and the log of it runs
again twice.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from cadenza.v1 import generation_pb2
from cadenza.v1 import planlog_pb2 as pb
from cadenza_common.serving.plan_log import PlanLogReader
from executor_svc.replay import __main__ as executor_replay
from scheduler_svc.replay import __main__ as scheduler_replay
from tests.checkpoints import make_checkpoint
from tests.helpers.scheduler.scheduler_world import request as any_request
from tests.helpers.services import executor_service, scheduler_service

pytestmark = pytest.mark.slow

PROMPT = [5, 6, 7, 90, 31] * 8
EXECUTOR: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 6, "max_num_batched_tokens": 32, "block_size": 8}
TIGHT: dict[str, Any] = {
    **EXECUTOR, "num_gpu_blocks": 20, "num_cpu_blocks": 8, "speculative": "suffix", "num_speculative_tokens": 3,
}  # fmt: skip


def requests() -> list[generation_pb2.GenerateRequest]:
    made = [
        any_request(ids=[*PROMPT, 10 + index], request_id=f"r{index}", seed=index, temperature=0.8, max_tokens=60)
        for index in range(5)
    ]
    made.append(any_request(ids=PROMPT, request_id="pair", seed=9, n=2, temperature=0.9, max_tokens=50))
    made.append(any_request(ids=PROMPT[:17], request_id="greedy", temperature=0.0, max_tokens=70))
    made += [
        any_request(ids=PROMPT[:number], request_id=f"beams {number}", n=2, beam_width=3, max_tokens=40)
        for number in (9, 33)
    ]
    for each in made:
        each.sampling_params.ignore_eos = True
    return made


async def outputs(model: Path, log: Path | None, **options: Any) -> list[Any]:
    """What requests get; with a log, of a run that it has, with an executor that is lost on the way."""
    async with AsyncExitStack() as stack:
        executor = await stack.enter_async_context(AsyncExitStack())
        address = await executor.enter_async_context(executor_service(model, **options))
        kept = {"enable_prefix_caching": False} if log is None else {"record": str(log), "preemption": "auto"}
        running = await stack.enter_async_context(scheduler_service(address, one_session=False, **kept))
        calls = [running.generation.Generate(each) for each in requests()]
        tasks = [asyncio.create_task(tokens_of(call)) for call in calls[1:]]
        first: dict[int, list[int]] = {}
        add(first, await calls[0].read())
        if log is not None:
            await executor.aclose()
            await executor.enter_async_context(executor_service(model, listen=address, **options))
        found = [await tokens_of(calls[0], first), *await asyncio.gather(*tasks)]
        await running.wait_until_free()
        return found


async def tokens_of(call: Any, found: dict[int, list[int]] | None = None) -> dict[int, list[int]]:
    """By sample."""
    found = {} if found is None else found
    while (response := await call.read()) is not grpc.aio.EOF:
        add(found, response)
    assert await call.code() is grpc.StatusCode.OK
    return found


def add(found: dict[int, list[int]], response: generation_pb2.GenerateResponse) -> None:
    for output in response.outputs:
        found.setdefault(output.sample_index, []).extend(output.token_ids)


async def test_tokens_are_those_of_a_run_without_cache_and_the_log_runs_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, path = make_checkpoint(tmp_path / "model", "lfm2"), tmp_path / "log"
    expected = await outputs(model, None, **EXECUTOR, num_gpu_blocks=200)
    assert await outputs(model, path, **TIGHT) == expected
    with PlanLogReader(str(path)) as log:
        header, records = log.header, list(log)
    assert header.executor.kv.state.pages_per_state
    assert await asyncio.to_thread(scheduler_replay.main, [str(path)]) == 0
    assert await asyncio.to_thread(executor_replay.main, [str(path)]) == 0
    assert "all results are the same" in capsys.readouterr().out
    check_log(records)


def check_log(records: list[pb.PlanLogRecord]) -> None:
    """Else the tokens prove little."""
    plans = [record.plan_step.plan for record in records if record.HasField("plan_step")]
    admitted = [sequence for plan in plans for sequence in plan.admitted]
    results = [record.apply_result.result for record in records if record.HasField("apply_result")]
    assert any(plan.HasField("forks") for plan in plans)
    assert any(result.saved_slots for result in results), "no copy of a state"
    assert any(0 < each.num_computed_tokens < each.num_prompt_tokens for each in admitted), "no hit"
    assert any(len(each.token_ids) > each.num_prompt_tokens for each in admitted), "none was preempted or came back"
    assert any(sum(result.num_drafts) for result in results), "no draft"
    assert len({record.session_opened.incarnation for record in records if record.HasField("session_opened")}) == 2
