"""What the journal has recorded of one request, and what it has yet to record."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from cadenza_common.plan.result import LogprobColumns
from scheduler_svc.core.types import FinishDetail
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.journal.records import (
    EndRecord,
    RequestRecord,
    SampleRecord,
    Stats,
    pack_logprobs,
    pack_prompt_logprobs,
    pack_tokens,
)
from scheduler_svc.journal.store import JournalBatch


@dataclass(frozen=True, slots=True)
class EntrySnapshot:
    """What of a request a batch holds; once the batch is durable, it is the request's recorded state."""

    entry: JournalEntry
    num_tokens: list[int]
    finished: list[bool]
    ended: bool
    admission: RequestRecord | None
    """None: already recorded."""
    started: bool
    rewritten: tuple[bytes, int] | None


class JournalEntry:
    """A request in the journal. Each field `recorded_…` lags behind its state until a batch is durable."""

    __slots__ = (
        "admission",
        "ended_ns",
        "live",
        "number",
        "recorded_ended",
        "recorded_finished",
        "recorded_started",
        "recorded_tokens",
        "rewritten",
        "shows_at_end",
        "started",
        "stores_tokens",
    )

    def __init__(self, live: LiveRequest, number: int, *, stores_tokens: bool, admission: RequestRecord | None) -> None:
        """`admission`: the row to record; None if the journal has it already."""
        self.live = live
        self.number = number
        self.admission = admission
        self.shows_at_end = shows_at_end(live)
        self.stores_tokens = stores_tokens
        self.rewritten: tuple[bytes, int] | None = None
        """Fingerprint and vocabulary size to record, after a change under which the request goes on."""
        self.started = self.recorded_started = False
        self.ended_ns: int | None = None
        self.recorded_ended = False
        self.recorded_tokens = [0] * len(live.samples)
        self.recorded_finished = [False] * len(live.samples)

    def hide_output(self) -> None:
        """Hide from readers what is not durable, of a request that was just admitted or restored."""
        self.live.hidden = self.admission is not None
        self.live.shows_later = self.stores_tokens or self.shows_at_end
        for sample, num_tokens in zip(self.live.samples, self.recorded_tokens, strict=True):
            if self.shows_at_end or self.stores_tokens:
                sample.max_shown_tokens = num_tokens

    def hide_finishes(self) -> bool:
        """Hide new finishes; returns whether there is anything to record."""
        is_new = self.stores_tokens and not self.shows_at_end
        for sample, recorded in zip(self.live.samples, self.recorded_finished, strict=True):
            if sample.finish is not None and not recorded:
                sample.hides_finish = is_new = True
        return is_new

    def add_to(self, batch: JournalBatch) -> EntrySnapshot:
        """Add what is not recorded yet to a batch."""
        live, number = self.live, self.number
        if self.admission is not None:
            batch.admitted.append(self.admission)
        if self.started and not self.recorded_started:
            batch.started.append((self.live.adapter_hash, number))
        if self.rewritten is not None:
            batch.rewritten.append((*self.rewritten, number))
        num_tokens, finished = list(self.recorded_tokens), list(self.recorded_finished)
        for index, sample in enumerate(live.samples):
            if finished[index]:
                continue
            if sample.finish is not None:
                finished[index] = True
                batch.samples.append(self._finished_sample(index))
            elif self.stores_tokens and not self.shows_at_end and len(sample.token_ids) > num_tokens[index]:
                start, num_tokens[index] = num_tokens[index], len(sample.token_ids)
                logprobs = partial(pack_logprobs, sample.logprobs[start:]) if sample.logprobs else b""
                batch.tokens.append((number, index, start, sample.token_ids[start:], logprobs))
        ended = self.ended_ns is not None
        if ended and not self.recorded_ended:
            batch.ends.append(self._end())
            self.add_whole_tokens(batch)
        return EntrySnapshot(self, num_tokens, finished, ended, self.admission, self.started, self.rewritten)

    def add_whole_tokens(self, batch: JournalBatch) -> None:
        """Add all tokens of unfinished samples, for which no rows with logprobs are there."""
        if self.shows_at_end or not self.stores_tokens:
            return
        for index, sample in enumerate(self.live.samples):
            if sample.finish is None and sample.token_ids and not sample.logprobs:
                batch.whole_tokens.append((self.number, index, 0, list(sample.token_ids), b""))

    def record(self, snapshot: EntrySnapshot) -> None:
        """A batch is durable: show what it holds. New output since then stays hidden."""
        if self.admission is snapshot.admission:
            self.admission = None
        self.recorded_started, self.recorded_ended = snapshot.started, snapshot.ended
        self.recorded_tokens, self.recorded_finished = snapshot.num_tokens, snapshot.finished
        if self.rewritten is snapshot.rewritten:
            self.rewritten = None
        self.live.hidden = self.admission is not None or self.started != self.recorded_started
        for sample, num_tokens, finished in zip(
            self.live.samples, self.recorded_tokens, self.recorded_finished, strict=True
        ):
            if finished:
                sample.hides_finish, sample.max_shown_tokens = False, None
            elif sample.max_shown_tokens is not None:
                sample.max_shown_tokens = num_tokens

    def store_tokens_from_now(self, fingerprint: bytes, vocab_size: int) -> None:
        """Its tokens so far will not come out again: all tokens become durable, new ones before they are shown."""
        self.rewritten = (fingerprint, vocab_size)
        self.stores_tokens = self.live.shows_later = True
        if not self.shows_at_end:
            for sample, finished in zip(self.live.samples, self.recorded_finished, strict=True):
                # Readers keep what they have.
                if not finished:
                    sample.max_shown_tokens = sample.max_shown_tokens or 0

    def _finished_sample(self, index: int) -> SampleRecord:
        sample = self.live.samples[index]
        assert sample.finish is not None
        return SampleRecord(
            number=self.number,
            sample_index=index,
            finish_detail=int(sample.finish.detail),
            stop_token_id=sample.finish.stop_token_id,
            stop_string=sample.finish.stop_string,
            num_tokens=len(sample.token_ids),
            token_ids=pack_tokens(sample.token_ids),
            logprobs=partial(pack_logprobs, list(sample.logprobs)),
            cumulative_logprob=sample.cumulative_logprob,
        )

    def _end(self) -> EndRecord:
        live = self.live
        assert self.ended_ns is not None
        known = live.prompt_logprobs
        prompt_logprobs: LogprobColumns | None = known.rows(1, known.end) if known is not None else None
        return EndRecord(
            number=self.number,
            ended_ns=self.ended_ns,
            error="" if live.error is None else str(live.error),
            stats=stats_of(live).pack(),
            prompt_logprobs=partial(pack_prompt_logprobs, prompt_logprobs),
        )


def shows_at_end(live: LiveRequest) -> bool:
    """Whether readers get nothing before its end: beams and best_of, unless prompt logprobs come earlier."""
    spec = live.request.spec
    return (spec.beams is not None or live.request.best_of is not None) and live.prompt_logprobs is None


def stats_of(live: LiveRequest) -> Stats:
    """The counts and times of an ended request."""
    times, counts = live.times, live.counts

    def since_arrival(moment_ns: int) -> int:
        return max(0, moment_ns - times.arrival_ns) if moment_ns else 0

    return Stats(
        counts.num_cached_tokens,
        counts.num_preemptions,
        since_arrival(times.first_plan_ns),
        since_arrival(times.first_token_ns),
        since_arrival(times.end_ns),
    )


def was_abandoned(live: LiveRequest) -> bool:
    """Whether it was aborted and no stream can come back for it."""
    aborted = any(sample.finish and sample.finish.detail is FinishDetail.ABORTED for sample in live.samples)
    return aborted and not live.has_listener and not live.request.resume_grace_s
