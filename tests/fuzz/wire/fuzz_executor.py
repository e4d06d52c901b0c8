"""Every call of an executor with anything on the wire, above all plans: each is answered, and normal plans run on."""

from __future__ import annotations

from dataclasses import dataclass

import grpc
from hypothesis import strategies as st

from cadenza.v1 import admin_pb2, types_pb2
from cadenza.v1 import execution_pb2 as pb
from tests.fuzz.wire.calls import DEADLINE_S, HEALTH, Method, check, methods, send
from tests.fuzz.wire.messages import any_message, damaged, hostile, mixed, tag, varint, with_length
from tests.fuzz.wire.processes import VOCAB, FuzzedService

METHODS = [*methods(pb.DESCRIPTOR, "ExecutionService"), *methods(admin_pb2.DESCRIPTOR, "ExecutorAdminService"), *HEALTH]
_EXECUTE = next(method for method in METHODS if method.path.endswith("/Execute"))
_OTHERS = [method for method in METHODS if method is not _EXECUTE]
_ENDLESS = ("Profile", "Watch")
"""Calls that do not end by themselves: a trace of steps that never come, and a watch of health."""
_ENDLESS_S = 0.05
_RAN = (pb.STEP_STATUS_OK, pb.STEP_STATUS_SKIPPED, pb.STEP_STATUS_INVALID_PLAN)
"""A step that a plan cannot make fail: it runs, or is refused before anything is computed."""
_STEP_ID, _EPOCH, _PLAN, _OPEN = 1, 2, 2, 1
"""Field numbers."""
_NUM_TRIES = 5
_NUM_PROBED = 4
"""As many plans as may be in flight."""


@dataclass(frozen=True)
class SentPlan:
    """A plan without its step id and epoch, which the session knows; `honest`: they are right.

    Those of another plan are refused, or a step id that is huge would be the last one.
    """

    body: bytes
    honest: bool


@dataclass(frozen=True)
class Session:
    """What is sent on one plan stream: its opening, and plans, or messages that may be none."""

    opening: bytes
    messages: list[SentPlan | bytes]


Example = Session | tuple[Method, bytes]

_SLOTS = st.integers(0, 9)
_BLOCKS = st.integers(0, 63)
_DRAFTS = st.sampled_from([0, 0, 0, 1, 3, 5, 5, 6])
"""One more than the default limit, at times."""


def _samplings() -> st.SearchStrategy[types_pb2.SequenceSampling]:
    """Parameters with which a sequence can be sampled."""
    ids = st.lists(st.integers(0, VOCAB - 1), max_size=3, unique=True)
    return st.builds(
        types_pb2.SequenceSampling,
        temperature=st.sampled_from([0.0, 0.7, 1e-30, 1e30]),
        top_p=st.sampled_from([1.0, 0.5, 1e-9]),
        top_k=st.sampled_from([0, 1, 5]),
        min_p=st.sampled_from([0.0, 1.0]),
        repetition_penalty=st.sampled_from([1.0, 2.0, 1e-30, 1e30]),
        presence_penalty=st.sampled_from([0.0, 3e38, -3e38]),
        seed=st.sampled_from([0, 1, 2**64 - 1]),
        stop_token_ids=ids,
        allowed_token_ids=ids,
        num_candidates=st.sampled_from([0, 0, 0, 1, 256]),
        num_logprobs=st.sampled_from([None, None, 0, 3]),
        num_prompt_logprobs=st.sampled_from([None, None, 0, 2]),
        min_tokens=st.sampled_from([0, 0, 1, 2**31, 2**32 - 1]),
    )


def _sequences() -> st.SearchStrategy[pb.AdmittedSequence]:
    """Sequences that are right, or nearly: their numbers agree with each other more often than not."""

    def build(
        slot: int, tokens: list[int], computed: int, blocks: list[int], sampling: object, held: bool, drafts: int
    ) -> object:
        return pb.AdmittedSequence(
            slot=slot,
            token_ids=tokens,
            num_prompt_tokens=max(1, len(tokens) - 1),
            num_computed_tokens=min(computed, len(tokens) - 1),
            block_tables=[pb.BlockTable(block_ids=blocks)],
            sampling=sampling,
            held=held,
            max_drafts=drafts,
            max_len=drafts and len(tokens) + 5,
            draft_scope=drafts // 2,
        )

    return st.builds(
        build,
        _SLOTS,
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40),
        st.sampled_from([0, 0, 0, 5, 39]),
        st.lists(_BLOCKS, min_size=3, max_size=4),
        _samplings(),
        st.sampled_from([False, False, True]),
        _DRAFTS,
    )


