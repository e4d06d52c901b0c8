"""Steps of several ranks: rank 0 passes each plan on, all agree before the first exchange, and rank 0 samples.

A rank that cannot run a plan says so before any rank computes. A failure after that is marked in the memory of
exchanges, so that no rank waits for another one there; the session ends on all, and the next one begins anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import xxhash

from cadenza_common.plan.errors import InvalidPlan
from cadenza_common.plan.plan import StepPlan
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.batch.step_result import SampledTokens
from executor_svc.batch.writes import Writes
from executor_svc.device.ranks import RankError, RankKernels
from executor_svc.ranks.links import Frame, Link, LinkClosed, read_columns, write_columns

_OK, _INVALID, _ERROR = b"k", b"i", b"e"
_PARTS = "another plan", "other work", "other slots"
_PART_BYTES = 8


class LeaderRanks:
    """Implements `StepRanks` for rank 0."""

    samples = True

    def __init__(self, kernels: RankKernels, links: Sequence[Link]) -> None:
        """links: to ranks 1 and up."""
        self._kernels, self._links = kernels, links

    def settled(self, num_steps: int) -> None:
        """As in `StepRanks`."""
        self._send(Frame.SETTLED, num_steps.to_bytes(8, "little"))

    def agreed(self, plan: StepPlan, slots: Slots, apply: Callable[[], Scheduled]) -> Scheduled:
        """As in `StepRanks`."""
        wire = plan.wire()
        self._send(Frame.PLAN, wire)
        scheduled, error, own = _applied(wire, slots, apply)
        statuses = [own, *(self._receive(rank, Frame.STATUS) for rank in range(1, len(self._links) + 1))]
        verdict = _verdict(statuses)
        self._send(Frame.VERDICT, verdict)
        return _judged(scheduled, error, verdict)

    def sampled(self, sample: Callable[[], SampledTokens]) -> SampledTokens:
        """As in `StepRanks`."""
        self._kernels.check()
        found = sample()
        self._send(Frame.SAMPLED, write_columns(found.token_ids, found.errors))
        return found

    def send_drafts(self, content: bytes) -> None:
        """Give the drafts of a step to the others."""
        self._send(Frame.DRAFTS, content)

    def failed(self, error: Exception) -> None:
        """As in `StepRanks`."""
        self._kernels.fail()
        for link in self._links:
            with suppress(LinkClosed):
                link.send(Frame.FAILED, str(error).encode())

    def clear(self) -> None:
        """As in `StepRanks`."""
        self._kernels.fail()  # whoever still waits for another rank
        self._send(Frame.CLEAR)
        for rank in range(1, len(self._links) + 1):
            self._receive(rank, Frame.CLEARED, skips=(Frame.STATUS,))
        self._kernels.reset()
        self._send(Frame.BEGIN)

    def _send(self, kind: Frame, content: bytes = b"") -> None:
        for rank, link in enumerate(self._links, 1):
            try:
                link.send(kind, content)
            except LinkClosed as error:
                raise _gone(rank, error) from error

    def _receive(self, rank: int, wanted: Frame, skips: Sequence[Frame] = ()) -> bytes:
        while True:
            try:
                kind, content = self._links[rank - 1].receive()
            except LinkClosed as error:
                raise _gone(rank, error) from error
            if kind == wanted:
                return content
            if kind not in skips:
                raise RankError(f"rank {rank} sent {kind.name}, not {wanted.name}")


class MemberRanks:
    """Implements `StepRanks` for the other ranks."""

    samples = False

    def __init__(self, kernels: RankKernels, link: Link) -> None:
        self._kernels, self._link = kernels, link
        self._ended: Frame | None = None
        """A frame that ended a step."""
        self._asked = False
        """Whether rank 0 waits for this rank's word on a plan."""

    def next_frame(self) -> tuple[Frame, bytes]:
        """Wait for the next plan, or for the end of the session."""
        if self._ended is not None:
            ended, self._ended = self._ended, None
            return ended, b""
        kind, content = self._link.receive()
        self._asked = kind == Frame.PLAN
        return kind, content

    def refuse(self, error: Exception) -> None:
        """Say that this rank cannot run the plan, unless it has answered: it failed before it could apply it."""
        if self._asked:
            self._say(_failed(error))
            with suppress(RankError):
                self._expect(Frame.VERDICT)

    def settled(self, num_steps: int) -> None:
        """As in `StepRanks`: rank 0 says it."""

    def agreed(self, plan: StepPlan, slots: Slots, apply: Callable[[], Scheduled]) -> Scheduled:
        """As in `StepRanks`."""
        scheduled, error, status = _applied(plan.wire(), slots, apply)
        self._say(status)
        return _judged(scheduled, error, self._expect(Frame.VERDICT))

    def sampled(self, sample: Callable[[], SampledTokens]) -> SampledTokens:
        """As in `StepRanks`."""
        self._kernels.check()
        token_ids, errors = read_columns(self._expect(Frame.SAMPLED), 2)
        return SampledTokens(token_ids, errors, None)

    def receive_drafts(self) -> bytes:
        """Return the drafts of a step."""
        return self._expect(Frame.DRAFTS)

    def failed(self, error: Exception) -> None:
        """As in `StepRanks`."""
        self._kernels.fail()

    def clear(self) -> None:
        """As in `StepRanks`: the answer to CLEAR."""
        self._link.send(Frame.CLEARED)
        self._expect(Frame.BEGIN)
        self._kernels.reset()

    def _say(self, status: bytes) -> None:
        self._asked = False
        self._link.send(Frame.STATUS, status)

    def _expect(self, wanted: Frame) -> bytes:
        kind, content = self._link.receive()
        if kind == wanted:
            return content
        if kind == Frame.CLEAR:
            self._ended = kind
        raise RankError(f"the step has failed on rank 0: {content.decode(errors='replace') or kind.name}")


