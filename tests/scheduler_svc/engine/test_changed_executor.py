"""An executor is replaced at its address by one with other limits, on virtual time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from scheduler_svc.core.errors import PreconditionError
from scheduler_svc.core.types import BeamSpec
from scheduler_svc.replay.__main__ import replay
from tests.helpers.scheduler.changing_executor import (
    MODEL,
    STEP_S,
    ChangingWorld,
    changing_world,
    expected,
    other_vocabulary,
    submit_all_kinds,
)

_ALLOWED_ENDS = {"MAX_TOKENS", "EOS", "STOP_TOKEN", "MAX_MODEL_LEN", "KV_CAPACITY"}


SAME_NUMERICS: dict[str, dict[str, Any]] = {
    "another path": {"name": "/models/copy", "tokenizer": "/models/copy"},
    "fewer sequences": {"max_num_seqs": 2, "num_slots": 3},
    "more sequences": {"max_num_seqs": 8, "num_slots": 16},
    "smaller budget": {"max_num_batched_tokens": 5},
    "larger budget": {"max_num_batched_tokens": 64},
    "fewer blocks": {"num_device_blocks": 16},
    "more blocks": {"num_device_blocks": 128},
    "larger blocks": {"block_size": 16, "num_device_blocks": 16},
    "smaller blocks": {"block_size": 1, "num_device_blocks": 200},
    "shorter sequences": {"max_model_len": 60},
    "longer sequences": {"max_model_len": 512},
    "fewer logprobs": {"max_logprobs": 2},
    "no host pool": {"num_host_blocks": 0},
    "fewer plans in flight": {"max_inflight_plans": 1},
    "no shared prefixes": {"shares_prefixes": False},
    "all at once": {
        "name": "/b", "max_num_seqs": 3, "num_slots": 5, "num_device_blocks": 9, "block_size": 8, "num_host_blocks": 2,
        "max_num_batched_tokens": 30, "max_model_len": 90,
    },
}  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize("changes", SAME_NUMERICS.values(), ids=SAME_NUMERICS)
@pytest.mark.parametrize("num_steps", [1, 7])
async def test_requests_that_fit_the_new_limits_get_the_tokens_of_an_undisturbed_run(
    changes: dict[str, Any], num_steps: int
) -> None:
    async with changing_world(preemption="swap") as world:
        submit_all_kinds(world)
        await world.clock.advance(num_steps * STEP_S)
        world.executor.become(**changes)
        await world.run()
        for request_id in world.live:
            assert world.tokens(request_id) == expected(world, request_id), request_id
            assert world.live[request_id].error is None
        assert world.engine.model == world.executor.model
        assert world.engine.load().num_device_blocks == world.executor.model.num_device_blocks


async def test_a_swapped_group_goes_on_where_the_host_pool_is_gone() -> None:
    async with changing_world(preemption="swap") as world:
        world.executor.become(num_device_blocks=12)
        await world.clock.advance(1.0)
        for index in range(3):
            world.submit(f"r{index}", 10, 25)
        while not world.engine.load().num_swapped:
            await world.clock.advance(STEP_S)
        world.executor.become(num_host_blocks=0)
        await world.run()
        for request_id in world.live:
            assert world.tokens(request_id) == expected(world, request_id)
        assert world.engine.load().num_host_blocks == 0


async def test_the_new_limits_hold_for_new_requests() -> None:
    async with changing_world() as world:
        world.executor.become(max_num_seqs=2, num_slots=2)
        await world.clock.advance(1.0)
        for index in range(4):
            world.submit(f"r{index}", 4, 20)
        await world.clock.advance(5 * STEP_S)
        assert world.engine.load().num_running == 2
        await world.run()


# --- requests that fit no more ---------------------------------------------------------------------------------------

MISFITS: dict[str, tuple[dict[str, Any], dict[str, Any], int, str, str]] = {
    "samples before their fork": (
        {"num_samples": 4, "prompt": 45}, {"max_num_seqs": 3}, 0, "sampling_params.n",
        "the executor that came back cannot hold it: 4 sequences exceed max_num_seqs = 3",
    ),
    "a beam search that waits": (
        {"beams": BeamSpec(4), "temperature": 0.0, "prompt": 45}, {"max_num_seqs": 3}, 0, "sampling_params.beam_width",
        "the executor that came back cannot hold it: 4 sequences exceed max_num_seqs = 3",
    ),
    "a beam search that runs": (
        {"beams": BeamSpec(4), "temperature": 0.0, "prompt": 5}, {"max_num_seqs": 3}, 4, "sampling_params.beam_width",
        "the executor that came back cannot hold it: 4 sequences exceed max_num_seqs = 3",
    ),
    "a prompt over max_model_len": (
        {"prompt": 50}, {"max_model_len": 50}, 0, "prompt",
        "the executor that came back cannot hold it: 50 prompt tokens and one of output exceed max_model_len = 50",
    ),
    "a prompt over the pool": (
        {"prompt": 50}, {"num_device_blocks": 12}, 0, "prompt",
        "the executor that came back cannot hold it: 50 prompt tokens and one of output need 13 KV blocks of 4 tokens; "
        "the pool has 12",
    ),
}  # fmt: skip


@pytest.mark.parametrize("misfit", MISFITS.values(), ids=MISFITS)
async def test_a_request_that_can_never_fit_ends_alone_with_an_error_that_names_the_limit(
    misfit: tuple[dict[str, Any], dict[str, Any], int, str, str],
) -> None:
    request, changes, num_steps, field, message = misfit
    async with changing_world() as world:
        world.submit("misfit", **{"prompt": 6, **request})
        world.submit("other", 7, 12)
        await world.clock.advance(num_steps * STEP_S)
        world.executor.become(**changes)
        await world.run()
        error = world.live["misfit"].error
        assert isinstance(error, PreconditionError)
        assert (error.field, str(error)) == (field, message)
        assert world.live["other"].error is None
        assert world.tokens("other") == expected(world, "other")


@pytest.mark.parametrize(
    ("changes", "detail"),
    [({"max_model_len": 25}, "MAX_MODEL_LEN"), ({"num_device_blocks": 6}, "KV_CAPACITY")],
    ids=["max_model_len", "blocks"],
)
async def test_a_request_with_output_that_is_too_long_now_ends_with_the_reason(
    changes: dict[str, Any], detail: str
) -> None:
    async with changing_world() as world:
        world.submit("long", 10, 60)
        world.submit("short", 7, 12)
        await world.clock.advance(25 * STEP_S)
        before = len(world.tokens("long")[0])
        assert before > 15
        world.executor.become(**changes)
        await world.run()
        assert world.details("long") == [detail]
        assert world.tokens("long") == [expected(world, "long")[0][:before]], "no token is taken back"
        assert world.tokens("short") == expected(world, "short")


async def test_samples_after_their_fork_go_on_one_by_one() -> None:
    async with changing_world() as world:
        world.submit("samples", 6, 12, num_samples=4)
        await world.clock.advance(4 * STEP_S)
        assert all(world.tokens("samples"))
        world.executor.become(max_num_seqs=1, num_slots=1)
        await world.run()
        assert world.tokens("samples") == expected(world, "samples")


async def test_an_executor_that_is_replaced_between_description_and_session_gets_no_plan() -> None:
    async with changing_world() as world:
        world.submit("r", 6, 20)
        await world.clock.advance(4 * STEP_S)
        world.executor.opens_as = 99
        world.executor.become(max_num_seqs=2)
        await world.clock.advance(0.3)
        assert world.engine.executor_infos()[0].incarnation != 99
        await world.run()
        assert world.tokens("r") == expected(world, "r")


# --- the plan log, and histories at random ---------------------------------------------------------------------------


async def test_a_plan_log_with_changes_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.log"
    async with changing_world(record=str(path)) as world:
        submit_all_kinds(world)
        await world.clock.advance(6 * STEP_S)
        world.executor.become(num_device_blocks=16, max_num_seqs=2)
        await world.clock.advance(6 * STEP_S + 0.3)
        other_vocabulary(world)
        await world.clock.advance(1.0)
        world.submit("new", 6, 5)
        await world.run()
    assert replay(str(path)) == 0
    assert "all plans are the same" in capsys.readouterr().out


@st.composite
def limits(draw: st.DrawFn) -> dict[str, Any]:
    """Limits of an executor of the same model."""
    max_num_seqs, block_size = draw(st.integers(1, 6)), draw(st.sampled_from([1, 4, 8, 16]))
    return {
        "max_num_seqs": max_num_seqs,
        "num_slots": max_num_seqs + draw(st.integers(0, 3)),
        "max_num_batched_tokens": max_num_seqs + draw(st.sampled_from([0, 4, 30])),
        "block_size": block_size,
        "num_device_blocks": draw(st.sampled_from([40, 80, 200])) // block_size + 1,
        "num_host_blocks": draw(st.sampled_from([0, 3, 30])),
        "max_model_len": draw(st.sampled_from([20, 45, 128])),
    }


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    changes=st.lists(st.tuples(st.integers(0, 30), limits()), min_size=1, max_size=4),
    preemption=st.sampled_from(["swap", "recompute"]),
)
async def test_after_any_change_of_limits_a_request_ends_with_its_tokens_or_with_a_reason(
    data: st.DataObject, changes: list[tuple[int, dict[str, Any]]], preemption: str
) -> None:
    async with changing_world(preemption=preemption) as world:
        for index in range(data.draw(st.integers(1, 8))):
            kind = data.draw(st.sampled_from(["one", "one", "samples", "beams"]))
            more: dict[str, Any] = {"num_samples": data.draw(st.integers(2, 4))} if kind == "samples" else {}
            if kind == "beams":
                more = {"beams": BeamSpec(data.draw(st.integers(2, 4))), "temperature": 0.0}
            prompt = data.draw(st.integers(1, 40))
            world.submit(f"r{index}", prompt, data.draw(st.sampled_from([1, 12, 40])), **more)
        for num_steps, changed in changes:
            await world.clock.advance(num_steps * STEP_S)
            world.executor.become(**changed)
            await world.clock.advance(0.25)
        await world.run(60.0)
        for request_id, live in world.live.items():
            check_end(world, request_id, replace(MODEL, **changes[-1][1]).max_model_len)
            assert live.ended


def check_end(world: ChangingWorld, request_id: str, max_model_len: int) -> None:
    live, whole = world.live[request_id], expected(world, request_id)
    if live.error is not None:
        assert isinstance(live.error, PreconditionError)
        assert live.error.field in ("prompt", "sampling_params.n", "sampling_params.beam_width")
        assert "came back" in str(live.error)
        assert not any(world.tokens(request_id)) or live.request.spec.beams is not None
        return
    for tokens, detail, full in zip(world.tokens(request_id), world.details(request_id), whole, strict=True):
        assert detail in _ALLOWED_ENDS
        cut = detail in ("MAX_MODEL_LEN", "KV_CAPACITY")
        if live.request.spec.beams is None:
            assert tokens == (full[: len(tokens)] if cut else full)
        else:
            assert cut or tokens == full