def _plans() -> st.SearchStrategy[bytes]:
    """Plans that are right, or nearly."""
    pairs = st.lists(st.tuples(_SLOTS, st.integers(0, 6)), max_size=3)
    moves = st.lists(st.tuples(st.integers(0, 15), st.integers(0, 15)), max_size=2).map(
        lambda each: [pb.BlockMoves(sources=[a for a, _ in each], destinations=[b for _, b in each])]
    )

    def build(
        admitted: list[pb.AdmittedSequence],
        rows: list[tuple[int, int]],
        samples: bool,
        released: list[int],
        moved: list[list[pb.BlockMoves]],
        forks: list[tuple[int, int]],
        given: list[tuple[int, int]],
        ready: bool,
        drafts: int,
    ) -> bytes:
        if samples and admitted:
            rows = [(each.slot, len(each.token_ids) - each.num_computed_tokens) for each in admitted]
        return pb.StepPlan(
            admitted=admitted,
            released_slots=released,
            swap_out=moved[0],
            copies=moved[1],
            swap_in=moved[2],
            scheduled=pb.ScheduledTokens(
                slots=[slot for slot, _ in rows], num_tokens=[count for _, count in rows], samples=[samples] * len(rows)
            ),
            forks=pb.SampleForks(source_slots=[a for a, _ in forks], slots=[b for _, b in forks]),
            given=pb.GivenTokens(slots=[slot for slot, _ in given], token_ids=[token for _, token in given]),
            appends=[pb.BlockAppends(slots=[slot for slot, _ in given], block_ids=[block for _, block in given])],
            decode_ready=ready,
            max_drafts=drafts,
            debug_digest=samples,
        ).SerializeToString()

    none: st.SearchStrategy[list[tuple[int, int]]] = st.just([])
    seldom = mixed((5, none), (1, pairs))
    return st.builds(
        build,
        st.lists(_sequences(), max_size=3, unique_by=lambda each: each.slot),
        pairs,
        st.booleans(),
        mixed((3, st.just([])), (1, st.lists(_SLOTS, max_size=2))),
        st.lists(mixed((4, st.just([])), (1, moves)), min_size=3, max_size=3),
        seldom,
        seldom,
        st.booleans(),
        _DRAFTS,
    )


def _sessions() -> st.SearchStrategy[Session]:
    drawn = any_message(pb.StepPlan.DESCRIPTOR)
    plans = _plans()
    changed = st.builds(lambda plan, more: plan + more, plans, drawn)
    bodies = mixed((5, plans), (2, changed), (1, drawn), (1, damaged(plans)))
    sent = st.builds(SentPlan, bodies, st.sampled_from([True] * 19 + [False]))
    plans_alone = st.builds(Session, st.just(b""), st.lists(sent, min_size=1, max_size=4))
    anything = st.builds(
        Session,
        st.just(b"") | any_message(pb.OpenSession.DESCRIPTOR),
        st.lists(sent | hostile(pb.ExecuteRequest.DESCRIPTOR, []), max_size=6),
    )
    adapters = st.builds(Session, st.just(b""), st.lists(sent | _adapters(), min_size=1, max_size=6))
    return mixed((10, plans_alone), (2, anything), (1, adapters))


def _adapters() -> st.SearchStrategy[bytes]:
    """Loads and unloads of adapters: right ones of folders that are not there, and nearly right ones."""
    index, path = st.integers(0, 3), st.sampled_from(["", "/nowhere", "/etc", "..", "/proc/self/mem"])
    load = st.builds(lambda index, path: pb.LoadAdapter(adapter_index=index, name="a", path=path), index, path)
    loads = load.map(lambda each: pb.ExecuteRequest(load_adapter=each).SerializeToString())
    unloads = index.map(lambda each: pb.ExecuteRequest(unload_adapter=pb.UnloadAdapter(adapter_index=each)))
    both = loads | unloads.map(lambda each: each.SerializeToString())
    return both | both.flatmap(lambda base: hostile(pb.ExecuteRequest.DESCRIPTOR, [base]))


def examples() -> st.SearchStrategy[Example]:
    """A plan stream, or another call and its message."""
    sessions = _sessions()
    others = st.sampled_from(_OTHERS).flatmap(lambda method: st.tuples(st.just(method), hostile(method.request, [b""])))
    return mixed((5, sessions), (1, others))


