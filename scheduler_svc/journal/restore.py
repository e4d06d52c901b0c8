"""Restores the requests of an earlier process: unfinished ones go on in the order of arrival, results stay readable."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from cadenza_common.plan.result import TokenLogprobs
from cadenza_common.plan.sampling import SequenceSampling
from scheduler_svc.convert.generation import fields_from_body
from scheduler_svc.core.errors import (
    DataLossError,
    ModelChangedError,
    PreconditionError,
    SchedulerError,
    WaitingQueueFullError,
)
from scheduler_svc.core.types import Finish, FinishDetail, RequestSpec
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.live_request import LiveRequest, LiveSample
from scheduler_svc.journal.records import (
    NewTokens,
    Stats,
    StoredRequest,
    unpack_logprobs,
    unpack_prompt_logprobs,
    unpack_tokens,
)
from scheduler_svc.journal.writer import JournalWriter
from scheduler_svc.plan_loop.ports import EngineRequest
from scheduler_svc.requests.builder import RequestBuilder
from scheduler_svc.requests.fields import PromptFields, RequestFields
from scheduler_svc.tenants.tenant import Tenant

_PAUSE_EVERY = 16
"""After so many requests the event loop runs other tasks, such as the heartbeats to the executor."""
_BY_TOKEN = (FinishDetail.EOS, FinishDetail.STOP_TOKEN)


@dataclass(slots=True)
class Restored:
    """Numbers of requests."""

    num_unfinished: int = 0
    num_ended: int = 0
    num_lost: int = 0


class Restorer:
    """Puts stored requests into the engine, before it takes new ones."""

    def __init__(
        self,
        engine: Engine,
        writer: JournalWriter,
        builder: RequestBuilder,
        *,
        restart_grace_s: float,
        allow_fingerprint_change: bool,
    ) -> None:
        """`restart_grace_s`: how long requests wait for their streams; see the options for the rest."""
        self._engine = engine
        self._writer = writer
        self._builder = builder
        self._restart_grace_s = restart_grace_s
        self._allows_other_numerics = allow_fingerprint_change
        # What the wall clock of the earlier process said, on the clock of this one.
        self._from_wall_ns = engine.clock.monotonic_ns() - engine.clock.wall_time_ns()
        self._restored = Restored()

    async def run(self, stored: Sequence[StoredRequest]) -> Restored:
        """Restore the requests, in their order."""
        for index, each in enumerate(stored):
            if each.end is not None and _was_aborted(each):
                self._writer.drop(each.admission.number)
            elif each.end is not None:
                self._keep(each, partial(self._ended, each))
                self._restored.num_ended += 1
            else:
                await self._go_on(each)
            if index % _PAUSE_EVERY == _PAUSE_EVERY - 1:
                await asyncio.sleep(0)
        return self._restored

    async def _go_on(self, stored: StoredRequest) -> None:
        """Let an unfinished request go on, or keep the error that ends it."""
        admission, model = stored.admission, self._engine.model
        same = admission.fingerprint == model.fingerprint
        other_allowed = (
            self._allows_other_numerics and admission.stores_tokens and admission.vocab_size == model.vocab_size
        )
        try:
            if not same and not stored.started:
                await self._begin_again(stored)
            elif same or other_allowed:
                self._continue(stored)
            else:
                self._restored.num_lost += 1
                self._keep(stored, partial(self._lost, stored))
                self._writer.keep_tokens(_plain_tokens(stored))
                return
        except SchedulerError as exc:
            self._restored.num_lost += 1
            error = PreconditionError(getattr(exc, "field", ""), f"the restarted service cannot go on with it: {exc}")
            self._keep(stored, partial(self._failed, stored, error))
            return
        self._restored.num_unfinished += 1

    def _continue(self, stored: StoredRequest) -> None:
        """Go on: with the tokens that are stored, else from the prompt; numerics are exact then."""
        request = self._engine.adapters.restored(self._request(stored))
        if stored.admission.stores_tokens:
            outputs = tuple(tuple(self._output(stored, index)[0]) for index in range(request.spec.num_samples))
            if any(outputs) and request.spec.beams is None and request.best_of is None:
                request = replace(request, spec=replace(request.spec, known_outputs=outputs))
        live = self._live(request, stored)
        if request.spec.known_outputs:
            self._fill_samples(live, stored)
        live.catches_up = True
        self._add(live)
        self._writer.on_restored(
            live,
            stored.admission.number,
            stores_tokens=bool(stored.admission.stores_tokens),
            started=stored.started,
        )

    async def _begin_again(self, stored: StoredRequest) -> None:
        """Begin a request anew that has shown nothing, under the model that is there now."""
        admission = stored.admission
        fields = _with_seed(fields_from_body(admission.body, self._tenant(stored)), stored)
        now = self._engine.clock.monotonic()
        try:
            request = await self._builder.build_off_loop(fields, now=now, time_left_s=None)
        except WaitingQueueFullError:
            # The earlier process has compiled its grammar, which this one had no time for.
            request = await self._builder.build_off_loop(fields, now=now, time_left_s=None, compiles=False)
        request = self._engine.adapters.restored(self._as_admitted(request, stored))
        live = self._live(request, stored)
        self._add(live)
        self._writer.on_admitted(live, self._engine.model, admission.number)

    def _add(self, live: LiveRequest) -> None:
        self._engine.add(live)
        self._engine.restored.add_unfinished(live, self._restart_grace_s)

    def _keep(self, stored: StoredRequest, make: partial[LiveRequest]) -> None:
        """Keep an ended request readable until its grace ends."""
        admission, grace_s = stored.admission, self._restart_grace_s
        if stored.end is not None:
            since_ns = self._engine.clock.wall_time_ns() - stored.end.ended_ns
            grace_s = max(grace_s, admission.resume_grace_s - since_ns / 1e9)
        key = (admission.tenant, admission.request_id)
        self._engine.restored.add_ended(key, make, grace_s)
        self._writer.keep_ended(key, admission.number, grace_s)

    # --- live requests from rows -------------------------------------------------------------------------------------

    def _request(self, stored: StoredRequest) -> EngineRequest:
        """The request with the prompt, the seed and the end ids that it had; raises SchedulerError."""
        admission = stored.admission
        fields = _with_seed(fields_from_body(admission.body, self._tenant(stored)), stored)
        fields = replace(
            fields,
            prompt=(PromptFields(token_ids=unpack_tokens(admission.prompt_token_ids)),),
            sampling=replace(fields.sampling, truncate_prompt_tokens=None),
        )
        builder = self._builder.with_end_ids(unpack_tokens(admission.end_token_ids))
        request = self._as_admitted(builder.build(fields, now=0.0, time_left_s=None), stored)
        # It goes on only with the content that it began with.
        return replace(request, spec=replace(request.spec, adapter_hash=stored.adapter_hash))

    def _tenant(self, stored: StoredRequest) -> Tenant:
        """The tenant as it is now, or its name alone if it has left the tenants file."""
        name = stored.admission.tenant
        return self._engine.quotas.registry.find(name) or Tenant(name)

    def _as_admitted(self, request: EngineRequest, stored: StoredRequest) -> EngineRequest:
        deadline_ns = stored.admission.deadline_ns
        deadline = None if deadline_ns is None else (deadline_ns + self._from_wall_ns) / 1e9
        return replace(request, deadline=deadline, body_digest=stored.admission.body_digest)

    def _live(self, request: EngineRequest, stored: StoredRequest) -> LiveRequest:
        live = LiveRequest(request, stored.admission.arrived_ns + self._from_wall_ns)
        live.had_stream = True  # of an earlier process
        return live

    def _ended(self, stored: StoredRequest) -> LiveRequest:
        """A request that had ended, with its results."""
        end = stored.end
        assert end is not None
        try:
            live = self._live(self._request(stored), stored)
        except SchedulerError as exc:
            return self._failed(stored, DataLossError(f"the restarted service cannot read its results: {exc}"))
        self._fill_samples(live, stored)
        prompt_logprobs = unpack_prompt_logprobs(end.prompt_logprobs)
        if live.prompt_logprobs is not None and prompt_logprobs is not None:
            live.prompt_logprobs.extend(prompt_logprobs)
        live.ended = True
        if not live.finish_if_all_ended():
            live.error = ModelChangedError(end.error)
        _set_stats(live, Stats.unpack(end.stats))
        return live

    def _lost(self, stored: StoredRequest) -> LiveRequest:
        """A request that cannot go on under the present numerics; samples that had finished are complete."""
        try:
            live = self._live(self._request(stored), stored)
        except SchedulerError:
            return self._failed(stored, _other_numerics())
        self._fill_samples(live, stored)
        live.ended, live.error = True, _other_numerics()
        # A client's position may be ahead of what is known here.
        live.catches_up = True
        return live

    def _failed(self, stored: StoredRequest, error: Exception) -> LiveRequest:
        """A request without output that ends with an error."""
        admission = stored.admission
        prompt = tuple(unpack_tokens(admission.prompt_token_ids))
        sampling = SequenceSampling(seed=int.from_bytes(admission.seed, "little"))
        spec = RequestSpec(admission.request_id, prompt, sampling, tenant=admission.tenant)
        live = self._live(EngineRequest(spec, body_digest=admission.body_digest), stored)
        live.ended, live.error = True, error
        return live

    def _fill_samples(self, live: LiveRequest, stored: StoredRequest) -> None:
        for index, sample in enumerate(live.samples):
            _fill_sample(sample, *self._output(stored, index))
            row = stored.samples.get(index)
            if row is not None:
                sample.cumulative_logprob = row.cumulative_logprob

    def _output(self, stored: StoredRequest, index: int) -> tuple[list[int], list[TokenLogprobs], Finish | None]:
        """Tokens, logprobs and finish of a sample, as far as they are stored."""
        row = stored.samples.get(index)
        if row is not None:
            return unpack_tokens(row.token_ids), unpack_logprobs(row.logprobs), row.finish
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        for part in stored.tokens.get(index, ()):
            token_ids += unpack_tokens(part.token_ids)
            logprobs += unpack_logprobs(part.logprobs)
        return token_ids, logprobs, None


def _plain_tokens(stored: StoredRequest) -> Iterator[NewTokens]:
    """All tokens of each unfinished sample without logprobs."""
    for index, parts in stored.tokens.items():
        if parts and not parts[0].logprobs:
            token_ids = [token_id for part in parts for token_id in unpack_tokens(part.token_ids)]
            yield stored.admission.number, index, 0, token_ids, b""


def _with_seed(fields: RequestFields, stored: StoredRequest) -> RequestFields:
    """The request's fields with the seed and the id that the service may have drawn."""
    admission = stored.admission
    sampling = replace(fields.sampling, seed=int.from_bytes(admission.seed, "little"))
    return replace(fields, request_id=admission.request_id, sampling=sampling)


