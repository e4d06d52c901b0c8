"""An executor is replaced at its address by one of another model or other numerics, or by one that cannot be used."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from scheduler_svc.core.errors import ModelChangedError, PreconditionError
from scheduler_svc.core.types import RequestSpec
from scheduler_svc.engine.served_model import PreparedModel
from scheduler_svc.plan_loop.model_change import ModelChange, ModelRefusedError
from scheduler_svc.plan_loop.ports import EngineRequest
from tests.helpers.core.core_sampling import core_sampling
from tests.helpers.scheduler.changing_executor import (
    MODEL,
    OTHER_NUMERICS,
    STEP_S,
    changing_world,
    expected,
    other_vocabulary,
    submit_all_kinds,
)


@pytest.mark.parametrize("options", [{}, {"allow_fingerprint_change": True}], ids=["default", "allowed"])
@pytest.mark.parametrize("is_exact", [True, False], ids=["exact", "fast"])
async def test_another_vocabulary_ends_every_request_and_the_new_model_serves(
    options: dict[str, Any], is_exact: bool
) -> None:
    async with changing_world(**options) as world:
        world.executor.become(is_exact=is_exact)
        await world.clock.advance(1.0)
        submit_all_kinds(world)
        await world.clock.advance(4 * STEP_S)
        partial = world.tokens("greedy")[0][:]
        other_vocabulary(world)
        await world.run()
        for live in world.live.values():
            assert isinstance(live.error, ModelChangedError)
            assert str(live.error) == (
                "the executor at virtual:1 came back with another model: /models/one with 50 token ids became "
                "/models/two with 60"
            )
        assert partial
        assert world.tokens("greedy") == [partial], "the output before the change stays readable"
        assert world.engine.connected
        world.submit("new", 6, 5)
        await world.run()
        assert world.details("new") == ["MAX_TOKENS"]


async def test_another_fingerprint_ends_requests_in_exact_mode(caplog: pytest.LogCaptureFixture) -> None:
    async with changing_world() as world:
        submit_all_kinds(world)
        await world.clock.advance(4 * STEP_S)
        world.executor.become(name="/models/two", **OTHER_NUMERICS)
        await world.run()
        message = (
            "the executor at virtual:1 came back with another numerics fingerprint, under which later tokens may "
            "differ: model /models/one became /models/two, weights 1111 became 2222; --allow-fingerprint-change on the "
            "scheduler lets requests go on"
        )
        assert {str(live.error) for live in world.live.values()} == {message}
        assert f"{message}: 8 unfinished requests end" in caplog.text
        world.submit("new", 6, 5)
        await world.run()
        assert world.tokens("new") == expected(world, "new")


@pytest.mark.parametrize(
    ("options", "is_exact"), [({"allow_fingerprint_change": True}, True), ({}, False)], ids=["allowed", "fast"]
)
async def test_another_fingerprint_is_a_warning_where_it_is_allowed(
    options: dict[str, Any], is_exact: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with changing_world(**options) as world:
        world.executor.become(is_exact=is_exact)
        await world.clock.advance(1.0)
        submit_all_kinds(world)
        await world.clock.advance(4 * STEP_S)
        lane = world.core.lanes[0]
        world.executor.become(**OTHER_NUMERICS)
        await world.run()
        for request_id in world.live:
            assert world.tokens(request_id) == expected(world, request_id), request_id
        assert "weights 1111 became 2222: 8 unfinished requests go on" in caplog.text
        assert world.core.lanes[0] is not lane, "the prefix cache of other weights must not be used"


async def test_requests_built_for_the_former_model_are_refused() -> None:
    """Tokenization in a thread may take longer than the change."""
    async with changing_world() as world:
        spec = RequestSpec("late", (1, 2, 3), core_sampling(), 4)
        other_vocabulary(world)
        await world.clock.advance(1.0)
        with pytest.raises(ModelChangedError, match="while the request was tokenized"):
            world.engine.submit(EngineRequest(spec, model_number=0))
        world.engine.submit(EngineRequest(spec, model_number=world.engine.served_model.number))


async def test_a_request_built_before_other_limits_is_checked_against_them() -> None:
    def check(spec: RequestSpec, model: Any) -> None:
        if spec.sampling.num_logprobs is not None and spec.sampling.num_logprobs > model.max_logprobs:
            raise PreconditionError("sampling_params.logprobs", "too many")

    async with changing_world() as world:
        world.engine.served_model.front = FakeFront(check)
        world.submit("runs", 6, 30, num_logprobs=5)
        world.submit("fits", 6, 30, num_logprobs=2)
        await world.clock.advance(4 * STEP_S)
        world.executor.become(max_logprobs=3)
        await world.clock.advance(1.0)
        assert str(world.live["runs"].error) == "too many"
        late = RequestSpec("late", (1, 2, 3), core_sampling(num_logprobs=5), 4)
        with pytest.raises(PreconditionError):
            world.engine.submit(EngineRequest(late, model_number=0))
        await world.run()
        assert world.tokens("fits") == expected(world, "fits")


# --- executors that cannot be used -----------------------------------------------------------------------------------


class FakeFront:
    """A front that refuses some models."""

    def __init__(self, check: Callable[[RequestSpec, Any], None], refuses: frozenset[str] = frozenset()) -> None:
        self._check, self._refuses = check, refuses

    async def prepare(self, change: ModelChange) -> PreparedModel:
        if change.after.name in self._refuses:
            raise ModelRefusedError(f"{change.after.name} has no tokenizer")
        return PreparedModel(check_request=self._check)


async def test_limits_that_contradict_the_options_wait_for_an_executor_that_fits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with changing_world(max_num_batched_tokens=4) as world:
        healthy: list[bool] = []
        world.engine.add_health_listener(healthy.append)
        world.submit("r", 6, 20)
        await world.clock.advance(4 * STEP_S)
        world.executor.become(max_num_seqs=5)
        await world.clock.advance(10.0)
        assert healthy == [False]
        assert not world.live["r"].ended
        errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
        assert errors == [
            "executor virtual:1 cannot be used: max_num_batched_tokens (4) must be at least max_num_seqs (5): a step "
            "gives every decoding sequence a token; requests wait"
        ]
        assert world.executor.num_described > 5, "it keeps trying"
        world.executor.become(max_num_seqs=3)
        await world.run()
        assert healthy == [False, True]
        assert world.tokens("r") == expected(world, "r")


async def test_a_model_that_the_front_refuses_ends_no_request() -> None:
    async with changing_world() as world:
        world.engine.served_model.front = FakeFront(lambda *_: None, frozenset({"/models/two"}))
        world.submit("r", 6, 20)
        await world.clock.advance(4 * STEP_S)
        other_vocabulary(world)
        await world.clock.advance(10.0)
        assert not world.engine.connected
        world.executor.become(
            **{name: getattr(MODEL, name) for name in ("name", "tokenizer", "vocab_size", "fingerprint")}
        )
        await world.run()
        assert world.tokens("r") == expected(world, "r")
