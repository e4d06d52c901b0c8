"""Answers about adapters as no executor should send them: the core stays whole, and requests get their tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.v1 import execution_pb2 as pb
from scheduler_svc.core.adapters.events import AdapterLoaded, AdapterRegistered, AdapterRemoved, AdapterUnloaded
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import ExecutorSpec, FinishDetail, RequestSpec
from scheduler_svc.executors.adapters import loaded_adapter, unloaded_adapter
from tests.fuzz.wire.messages import any_message, damaged, mixed, near
from tests.helpers.core.core_executor import CoreExecutor
from tests.helpers.core.core_sampling import core_sampling
from tests.helpers.core.deltas import deltas

VOCAB = 50
NUM_ADAPTERS = 4
SPEC = ExecutorSpec(8, 40, 10, 8, 64, 64, max_loras=2, max_cpu_loras=2)
NUM_TOKENS = 5


def answers() -> st.SearchStrategy[tuple[str, bytes]]:
    """What comes where an answer is expected: nearly right ones more often than not."""
    index = st.integers(0, NUM_ADAPTERS + 1)
    loaded = st.builds(
        lambda index, content: pb.AdapterLoaded(adapter_index=index, content_hash=content).SerializeToString(),
        index,
        st.sampled_from([b"", b"1", b"2", b"x" * 64, b"x" * 65]),
    )
    unloaded = index.map(lambda index: pb.AdapterUnloaded(adapter_index=index).SerializeToString())

    def all_of(right: st.SearchStrategy[bytes], kind: type[pb.AdapterLoaded] | type[pb.AdapterUnloaded]) -> Bytes:
        changed = right.flatmap(lambda base: near(base, kind.DESCRIPTOR))
        return mixed((4, right), (2, changed), (1, damaged(right)), (1, any_message(kind.DESCRIPTOR)))

    return st.tuples(st.just("loaded"), all_of(loaded, pb.AdapterLoaded)) | st.tuples(
        st.just("unloaded"), all_of(unloaded, pb.AdapterUnloaded)
    )


Bytes = st.SearchStrategy[bytes]
READERS: dict[str, Callable[[bytes], AdapterLoaded | AdapterUnloaded]] = {
    "loaded": lambda payload: loaded_adapter(pb.AdapterLoaded.FromString(payload)),
    "unloaded": lambda payload: unloaded_adapter(pb.AdapterUnloaded.FromString(payload)),
}


class World:
    """A core with some adapters and a request of each, and none."""

    def __init__(self) -> None:
        self.core = Scheduler()
        self.core.add_executor(0, SPEC)
        for index in range(1, NUM_ADAPTERS + 1):
            self.core.adapter_event(AdapterRegistered(index, f"a{index}", "/a"))
        for index in range(NUM_ADAPTERS + 1):
            spec = RequestSpec(f"r{index}", (1, 2, 3), core_sampling(), max_tokens=NUM_TOKENS, adapter_index=index)
            self.core.add_request(spec, 0.0)
        self.core.adapter_event(AdapterRemoved(NUM_ADAPTERS))
        self.executor = CoreExecutor(SPEC, VOCAB)
        self.counts: dict[str, int] = {}

    def answer(self, kind: str, payload: bytes) -> None:
        """Take an answer as the plan loop does."""
        try:
            answer = READERS[kind](payload)
        except DecodeError:
            return
        self.core.adapter_event(answer, 0)
        self.core.adapter_commands(0)
        self.core.check_integrity()

    def finish(self) -> None:
        """The session breaks; another executor answers as it should: every request ends, or no executor can run it."""
        self.core.executor_lost(0, 0.0)
        self.core.session_opened(0, executor_id=0)
        self.executor = CoreExecutor(SPEC, VOCAB)
        for _ in range(60):
            for key, group in list(self.core.groups.items()):
                if self.core.adapter_refusal(group.spec.adapter_index) is not None:
                    self.core.abort(key, FinishDetail.ABORTED)
            commands = self.core.adapter_commands(0)
            for index in commands.unloads:
                self.executor.adapters.unload(index)
                self.core.adapter_event(AdapterUnloaded(index), 0)
            for each in commands.loads:
                known = self.core.adapters.adapters[each.index].content_hash or b"%d" % each.index
                self.executor.load(each.index, known)
                self.core.adapter_event(AdapterLoaded(each.index, known), 0)
            plan = self.core.plan_step(0, 0.0)
            if plan is not None:
                self.core.apply_result(0, self.executor.run(plan), 0.0)
            for delta in deltas(self.core.take_outputs()):
                self.counts[delta.key[1]] = self.counts.get(delta.key[1], 0) + len(delta.token_ids)
            self.core.check_integrity()
            if not (self.core.groups or self.core.lanes[0].slots.num_used):
                return
        raise AssertionError(f"{len(self.core.groups)} requests never end, or keep their slots")


@settings(max_examples=50, deadline=None)
@given(st.lists(answers(), max_size=12))
def test_any_answers_leave_the_core_whole(sent: list[tuple[str, bytes]]) -> None:
    world = World()
    world.core.adapter_commands(0)
    for kind, payload in sent:
        world.answer(kind, payload)
    world.finish()


@pytest.mark.parametrize(("content", "is_refused"), [(b"", True), (b"x" * 65, True), (b"x" * 64, False), (b"x", False)])
def test_a_hash_has_1_to_64_bytes(content: bytes, is_refused: bool) -> None:
    answer = loaded_adapter(pb.AdapterLoaded(adapter_index=1, content_hash=content))
    assert (answer.error is not None) is is_refused
    assert answer.content_hash == (b"" if is_refused else content)
