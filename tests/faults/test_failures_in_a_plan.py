"""Steps that fail, by injection, under a load that mixes every algorithm: the other requests are served."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cadenza.v1 import execution_pb2, types_pb2
from cadenza.v1 import generation_pb2 as pb
from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan_wire.writing import request_in_slices
from cadenza_common.serving.plan_log import PlanLogReader
from cadenza_common.serving.slices import Work
from scheduler_svc.executors import client as executor_client
from scheduler_svc.recording import plan_log
from scheduler_svc.replay import __main__ as replay
from tests.checkpoints import make_llama
from tests.faults.test_killed_processes import Up
from tests.helpers.machine.full_disk import FullDisk
from tests.helpers.services import Running, cadenza_services, connection

pytestmark = pytest.mark.timeout(120)

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
VOCAB = 300
STEM = [(7 * place) % VOCAB for place in range(40)]
SAMPLED = {"temperature": 1.0, "ignore_eos": True, "max_tokens": 48}
LOAD: dict[str, tuple[list[int], dict[str, Any]]] = {
    "greedy": ([5, 6, 7], {"temperature": 0.0, "ignore_eos": True, "max_tokens": 60}),
    "sampled": (STEM, {**SAMPLED, "seed": 3}),
    "same stem": ([*STEM, 9], {**SAMPLED, "seed": 4, "logprobs": 2}),
    "three samples": (STEM[:20], {**SAMPLED, "seed": 5, "n": 3}),
    "beams": (STEM[:10], {"temperature": 0.0, "beam_width": 3, "ignore_eos": True, "max_tokens": 30}),
    "two more beams": (STEM[3:30], {"temperature": 0.0, "beam_width": 2, "ignore_eos": True, "max_tokens": 40}),
    "long prompt": ([8] * 150, {**SAMPLED, "seed": 6, "max_tokens": 30}),
}
SIZES = {"num_gpu_blocks": 22, "num_cpu_blocks": 30, "max_num_seqs": 12, "max_model_len": 256}
"""Too few blocks for all requests, so that some are swapped out."""
LOST = "lost: step "


@dataclasses.dataclass
class Sample:
    """One sample of an answer."""

    token_ids: list[int]
    detail: str = ""


Answers = dict[str, list[Sample]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("model"), vocab_size=VOCAB)


ON_BOTH = pytest.mark.parametrize("executor", ["simulated", "cpu"], indirect=True)


@pytest.fixture(params=["simulated", pytest.param("cpu", marks=pytest.mark.long)])
def executor(request: pytest.FixtureRequest, folder: Path) -> dict[str, Any]:
    """The options of an executor: the simulated one, and a model's on the CPU."""
    model = {"model": str(folder), "device": "cpu", **SIZES}
    return {**model, "simulate": "instant"} if request.param == "simulated" else model


async def answer(running: Running, name: str) -> list[Sample]:
    prompt, params = LOAD[name]
    request = pb.GenerateRequest(request_id=name, prompt=[{"tokens": {"ids": prompt}}], sampling_params=params)
    samples: dict[int, Sample] = {}
    async for response in running.generation.Generate(request):
        for output in response.outputs:
            sample = samples.setdefault(output.sample_index, Sample([]))
            sample.token_ids += output.token_ids
            if output.HasField("finish"):
                sample.detail = types_pb2.FinishDetail.Name(output.finish.detail).removeprefix("FINISH_DETAIL_")
    return [samples[index] for index in sorted(samples)]


async def answers(running: Running) -> Answers:
    found = await asyncio.gather(*(answer(running, name) for name in LOAD))
    return dict(zip(LOAD, found, strict=True))


@asynccontextmanager
async def services(options: dict[str, Any], **scheduler: Any) -> AsyncIterator[Running]:
    preempting = {"preemption": "swap", "skip_tokenizer_init": True, **scheduler}
    async with cadenza_services(scheduler={"one_session": False, **preempting}, **options) as running:
        yield running


@pytest.fixture(scope="module")
def known() -> dict[bool, Answers]:
    """What executors gave without faults, by whether they are simulated."""
    return {}


