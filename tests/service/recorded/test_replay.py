"""A run over real gRPC, recorded, then made again twice: by the core without an executor, by an executor alone.

The run has more requests than its memory holds, samples, beams, swaps, a prefix cache, logprobs, a stop string, an
abort, and an executor that is lost and comes back with nothing.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from cadenza.v1 import execution_pb2, generation_pb2, types_pb2
from cadenza.v1 import planlog_pb2 as pb
from cadenza_common.serving.plan_log import PlanLogReader, record_bytes
from executor_svc.config import ExecutorConfig
from executor_svc.replay import __main__ as executor_replay
from executor_svc.replay import plan_replay
from scheduler_svc.core.steps.suspects import MAX_DEATHS_ALONE
from scheduler_svc.replay import __main__ as scheduler_replay
from tests.checkpoints import make_llama
from tests.helpers.marks import short_and_long
from tests.helpers.scheduler.scheduler_world import collect, world
from tests.helpers.scheduler.scheduler_world import request as any_request
from tests.helpers.scheduler.scripted_executor import ScriptedExecutor
from tests.helpers.services import executor_service, scheduler_service

pytestmark = pytest.mark.slow

NUM_CROWD = 10
NUM_REQUESTS = NUM_CROWD + 5
EXECUTOR = {"num_gpu_blocks": 40, "num_cpu_blocks": 16, "max_num_seqs": 16, "max_num_batched_tokens": 64}
Records = list[pb.PlanLogRecord]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("model"), tokenizer=True, vocab_size=300, max_position_embeddings=2048)


@pytest.fixture(scope="module", params=["model", "simulated"])
def recorded(model: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of a run."""
    folder = tmp_path_factory.mktemp("log")
    options: dict[str, Any] = dict(EXECUTOR)
    options |= {"speculative": "suffix", "num_speculative_tokens": 3}
    if request.param == "simulated":
        # The number of drafts follows from times and acceptances, which the log has.
        options["speculative"] = "auto"
        # So that no request ends before the executor does.
        (folder / "costs.json").write_text(json.dumps({"step_us": 1000}))
        options["simulate"] = str(folder / "costs.json")
    asyncio.run(_run(model, folder / request.param, options))
    return folder / request.param


IN_SHORT_SIMULATED = pytest.mark.parametrize(
    "recorded", short_and_long(["model", "simulated"], ["simulated"]), indirect=True, scope="module"
)


async def _run(model: Path, log: Path, options: dict[str, Any]) -> None:
    async with AsyncExitStack() as stack:
        executor = await stack.enter_async_context(AsyncExitStack())
        address = await executor.enter_async_context(executor_service(model, **options))
        running = await stack.enter_async_context(
            scheduler_service(address, one_session=False, record=str(log), preemption="auto", max_wait_s=5.0)
        )
        text = (await collect(running.generation.Generate(_request("stopped", max_tokens=40)))).text
        stopped = await collect(running.generation.Generate(_request("again", max_tokens=40, stop=[text[9:11]])))
        assert stopped.finish.detail == types_pb2.FINISH_DETAIL_STOP_STRING
        victim = running.generation.Generate(_request("victim", max_tokens=500))
        crowd = [
            running.generation.Generate(_request(f"r{index}", seed=index, max_tokens=150, temperature=0.8, logprobs=2))
            for index in range(NUM_CROWD)
        ]
        crowd.append(running.generation.Generate(_request("samples", n=3, temperature=0.9, max_tokens=60)))
        crowd.append(running.generation.Generate(_request("beams", beam_width=3, n=2, max_tokens=60)))
        await victim.read()
        assert (await running.generation.Abort(generation_pb2.AbortRequest(request_id="victim"))).aborted
        await crowd[0].read()
        await executor.aclose()
        await executor.enter_async_context(executor_service(model, listen=address, **options))
        await asyncio.gather(*map(_drained, crowd))
        await running.wait_until_free()