class ExecutorFuzz:
    """Sends examples to an executor. It begins with a normal session, whose tokens must be the same ever after."""

    def __init__(self, service: FuzzedService) -> None:
        self._service = service
        self._epoch = 0
        self._incarnation = 1
        self._last_step_id = 0
        self.num_examples = 0
        self.statuses: dict[str, int] = {}
        self._expected = self._normal()

    def run(self, example: Example) -> None:
        """Send one example, and check that the executor is as before."""
        self.num_examples += 1
        if isinstance(example, Session):
            self._run_session(example)
        else:
            method, message = example
            name = method.path.rpartition("/")[2]
            ended = send(self._service.channel, method, [message], _ENDLESS_S if name in _ENDLESS else DEADLINE_S)
            self._count(ended.status.name)
            check(method, ended, endless=name in _ENDLESS)
        assert self._normal() == self._expected
        self._service.check()

    def _run_session(self, session: Session) -> None:
        messages, step_id, num_plans = [self._opening(session.opening)], self._last_step_id, 0
        for message in session.messages:
            if isinstance(message, bytes):
                messages.append(message)
                continue
            step_id += 1
            num_plans += 1
            plan = message.body + tag(_EPOCH, 0) + varint(self._epoch if message.honest else self._epoch - 1)
            if message.honest:
                plan += tag(_STEP_ID, 0) + varint(step_id)
            messages.append(tag(_PLAN, 2) + with_length(plan))
        ended = send(self._service.channel, _EXECUTE, messages)
        self._count(ended.status.name)
        check(_EXECUTE, ended)
        results = [each for each in map(pb.ExecuteResponse.FromString, ended.answers) if each.HasField("result")]
        for result in results:
            self._count(pb.StepStatus.Name(result.result.status))
            assert result.result.status in _RAN, result.result
        # Also of those whose results were not delivered, because a later message ended the stream.
        self._last_step_id = step_id
        if ended.status is grpc.StatusCode.OK:
            assert len(results) >= num_plans, "a plan has no answer"

    def _opening(self, changes: bytes) -> bytes:
        """An opening with these changes, but for the epoch: it only grows, so a huge one would be the last."""
        self._epoch += 1
        opening = pb.OpenSession(scheduler_id="fuzz", protocol_version=1, scheduler_incarnation=self._incarnation)
        fields = opening.SerializeToString()
        epoch = pb.OpenSession(epoch=self._epoch).SerializeToString()
        return tag(_OPEN, 2) + with_length(fields + changes + epoch)

    def _normal(self) -> list[int]:
        """The tokens of a sequence in a session of its own; again if a busy machine did not run it within 2 s.

        A session that sends nothing for so long ends, and this one sends no heartbeats.
        """
        for _ in range(_NUM_TRIES):
            tokens = self._tokens()
            if tokens:
                break
        return tokens

    def _tokens(self) -> list[int]:
        opening = self._opening(b"")
        admitted = pb.AdmittedSequence(
            slot=3,
            token_ids=[5, 6, 7],
            num_prompt_tokens=3,
            block_tables=[pb.BlockTable(block_ids=[9])],
            sampling=types_pb2.SequenceSampling(top_p=1, repetition_penalty=1),
        )
        plans = [
            pb.StepPlan(
                step_id=self._last_step_id + 1 + index,
                epoch=self._epoch,
                admitted=[] if index else [admitted],
                scheduled=None if index else pb.ScheduledTokens(slots=[3], num_tokens=[3], samples=[True]),
                decode_ready=bool(index),
            )
            for index in range(_NUM_PROBED)
        ]
        messages = [opening, *(pb.ExecuteRequest(plan=plan).SerializeToString() for plan in plans)]
        ended = send(self._service.channel, _EXECUTE, messages)
        check(_EXECUTE, ended)
        self._last_step_id += _NUM_PROBED
        if ended.status is grpc.StatusCode.UNAVAILABLE:
            return []
        if ended.status is grpc.StatusCode.ABORTED:
            # A session with garbage may have named another process of this scheduler, which has replaced this one.
            self._incarnation += 1
            return []
        results = [pb.ExecuteResponse.FromString(answer).result for answer in ended.answers]
        tokens = [token_id for result in results for token_id in result.token_ids]
        assert len(tokens) == _NUM_PROBED, (ended.status, ended.message, results)
        return tokens

    def _count(self, status: str) -> None:
        self.statuses[status] = self.statuses.get(status, 0) + 1