@pytest.fixture
async def undisturbed(executor: dict[str, Any], known: dict[bool, Answers]) -> Answers:
    """What this executor gives without faults."""
    is_simulated = "simulate" in executor
    if is_simulated not in known:
        async with services(executor) as running:
            found = await answers(running)
            assert (await running.load()).num_preemptions > 0
        assert {sample.detail for samples in found.values() for sample in samples} == {"MAX_TOKENS"}
        known[is_simulated] = found
    return known[is_simulated]


class Health:
    """What a watch of the scheduler's health has said."""

    def __init__(self, running: Running) -> None:
        self.statuses: list[int] = []
        watch = health_pb2_grpc.HealthStub(running.channel).Watch(health_pb2.HealthCheckRequest())
        self._task = asyncio.create_task(self._read(watch))

    async def _read(self, watch: Any) -> None:
        async for response in watch:
            self.statuses.append(response.status)

    async def end(self) -> list[int]:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        return self.statuses


async def check_whole(running: Running) -> None:
    """Nothing is held any more, and GetServerInfo says that all is well."""
    await running.wait_until_free()
    (state,) = (await running.generation.GetServerInfo(pb.GetServerInfoRequest())).executors
    assert state.connected
    assert not state.num_inflight_plans
    assert not state.stalled_step_id


def losses(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if LOST in record.getMessage()]


@pytest.mark.sampled(1)
@ON_BOTH
async def test_a_device_out_of_memory_costs_no_token(
    executor: dict[str, Any], undisturbed: Answers, caplog: pytest.LogCaptureFixture
) -> None:
    """Again and again, while prompts are computed, while all decode, and at once after a session was opened."""
    caplog.set_level(logging.INFO)
    async with services({**executor, "inject": "oom@1,oom@9,oom@10,oom@25,oom@60"}) as running:
        health = Health(running)
        assert await answers(running) == undisturbed
        assert (await running.load()).num_preemptions > 0
        await check_whole(running)
        assert await health.end() == [SERVING, *[NOT_SERVING, SERVING] * 5]
    assert len(losses(caplog)) == 5
    assert all(
        "ended OUT_OF_MEMORY: InjectedOutOfMemoryError: injected; requests wait" in each for each in losses(caplog)
    )


@ON_BOTH
async def test_logits_that_are_not_finite_end_their_samples_alone(
    executor: dict[str, Any], undisturbed: Answers, caplog: pytest.LogCaptureFixture
) -> None:
    async with services({**executor, "inject": "non-finite@12,non-finite@20:2,non-finite@33:4"}) as running:
        health, epoch = Health(running), await running.epoch()
        found = await answers(running)
        await check_whole(running)
        assert await running.epoch() == epoch, "the session goes on"
        assert await health.end() == [SERVING]
        # What has failed is served like any other when it is sent again: its KV was not kept.
        assert await answers(running) == undisturbed
    failed = {name for name, samples in found.items() if any(each.detail == "NON_FINITE_LOGITS" for each in samples)}
    assert 1 <= len(failed) <= 3
    for name, samples in found.items():
        for sample, whole in zip(samples, undisturbed[name], strict=True):
            if sample.detail == "NON_FINITE_LOGITS":
                assert sample.token_ids == whole.token_ids[: len(sample.token_ids)]
                assert len(sample.token_ids) < len(whole.token_ids)
            else:
                assert sample == whole
    warnings = [record.getMessage() for record in caplog.records if "non_finite_logits" in record.getMessage()]
    assert sorted(warning.split("'")[1] for warning in warnings) == sorted(failed)


async def test_a_host_pool_that_is_full_costs_no_token(executor: dict[str, Any], undisturbed: Answers) -> None:
    """Preempted sequences for which it has no room are computed again; without any fault the tokens are the same."""
    async with services({**executor, "num_cpu_blocks": 3, "inject": "oom@15,oom@40"}) as running:
        assert await answers(running) == undisturbed
        assert (await running.load()).num_preemptions > 0
        await check_whole(running)