def _applied(
    wire: bytes, slots: Slots, apply: Callable[[], Scheduled]
) -> tuple[Scheduled | None, Exception | None, bytes]:
    """Apply a plan, whose message is `wire`; return its work, or an error, and this rank's status."""
    try:
        scheduled = apply()
    except InvalidPlan as error:
        return None, error, _INVALID + str(error).encode()
    except Exception as error:
        return None, error, _failed(error)
    return scheduled, None, _OK + digest_of(wire, scheduled, slots)


def _failed(error: Exception) -> bytes:
    return _ERROR + f"{type(error).__name__}: {error}".encode()


def _verdict(statuses: Sequence[bytes]) -> bytes:
    """Return nothing if all ranks are ready with the same plan and slots; else what is wrong with the first one."""
    for rank, status in enumerate(statuses):
        if not status.startswith(_OK):
            return status[:1] + f"rank {rank}: ".encode() + status[1:]
        if status != statuses[0]:
            other = difference(statuses[0][1:], status[1:])
            return _ERROR + f"rank {rank} has {other} than rank 0".encode()
    return b""


def _judged(scheduled: Scheduled | None, error: Exception | None, verdict: bytes) -> Scheduled:
    if error is not None:
        raise error
    if verdict:
        text = verdict[1:].decode(errors="replace")
        raise InvalidPlan(text) if verdict.startswith(_INVALID) else RankError(text)
    assert scheduled is not None
    return scheduled


def _gone(rank: int, error: LinkClosed) -> RankError:
    return RankError(f"rank {rank} is gone: {error}")


def digest_of(wire: bytes, scheduled: Scheduled, slots: Slots) -> bytes:
    """Return 8 bytes for each part: the plan's message, what it schedules, and the slots once it is applied.

    Of the slots it has their counts and flags, and all that was written to them in this session: tokens, block tables
    and admissions. Memory that changes by itself is not found.
    """
    work, state = Writes(), Writes()
    work.add(scheduled.slots, scheduled.num_tokens, scheduled.samples, scheduled.idle_slots, scheduled.sampling_slots)
    if scheduled.sources is not None:
        work.add(scheduled.sources)
    columns = slots.num_tokens, slots.num_computed_tokens, slots.num_blocks, slots.stopped, slots.held
    (admitted,) = slots.admitted.nonzero()
    state.add(admitted, *(column[admitted] for column in columns))
    written = xxhash.xxh3_64(state.digest() + slots.writes.digest()).digest()
    return xxhash.xxh3_64(wire).digest() + work.digest() + written


def difference(own: bytes, other: bytes) -> str:
    """Return the first part in which two digests differ."""
    ends = range(_PART_BYTES, len(own) + 1, _PART_BYTES)
    return next(part for part, end in zip(_PARTS, ends, strict=True) if own[:end] != other[:end])
