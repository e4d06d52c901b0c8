"""The limit of drafts of one request, from the client's call to the executor's plan, through a real scheduler.

The executor announces drafts and never has one: what it is allowed is in the plans.
"""

from __future__ import annotations

import grpc
import pytest

from cadenza import AsyncClient, InvalidRequestError, SamplingParams
from cadenza.v1 import generation_pb2 as pb
from tests.helpers.scheduler.scheduler_world import collect, error_of, request, violation, world
from tests.helpers.scheduler.scripted_executor import ScriptedExecutor

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("no_errors_are_logged")]
EXECUTORS_LIMIT = 8
LIMITS = [None, 0, 3, 64]
CHAT = [{"role": "user", "content": "hi"}]


class Recording(ScriptedExecutor):
    """Keeps the limit with which each sequence was admitted, by its seed."""

    def __init__(self, max_drafts: int = EXECUTORS_LIMIT) -> None:
        super().__init__(max_drafts=max_drafts)
        self.allowed: dict[int, int] = {}

    def run(self, plan):
        self.allowed |= {admitted.sampling.seed: admitted.max_drafts for admitted in plan.admitted}
        return super().run(plan)


@pytest.fixture
async def drafting(tokenizer_folder):
    async with world(Recording(), tokenizer=tokenizer_folder) as it:
        yield it


def limited(most: int | None, **fields) -> pb.GenerateRequest:
    speculation = None if most is None else pb.SpeculationParams(num_draft_tokens=most)
    return request(ids=[5, 6, 7], speculation=speculation, **fields)


def wanted_of(w, request_id: str) -> int | None:
    """The limit in the core's request."""
    return w.engine.find("", request_id).request.spec.max_drafts


def seeds(first: int, count: int) -> list[SamplingParams]:
    return [SamplingParams(seed=first + index, max_tokens=3) for index in range(count)]


async def test_the_limit_of_a_call_reaches_the_core_and_the_executor(drafting):
    """Each prompt of a call has the call's limit; the executor's own is the most."""
    w, wanted = drafting, {}
    async with AsyncClient(w.target) as client:
        for index, most in enumerate(LIMITS):
            first = 100 * index
            outputs = await client.generate(["a", [5, 6], {"prompt": "c"}], seeds(first, 3), speculation=most)
            outputs += await client.chat([CHAT, CHAT], seeds(first + 3, 2), speculation=most)
            streams = [
                client.stream("a", seeds(first + 5, 1)[0], speculation=most),
                client.stream_chat(CHAT, seeds(first + 6, 1)[0], speculation=most),
            ]
            outputs += [[delta async for delta in deltas][-1] for deltas in streams]
            assert all(output.finished for output in outputs)
            assert {wanted_of(w, output.request_id) for output in outputs} == {most}
            wanted |= {first + number: most for number in range(7)}
    assert w.executor.allowed == {
        seed: EXECUTORS_LIMIT if most is None else min(most, EXECUTORS_LIMIT) for seed, most in wanted.items()
    }


async def test_an_executor_without_drafts_takes_any_limit(tokenizer_folder):
    async with world(Recording(max_drafts=0), tokenizer=tokenizer_folder) as w:
        for seed, most in enumerate(LIMITS):
            assert len((await collect(w.stub.Generate(limited(most, seed=seed)))).ids) == 8
        assert w.executor.allowed == dict.fromkeys(range(len(LIMITS)), 0)


async def test_a_limit_that_is_too_large_is_refused(drafting):
    status = await error_of(drafting.stub.Generate(limited(65)))
    assert (status.code, violation(status)) == (
        grpc.StatusCode.INVALID_ARGUMENT.value[0],
        "speculation.num_draft_tokens",
    )
    # A client of another version may send what this one refuses.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cadenza.prompts.MAX_DRAFTS", 1000)
        async with AsyncClient(drafting.target) as client:
            with pytest.raises(InvalidRequestError) as caught:
                await client.generate("a", speculation=65)
    (found,) = caught.value.field_violations
    assert (found.field, found.description) == ("speculation.num_draft_tokens", "must be at most 64")
    assert drafting.executor.allowed == {}


async def test_the_limit_belongs_to_the_body_of_a_request(drafting):
    """The same request sent again is the same, with its limit; with another limit, or none, it is another one."""
    w = drafting
    for name, most, others in (("some", 3, (None, 0, 4)), ("off", 0, (None, 3)), ("none", None, (0, 3))):
        fields = {"request_id": name, "resume_grace_s": 60}
        first = await collect(w.stub.Generate(limited(most, **fields)))
        assert (await collect(w.stub.Generate(limited(most, **fields)))).ids == first.ids
        for other in others:
            status = await error_of(w.stub.Generate(limited(other, **fields)))
            assert status.code == grpc.StatusCode.ALREADY_EXISTS.value[0]
        assert wanted_of(w, name) == most


async def test_a_resumed_request_keeps_its_limit_and_a_resume_has_none(drafting):
    w = drafting
    w.executor.pause_after = 2
    call = w.stub.Generate(limited(3, request_id="a", resume_grace_s=60, max_tokens=30))
    await w.until(lambda: w.engine.find("", "a") is not None and w.engine.find("", "a").num_completion_tokens)
    call.cancel()
    resume = pb.GenerateRequest(request_id="a", resume=pb.ResumePoint())
    given = pb.GenerateRequest(request_id="a", resume=pb.ResumePoint(), speculation=pb.SpeculationParams())
    assert violation(await error_of(w.stub.Generate(given))) == "speculation"
    w.executor.pause_after = None
    w.executor.going.set()
    assert len((await collect(w.stub.Generate(resume))).ids) == 30
    assert wanted_of(w, "a") == 3
    assert w.executor.allowed == {1: 3}
