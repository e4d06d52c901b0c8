"""A scheduler with a journal, really killed: after its restart every request has the tokens of an undisturbed run."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from cadenza import LLM, AsyncClient, SamplingParams
from cadenza.v1 import generation_pb2 as pb
from cadenza.v1 import types_pb2
from tests.checkpoints import make_checkpoint
from tests.faults.test_killed_processes import Up
from tests.helpers.executor.simulated_process import simulated_process
from tests.helpers.scheduler.killed_scheduler import (
    KillableScheduler,
    Load,
    Output,
    killable_scheduler,
    mixed_requests,
    request,
)
from tests.helpers.service_process import service_process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
NUM_REQUESTS = 32
_SIZES = ("--max-num-seqs", "24", "--num-gpu-blocks", "600")


@pytest.fixture
async def executor(tmp_path: Path) -> AsyncIterator[str]:
    """A simulated executor whose steps take 5 ms."""
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"step_us": 5000}))
    async with simulated_process("--simulate", str(costs), "--simulate-vocab-size", "500", *_SIZES) as process:
        yield process.address


@pytest.fixture
async def scheduler(executor: str, tmp_path: Path) -> AsyncIterator[KillableScheduler]:
    async with killable_scheduler(executor, tmp_path / "journal", "--skip-tokenizer-init") as running:
        yield running


async def undisturbed(scheduler: KillableScheduler, requests: list[pb.GenerateRequest]) -> dict[str, Output]:
    """The outputs of these requests under other ids."""
    renamed = [pb.GenerateRequest.FromString(each.SerializeToString()) for each in requests]
    for each in renamed:
        each.request_id = f"undisturbed {each.request_id}"
    outputs = await scheduler.run(renamed).finished()
    assert not [output.message for output in outputs.values() if output.error]
    return {name.removeprefix("undisturbed "): output for name, output in outputs.items()}


def check(found: dict[str, Output], expected: dict[str, Output], *parts: dict[str, Output]) -> None:
    """Every output is whole, is what was expected, and goes on from what earlier streams brought."""
    for name, output in found.items():
        assert output.error is None, f"{name}: {output.error} {output.message}"
        if expected[name].seed == output.seed:
            assert output == expected[name], name
        for part in parts:
            assert output.begins_with(part[name]), name


async def test_a_scheduler_killed_under_load_loses_and_repeats_no_token(scheduler: KillableScheduler) -> None:
    """Two kills in a row, the second while the restored requests run."""
    requests = mixed_requests(NUM_REQUESTS, 100)
    expected = await undisturbed(scheduler, requests)
    first = scheduler.run(requests)
    await first.until(lambda outputs: sum(output.num_tokens for output in outputs.values()) > 400)
    await scheduler.restart()
    second = scheduler.run(requests)
    await second.until(lambda outputs: sum(output.num_tokens for output in outputs.values()) > 400)
    await scheduler.restart()
    found = await scheduler.run(requests).finished()
    parts = await first.finished(), await second.finished()
    assert sum(output.error is not None for output in parts[0].values()) > NUM_REQUESTS // 2
    check(found, expected, *parts)
    # The seeds that the service drew are the same, before and after.
    assert len({output.seed for output in found.values()} - {output.seed for output in expected.values()}) >= 4


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "qwen3_5_delta"])
async def test_the_same_with_a_real_model(family: str, tmp_path: Path) -> None:
    """Texts, stop strings and results that are read again after the kill included; also with recurrent states."""
    sizes = {"vocab_size": 300, "max_position_embeddings": 1024}
    model = make_checkpoint(tmp_path / "model", family, tokenizer=True, **sizes)
    async with (
        service_process("executor_svc", "--model", str(model), "--device", "cpu", *_SIZES) as executor,
        killable_scheduler(executor.address, tmp_path / "journal") as scheduler,
    ):
        requests = mixed_requests(NUM_REQUESTS, 120, stop="e")
        expected = await undisturbed(scheduler, requests)
        finishes = {sample.finish for output in expected.values() for sample in output.samples.values()}
        assert types_pb2.FINISH_DETAIL_STOP_STRING in finishes
        load = scheduler.run(requests)
        await load.until(lambda outputs: sum(output.num_tokens for output in outputs.values()) > 400)
        await scheduler.restart()
        found = await scheduler.run(requests).finished()
        check(found, expected, await load.finished())
        await scheduler.restart()
        assert await scheduler.run(requests).finished() == found


async def test_a_request_killed_before_its_first_token_goes_on(scheduler: KillableScheduler) -> None:
    """It waits in the queue behind 24 others that have all slots."""
    requests = [request(f"long {index}", [5, 6], 350, temperature=0.0) for index in range(24)]
    last = request("last", [9, 8, 7], 20, temperature=0.7, seed=3)
    expected = await undisturbed(scheduler, [last])
    others = scheduler.run(requests)
    await others.until(lambda outputs: all(output.num_tokens for output in outputs.values()))
    load = scheduler.run([last])
    await scheduler.queued(1)
    await scheduler.restart()
    assert not load.outputs["last"].num_tokens
    assert scheduler.process is not None
    assert "25 unfinished requests go on" in await scheduler.process.logged("restored from the journal")
    for each in requests:
        await scheduler.abort(each.request_id)
    check(await scheduler.run([last]).finished(), expected)
    await asyncio.gather(others.finished(), load.finished())


async def test_a_result_is_there_after_a_kill(scheduler: KillableScheduler) -> None:
    """The finish was shown; then a restarted scheduler returns the same result without computing anything."""
    requests = mixed_requests(14, 20)
    expected = await scheduler.run(requests).finished()
    await scheduler.restart()
    again = scheduler.run(requests)
    found = await again.finished()
    assert found == expected
    assert (await scheduler.load()).num_steps == 0


async def test_requests_whose_streams_stay_away_are_aborted(executor: str, tmp_path: Path) -> None:
    options = ("--skip-tokenizer-init", "--restart-grace-s", "0.5", "--log-requests")
    async with killable_scheduler(executor, tmp_path / "journal", *options) as scheduler:
        load = scheduler.run([request("r", [5, 6], 4000, temperature=0.0)])
        await load.until(lambda outputs: outputs["r"].num_tokens > 3)
        await scheduler.restart()
        assert scheduler.process is not None
        assert "aborted" in await scheduler.process.logged("request 'r'")
        await load.finished()


async def test_a_second_process_on_the_directory_is_refused(
    scheduler: KillableScheduler, executor: str, tmp_path: Path
) -> None:
    other = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "scheduler_svc", "--executor", executor, "--listen", "127.0.0.1:0"),
        *("--journal", str(tmp_path / "journal")),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    _, error = await other.communicate()
    assert other.returncode == 1
    assert scheduler.process is not None
    pid = scheduler.process.process.pid
    assert error.decode().splitlines()[-1] == (
        f"error: --journal {tmp_path}/journal: process {pid} uses this journal; each scheduler needs its own"
    )


async def test_a_full_disk_refuses_new_requests_and_lets_the_others_go_on(
    scheduler: KillableScheduler, tmp_path: Path
) -> None:
    """No file may grow over what the journal has: as on a full disk, every write beyond it fails."""
    running, later = request("running", [5, 6], 200, temperature=0.0), request("later", [7], 5, temperature=0.0)
    later.resume_grace_s = 30
    expected = await undisturbed(scheduler, [running, later])
    load = scheduler.run([running])
    await load.until(lambda outputs: outputs["running"].num_tokens > 3)
    assert scheduler.process is not None
    limits = psutil.Process(scheduler.process.process.pid)
    limits.rlimit(psutil.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
    refused = (await scheduler.run([later]).finished())["later"]
    assert refused.error is not None
    assert refused.error.name == "UNAVAILABLE"
    assert f"the journal {tmp_path}/journal cannot be written" in refused.message
    assert refused.num_tokens == 0
    # The tokens come; the finish waits until it can be recorded.
    await load.until(lambda outputs: outputs["running"].num_tokens == 200)
    assert load.outputs["running"].samples[0].finish is None
    limits.rlimit(psutil.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    check(await load.finished(), expected)
    check(await scheduler.run([later]).finished(), expected)


@pytest.mark.long
async def test_up_restarts_a_killed_scheduler_that_goes_on_at_its_port(tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"step_us": 5000}))
    journal = ("--journal", str(tmp_path / "journal"))
    up = await asyncio.to_thread(Up, Path("simulated"), tmp_path / "log", "--simulate", str(costs), *journal)
    try:
        requests = mixed_requests(8, 150)
        expected = await Load(up.target, requests).finished()
        renamed = mixed_requests(8, 150)
        for each in renamed:
            each.request_id += " again"
        load = Load(up.target, renamed)
        await load.until(lambda outputs: sum(output.num_tokens for output in outputs.values()) > 100)
        os.kill(up.service("scheduler_svc").pid, signal.SIGKILL)
        part = await load.finished()
        await asyncio.to_thread(up.wait_for_log, f"cadenza   │ the scheduler is back at {up.target}")
        found = await Load(up.target, renamed).finished()
        check(found, {f"{name} again": output for name, output in expected.items()}, part)
    finally:
        up.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(up.process.wait, 15) == 0, up.log
        assert up.process.stdout is not None
        up.process.stdout.close()


def test_llm_has_the_option(tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text("{}")
    folder = tmp_path / "journal"
    with LLM("simulated", simulate=str(costs), journal=str(folder), use_tqdm_on_load=False) as llm:
        assert llm.server_info().options["journal"] == str(folder)
        assert (folder / "journal.sqlite").exists()


async def test_in_fast_mode_tokens_go_on_from_those_that_are_stored(tmp_path: Path) -> None:
    """What was shown is never computed again: the restarted scheduler computes it as a prompt, without sampling it."""
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"step_us": 5000}))
    fast = ("--simulate", str(costs), "--simulate-vocab-size", "500", "--numerics", "fast", *_SIZES)
    async with (
        simulated_process(*fast) as executor,
        killable_scheduler(executor.address, tmp_path / "journal", "--skip-tokenizer-init") as scheduler,
    ):
        requests = mixed_requests(14, 120)
        expected = await undisturbed(scheduler, requests)
        load = scheduler.run(requests)
        await load.until(lambda outputs: sum(output.num_tokens for output in outputs.values()) > 500)
        await scheduler.restart()
        found = await scheduler.run(requests).finished()
        num_sampled = (await scheduler.load()).num_output_tokens
        part = await load.finished()
        check(found, expected, part)
        shown = sum(output.num_tokens for output in part.values())
        total = sum(output.num_tokens for name, output in found.items())
        drawn_more = sum(_num_drawn_more(each, found[each.request_id]) for each in requests)
        assert num_sampled <= total + drawn_more - shown


def _num_drawn_more(each: pb.GenerateRequest, output: Output) -> int:
    """Upper bound of the tokens that a request samples and does not return."""
    params = each.sampling_params
    width = max(params.best_of, params.beam_width)
    return 0 if not width else width * params.max_tokens


async def test_another_fingerprint_is_data_loss_for_what_was_shown(tmp_path: Path) -> None:
    """A sample that had finished is complete; a request that had shown nothing goes on under the new numerics."""
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"step_us": 5000}))
    options = ("--simulate", str(costs), "--simulate-vocab-size", "500", "--max-num-seqs", "4")
    shown = request("shown", [5, 6], 2000, temperature=0.9, seed=4, n=3, stop_token_ids=list(range(4)))
    waits = request("waits", [9, 8], 20, temperature=0.9, seed=5, n=4)
    async with (
        simulated_process(*options) as executor,
        killable_scheduler(executor.address, tmp_path / "journal", "--skip-tokenizer-init") as scheduler,
    ):
        expected = await undisturbed(scheduler, [waits])
        load = scheduler.run([shown])
        await load.until(lambda outputs: _num_finished(outputs["shown"]) in (1, 2))
        waiting = scheduler.run([waits])
        await scheduler.queued(1)
        await scheduler.kill()
        part = (await load.finished())["shown"]
        await waiting.finished()
        address = executor.address
        await executor.kill()
        async with simulated_process(*options, "--numerics", "fast", listen=address):
            await scheduler.start()
            found = await scheduler.run([shown, waits]).finished()
    assert found["waits"] == expected["waits"]
    assert found["shown"].error is not None
    assert found["shown"].error.name == "DATA_LOSS"
    assert "another numerics fingerprint" in found["shown"].message
    for index, sample in part.samples.items():
        if sample.finish is not None:
            assert found["shown"].samples[index] == sample


def _num_finished(output: Output) -> int:
    return sum(sample.finish is not None for sample in output.samples.values())


@pytest.mark.long
async def test_a_clients_loop_does_not_notice_that_the_scheduler_was_killed(
    scheduler: KillableScheduler, tmp_path: Path
) -> None:
    """`client.stream` resumes by itself; every token comes once, under the numbers of an undisturbed run."""
    params = SamplingParams(max_tokens=300, temperature=0.8, seed=5, n=2, ignore_eos=True)
    async with AsyncClient(scheduler.target) as client:
        expected = (await client.generate([[7, 8, 9]], params))[0].outputs
        found: dict[int, list[int]] = {0: [], 1: []}
        restarting: asyncio.Task[None] | None = None
        async for delta in client.stream([7, 8, 9], params):
            for sample in delta.outputs:
                found[sample.index] += sample.token_ids
            if restarting is None and len(found[0]) > 40:
                restarting = asyncio.create_task(scheduler.restart())
        assert restarting is not None
        await restarting
    assert [found[sample.index] for sample in expected] == [list(sample.token_ids) for sample in expected]