def _fill_sample(
    sample: LiveSample, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], finish: Finish | None
) -> None:
    """Give a sample its output one token after another, as it was generated, so that its text is the same."""
    last = len(token_ids) - 1
    for index, token_id in enumerate(token_ids):
        ends = finish if index == last and finish is not None and finish.detail in _BY_TOKEN else None
        sample.extend((token_id,), logprobs[index : index + 1], ends)
    if finish is not None and sample.finish is None:
        sample.extend((), (), finish)


def _set_stats(live: LiveRequest, stats: Stats) -> None:
    live.counts.num_cached_tokens, live.counts.num_preemptions = stats.num_cached_tokens, stats.num_preemptions
    times = live.times
    arrival_ns = times.arrival_ns
    times.first_plan_ns = arrival_ns + stats.first_plan_ns if stats.first_plan_ns else 0
    times.first_token_ns = arrival_ns + stats.first_token_ns if stats.first_token_ns else 0
    times.end_ns = arrival_ns + stats.end_ns


def _was_aborted(stored: StoredRequest) -> bool:
    """Whether it was aborted: it leaves nothing, and its id is free."""
    return any(sample.finish.detail is FinishDetail.ABORTED for sample in stored.samples.values())


def _other_numerics() -> DataLossError:
    return DataLossError(
        "the service was restarted, and its executor has another numerics fingerprint than when this request began: "
        "output that may have been sent cannot be computed again; send the request again under another id"
    )