def spoil(message: Any, kind: str) -> None:
    """Make a plan contradict itself, the slots or the limits."""
    match kind:
        case "columns":
            message.scheduled.slots.append(0)
        case "slot":
            message.released_slots.append(2**32 - 1)
        case "block":
            message.copies.add(sources=[10**9], destinations=[1])
        case "token":
            message.admitted.add(slot=message.admitted[0].slot if message.admitted else 0, token_ids=[VOCAB])
        case "step id":
            message.step_id += 5
        case "epoch":
            message.epoch -= 1
        case "reserved":
            message.transfers.add(peer="elsewhere")
        case "twice":
            message.swap_in.add(sources=[1, 2], destinations=[3, 3])


KINDS = ["columns", "slot", "block", "token", "step id", "epoch", "reserved", "twice"]


async def test_malformed_plans_cost_no_token(
    executor: dict[str, Any], undisturbed: Answers, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a faulty scheduler or network would send them: the executor refuses each, and both go on in a new session."""
    num_plans, spoiled = 0, []

    def malformed(plan: StepPlan, epoch: int) -> Work[execution_pb2.ExecuteRequest]:
        nonlocal num_plans
        num_plans += 1
        request = yield from request_in_slices(plan, epoch)
        if num_plans % 8 == 0 and len(spoiled) < len(KINDS):
            spoiled.append(KINDS[len(spoiled)])
            spoil(request.plan, spoiled[-1])
        return request

    monkeypatch.setattr(executor_client, "request_in_slices", malformed)
    async with services(executor) as running:
        health = Health(running)
        assert await answers(running) == undisturbed
        await check_whole(running)
        assert await health.end() == [SERVING, *[NOT_SERVING, SERVING] * len(KINDS)]
    assert spoiled == KINDS
    assert len(losses(caplog)) == len(KINDS)
    assert all("ended INVALID_PLAN: " in each for each in losses(caplog))


@pytest.mark.slow
async def test_a_lost_device_ends_the_process_and_costs_no_token(
    executor: dict[str, Any], undisturbed: Answers, tmp_path: Path
) -> None:
    """Each process loses its device in its 70th step that computes, and `cadenza up` starts the next one."""
    options = {name: value for name, value in executor.items() if name != "model"}
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    faults = ("--inject", "device-error@70", "--preemption", "swap", "--skip-tokenizer-init")
    up = Up(Path(executor["model"]), tmp_path / "log", *arguments, *faults)
    try:
        async with connection(up.target, one_session=False) as running:
            health = Health(running)
            assert await answers(running) == undisturbed
            await check_whole(running)
            statuses = await health.end()
    finally:
        up.process.terminate()
        assert await asyncio.to_thread(up.process.wait, 15) == 0, up.log
        assert up.process.stdout is not None
        up.process.stdout.close()
    num_deaths = up.log.count("the executor died (")
    assert num_deaths >= 1
    assert statuses == [SERVING, *[NOT_SERVING, SERVING] * num_deaths]
    lost = [line for line in up.log.splitlines() if LOST in line]
    assert len(lost) == num_deaths
    assert all("ended FAILED: InjectedDeviceError: CUDA error: an illegal memory access" in line for line in lost)
    assert up.log.count("the device is lost: CUDA error: an illegal memory access") == num_deaths


async def test_a_disk_that_is_full_under_a_recording_ends_the_recording_alone(
    executor: dict[str, Any],
    undisturbed: Answers,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step fails before the disk is full, and another one afterwards."""
    log = tmp_path / "log"
    monkeypatch.setattr(plan_log, "FileIO", partial(FullDisk, capacity=9000))
    async with services({**executor, "inject": "oom@6,oom@30"}, record=str(log)) as running:
        assert await answers(running) == undisturbed
        await check_whole(running)
    (message,) = [record.getMessage() for record in caplog.records if "recording" in record.getMessage()]
    assert message.startswith(f"recording to {log} has ended after ")
    assert message.endswith(" records, which can be read: No space left on device; requests are served on")
    # The first record that does not fit may be a plan that describes every sequence anew.
    assert 5000 < log.stat().st_size <= 9000
    with PlanLogReader(str(log)) as reader:
        kinds = {record.WhichOneof("record") for record in reader}
        assert not reader.num_cut_bytes
    assert "executor_lost" in kinds
    assert replay.main([str(log)]) == 0
    assert "all plans are the same" in capsys.readouterr().out