async def _drained(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass
    assert await call.code() is grpc.StatusCode.OK


def _request(request_id: str, **params: Any) -> generation_pb2.GenerateRequest:
    params = {"temperature": 0.0, "ignore_eos": True} | params
    return any_request(ids=[5, 6, 7] * 8, request_id=request_id, **params)


def read(path: Path) -> tuple[pb.PlanLogHeader, Records]:
    with PlanLogReader(str(path)) as log:
        return log.header, list(log)


def rewritten(path: Path, recorded: Path, change: Callable[[Records], Any]) -> tuple[Path, Any]:
    """A copy of the log with something changed in its records, and what `change` returned."""
    header, records = read(recorded)
    changed = change(records)
    path.write_bytes(b"".join(map(record_bytes, [pb.PlanLogRecord(header=header), *records])))
    return path, changed


def kinds(records: Records, kind: str) -> list[Any]:
    return [getattr(record, kind) for record in records if record.HasField(kind)]


@pytest.mark.sampled(1)
def test_the_run_is_what_it_says(recorded: Path) -> None:
    """Else the other tests prove little."""
    header, records = read(recorded)
    assert header.executor.kv.num_device_blocks == 40
    assert len({opened.incarnation for opened in kinds(records, "session_opened")}) == 2
    assert len(kinds(records, "add_request")) == NUM_REQUESTS
    assert [call.request_id for call in kinds(records, "abort")] == ["victim"]
    assert [call.request_id for call in kinds(records, "stop_sample")] == ["again"]
    assert kinds(records, "executor_described")
    plans = [call.plan for call in kinds(records, "plan_step") if call.HasField("plan")]
    admitted = [sequence for plan in plans for sequence in plan.admitted]
    came_back = [sequence for sequence in admitted if len(sequence.token_ids) > sequence.num_prompt_tokens]
    assert len(admitted) > NUM_REQUESTS, "none was preempted or came back"
    assert came_back
    results = [call.result for call in kinds(records, "apply_result")]
    assert any(result.logprobs for result in results)
    assert any(result.candidates for result in results)
    assert any(plan.HasField("forks") for plan in plans)
    assert any(plan.HasField("given") for plan in plans)
    assert any(plan.copies for plan in plans)
    assert len({plan.max_drafts for plan in plans}) > (2 if recorded.name == "simulated" else 1)
    assert any(sum(result.num_accepted) for result in results)
    if recorded.name == "simulated":
        # There moves cost nothing; on the model it is for measured rates to say, and the log has what was measured.
        assert any(plan.swap_out for plan in plans)
        assert any(plan.swap_in for plan in plans)
    assert all(plan.epoch for plan in plans)
    assert {result.epoch for result in results} == {opened.epoch for opened in kinds(records, "session_opened")}


@pytest.mark.sampled(1)
def test_the_core_makes_the_same_plans(recorded: Path, capsys: pytest.CaptureFixture) -> None:
    assert scheduler_replay.main([str(recorded)]) == 0
    _, records = read(recorded)
    plans = sum(call.HasField("plan") for call in kinds(records, "plan_step"))
    out = capsys.readouterr().out
    assert f" {plans} plans, {NUM_REQUESTS} requests, " in out
    assert out.endswith(" tokens: all plans are the same\n")


@pytest.mark.sampled(1)
def test_an_executor_gives_the_same_results(recorded: Path, capsys: pytest.CaptureFixture) -> None:
    assert executor_replay.main([str(recorded)]) == 0
    _, records = read(recorded)
    plans = sum(call.HasField("plan") for call in kinds(records, "plan_step"))
    results = kinds(records, "apply_result")
    tokens = sum(len(call.result.token_ids) for call in results)
    out, err = capsys.readouterr()
    assert out == (f"{recorded}: {plans} plans, {len(results)} results, {tokens} tokens: all results are the same\n")
    assert "fingerprint" not in err


@IN_SHORT_SIMULATED
def test_memory_is_lost_with_an_incarnation_slots_with_a_session(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans of a new session admit everything anew, so they run on an executor that was kept as on a new one."""
    built: list[ExecutorConfig] = []
    build = plan_replay.build_executor
    monkeypatch.setattr(plan_replay, "build_executor", lambda *args: (built.append(args[0]), build(*args))[1])
    assert executor_replay.main([str(recorded)]) == 0
    assert len(built) == 2

    def change(records: Records) -> None:
        for opened in kinds(records, "session_opened"):
            opened.incarnation = 5

    path, _ = rewritten(tmp_path / "log", recorded, change)
    assert executor_replay.main([str(path)]) == 0
    assert len(built) == 3
    capsys.readouterr()


def test_another_plan_is_found_at_its_step(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    def change(records: Records) -> int:
        plans = [call.plan for call in kinds(records, "plan_step") if call.plan.appends]
        plan = plans[len(plans) // 2]
        plan.appends[0].block_ids[0] ^= 1
        return plan.step_id

    path, step_id = rewritten(tmp_path / "log", recorded, change)
    assert scheduler_replay.main([str(path)]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{path}: step {step_id}, record ")
    assert second.startswith("  appends[0].block_ids: recorded [")


def test_another_token_is_found_at_its_step(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    def change(records: Records) -> tuple[int, int]:
        results = [call.result for call in kinds(records, "apply_result")]
        results = [result for result in results if len(result.token_ids) > 2 and not result.num_tokens]
        result = results[len(results) // 2]
        result.token_ids[1] ^= 1
        return result.step_id, result.slots[1]

    path, (step_id, slot) = rewritten(tmp_path / "log", recorded, change)
    assert executor_replay.main([str(path)]) == 1
    assert capsys.readouterr().out.startswith(f"{path}: step {step_id}: slot {slot}: token ids: recorded [")


def test_another_bit_of_a_logprob_is_found(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    def change(records: Records) -> int:
        results = [call.result for call in kinds(records, "apply_result") if call.result.logprobs]
        result = results[len(results) // 2]
        columns = result.logprobs[0].columns
        columns.top_logprobs[1] -= 2**-20
        return result.step_id

    path, step_id = rewritten(tmp_path / "log", recorded, change)
    assert executor_replay.main([str(path)]) == 1
    assert f"step {step_id}: slot " in (out := capsys.readouterr().out), out
    assert ": logprobs: recorded " in out


def test_a_plan_that_reads_a_wrong_block_gives_other_tokens(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """What the executor's replay is for: a mistake of the core shows in what comes out."""

    def change(records: Records) -> None:
        plans = [call.plan for call in kinds(records, "plan_step")]
        plan = next(plan for plan in plans if any(len(row.block_tables[0].block_ids) > 1 for row in plan.admitted))
        table = next(row.block_tables[0] for row in plan.admitted if len(row.block_tables[0].block_ids) > 1)
        table.block_ids[0] = table.block_ids[1]

    path, _ = rewritten(tmp_path / "log", recorded, change)
    assert executor_replay.main([str(path)]) == 1
    capsys.readouterr()


@IN_SHORT_SIMULATED
def test_a_log_that_was_cut_is_replayed_as_far_as_it_goes(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "log"
    path.write_bytes(recorded.read_bytes()[:-3])
    for program in (scheduler_replay, executor_replay):
        assert program.main([str(path)]) == 0
        assert "the last record was cut off (" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--block-size=32", "--block-size: 32 is not what was recorded, 16"),
        ("--num-gpu-blocks=39", "--num-gpu-blocks: 39 is not what was recorded, 40"),
        ("--max-num-seqs=9", "--max-num-seqs: 9 is not what was recorded, 16"),
        ("--blok-size=16", "--blok-size: there is no such option"),
        ("--model=/no/such/folder", "--model /no/such/folder"),
    ],
)
def test_options_that_contradict_the_log(
    recorded: Path, option: str, message: str, capsys: pytest.CaptureFixture
) -> None:
    assert executor_replay.main([str(recorded), option]) == 2
    assert f"error: {message}" in capsys.readouterr().err


def test_other_weights_are_said_and_give_other_tokens(
    model: Path, recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    other = make_llama(tmp_path, seed=7, tokenizer=True, vocab_size=300, max_position_embeddings=2048)
    assert executor_replay.main([str(recorded), "--model", str(other)]) == 1
    out, err = capsys.readouterr()
    assert "token ids: recorded [" in out
    assert "the numerics fingerprint is not the recorded one (" in err
    small = make_llama(tmp_path / "small", max_position_embeddings=2048)
    assert executor_replay.main([str(recorded), "--model", str(small)]) == 2
    assert "--model: " in (err := capsys.readouterr().err), err
    assert "has 131 token ids" in err


@IN_SHORT_SIMULATED
def test_both_programs_as_they_are_called(recorded: Path) -> None:
    for module, word in (("scheduler_svc.replay", "plans"), ("executor_svc.replay", "results")):
        done = subprocess.run(
            [sys.executable, "-m", module, str(recorded)], capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith(f"all {word} are the same\n")


async def test_a_step_that_failed_is_in_the_log(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Its result never reaches the core, which learns only that the session has ended."""
    failing = execution_pb2.StepResult(status=execution_pb2.STEP_STATUS_FAILED, error_message="it burns")
    path = tmp_path / "log"
    async with world(ScriptedExecutor(fail_with=failing), skip_tokenizer_init=True, record=str(path)) as w:
        out = await collect(w.stub.Generate(any_request(ids=[1, 2, 3])))
        assert out.finish.detail == types_pb2.FINISH_DETAIL_EXECUTOR_ERROR
    header, records = read(path)
    assert header.executor.model.name == "toy"
    failed = [call.result for call in kinds(records, "step_failed")]
    assert {result.error_message for result in failed} == {"it burns"}
    assert len(failed) == 1 + MAX_DEATHS_ALONE, "once among others, then alone"
    assert {result.step_id for result in failed} < {call.plan.step_id for call in kinds(records, "plan_step")}
    assert scheduler_replay.main([str(path)]) == 0
    assert not kinds(records, "apply_result")


async def test_a_file_that_cannot_be_written_is_known_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=rf"^--record {tmp_path}: is a directory$"):
        async with world(skip_tokenizer_init=True, record=str(tmp_path)):
            pass
