"""One run of the fuzz: a core and a simulated executor under random calls, its books proved after each of them."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from random import Random

from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan.result import SlotError, StepResult
from scheduler_svc.core.errors import RequestRejectedError
from scheduler_svc.core.outputs import StepOutputs
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequences.sequence import Sequence
from scheduler_svc.core.types import Finish, FinishDetail, RequestKey, SequenceState, SessionEnd
from tests.fuzz.draw_requests import draw_request, draw_stems
from tests.fuzz.outcome import Limits, Outcome, check
from tests.fuzz.settings import Settings, draw_spec
from tests.helpers.core.core_executor import CoreExecutor
from tests.helpers.executor.digest import check_mirror

_EXECUTOR = 0
_MAX_IDLE = 3000
"""Turns without anything to do after which the end is not waited for."""


class Run:
    """A core, its executor, and what is known of the requests."""

    def __init__(self, settings: Settings, rng: Random) -> None:
        self.settings = settings
        self.counts: Counter[str] = Counter()
        """What happened, by name."""
        self.num_steps = 0
        self._rng = rng
        self._spec = settings.spec
        self._has_changed = False
        self._now = 0.0
        self._draining = False
        self._core = Scheduler(settings.rules())
        self._core.add_executor(_EXECUTOR, self._spec)
        self._executor = CoreExecutor(self._spec, settings.vocab_size)
        self._plans: deque[StepPlan] = deque()
        self._live: dict[RequestKey, Outcome] = {}
        self._aborted: set[RequestKey] = set()
        self._stems = draw_stems(settings, rng)
        self._past: list[tuple[int, ...]] = []

    def steps(self, count: int) -> None:
        """Make random calls until so many steps were planned, then let all requests end.

        A static batch may need more requests than come here: the turns are limited too.
        """
        for _ in range(20 * count):
            if self.num_steps >= count:
                break
            self._turn()
        self._end()

    def _turn(self) -> None:
        settings, chance = self.settings, self._rng.random
        self._now += self._rng.choice([0.0, 0.1, 1.0])
        if len(self._live) < settings.max_live and (chance() < settings.arrivals or not self._live):
            self._add()
        if self._live and chance() < settings.aborts:
            self._abort()
        if chance() < settings.drains or (self._draining and chance() < 0.3):
            self._drain(not self._draining)
        if chance() < settings.losses:
            self._lose()
        while len(self._plans) < settings.depth and chance() < 0.8 and self._plan():
            pass
        if self._plans and (len(self._plans) == settings.depth or chance() < 0.7):
            self._apply()

    def _end(self) -> None:
        """Run dry: every request ends, and nothing is held any more."""
        self._drain(True)
        for _ in range(_MAX_IDLE):
            while len(self._plans) < self.settings.depth and self._plan():
                pass
            if self._plans:
                self._apply()
            elif not self._live:
                break
            else:
                assert self._core.wakes_at(_EXECUTOR, self._now) is not None, "requests wait, and nothing is planned"
            self._now += 1.0
        assert not self._live, f"{len(self._live)} requests never ended"
        assert not self._core.groups
        lane = self._core.lanes[_EXECUTOR]
        assert lane.blocks.num_free == self._spec.num_blocks
        assert lane.blocks.num_used_host == 0
        assert lane.slots.num_free == self._spec.num_slots
        assert not self._executor.slots
        self._count_lane()

    # --- calls into the core -----------------------------------------------------------------------------------------

    def _add(self) -> None:
        spec = draw_request(self.settings, self._rng, f"r{self.counts['requests']}", self._stems, self._past)
        try:
            self._core.add_request(spec, self._now)
        except RequestRejectedError:
            self._check_refused(spec.num_sequences, len(spec.prompt_token_ids))
            self.counts["refused"] += 1
        else:
            self._live[spec.key] = Outcome.of(spec)
            self.counts["requests"] += 1
        self._core.check_integrity()

    def _check_refused(self, num_sequences: int, num_prompt: int) -> None:
        """Only what can never fit is refused."""
        spec = self._spec
        num_pages = num_prompt // spec.block_size + num_sequences * (1 + spec.pages_per_state)
        fits = num_pages <= spec.num_blocks
        assert num_prompt + 1 > spec.max_model_len or num_sequences > spec.max_num_seqs or not fits

    def _abort(self) -> None:
        key = self._rng.choice(list(self._live))
        self._aborted.add(key)
        self._live[key].aborted = True
        self._take(self._core.abort(key, FinishDetail.ABORTED))
        assert key not in self._live

    def _drain(self, draining: bool) -> None:
        self._draining = draining
        self._core.drain(draining)

    def _lose(self) -> None:
        """The session breaks: some plans in flight have been run. Memory is lost, or slots alone, or another comes."""
        self.counts["losses"] += 1
        cause = self._rng.choice(["session", "kept session", "process", "other"])
        keeps_kv = cause == "kept session"
        if keeps_kv:
            self._executor.run_in_part(self._plans)
        else:
            for plan in list(self._plans)[: self._rng.randint(0, len(self._plans))]:
                self._executor.run(plan)
        end = None if self._rng.random() < 0.2 else SessionEnd()
        self._plans.clear()
        self._take(self._core.executor_lost(_EXECUTOR, self._now, end))
        match cause:
            case "session" | "kept session":
                self._executor.clear()
            case "process":
                self._executor = CoreExecutor(self._spec, self.settings.vocab_size)
            case "other":
                self._count_lane()
                # Its requests' lengths were settled when they came.
                drawn = draw_spec(self._rng, self.settings.axes)
                self._spec = replace(drawn, max_model_len=self._spec.max_model_len)
                self._has_changed = True
                self._core.add_executor(_EXECUTOR, self._spec)
                self._executor = CoreExecutor(self._spec, self.settings.vocab_size)
        last_completed = self._rng.choice([0, self._core.lanes[0].counts.last_step_id + 3])
        self._take(self._core.session_opened(last_completed, same_incarnation=keeps_kv, keeps_kv=keeps_kv))
        self._core.check_integrity()

    def _plan(self) -> bool:
        plan = self._core.plan_step(_EXECUTOR, self._now)
        self._take(self._core.take_outputs())
        if plan is None:
            return False
        plan.debug_digest = True
        self._plans.append(plan)
        self.num_steps += 1
        moves = {"swapped out": plan.swap_out, "copied": plan.copies, "swapped in": plan.swap_in}
        self.counts.update({name: len(pairs) for name, pairs in moves.items()})
        self.counts["forks"] += len(plan.fork_slots)
        return True

    def _apply(self) -> None:
        result = self._executor.run(self._plans.popleft())
        if self._rng.random() < self.settings.errors:
            result = self._with_error(result)
        _, outputs = self._core.apply_result(_EXECUTOR, result, self._now)
        if not self._plans and all(outcome.spec.num_sequences == 1 for outcome in self._live.values()):
            check_mirror(self._core.lanes[_EXECUTOR], self._executor.inner.slots, result.debug_digest)
            self.counts["mirrors checked"] += 1
        self._take(outputs)

    def _with_error(self, result: StepResult) -> StepResult:
        """One of the slots that sampled has found no finite logits."""
        counts = list(result.num_tokens) or [1] * len(result.slots)
        failed = self._rng.choice([*result.slots, None])
        if failed is None or failed in result.error_slots:
            return result
        place = list(result.slots).index(failed)
        before = sum(counts[:place])
        self.counts["errors"] += 1
        return replace(
            result,
            num_tokens=[*counts[:place], 0, *counts[place + 1 :]],
            token_ids=[*result.token_ids[:before], *result.token_ids[before + counts[place] :]],
            error_slots=[*result.error_slots, failed],
            errors=[*result.errors, SlotError.NON_FINITE_LOGITS],
            logprobs={slot: found for slot, found in result.logprobs.items() if slot != failed},
            candidates={slot: found for slot, found in result.candidates.items() if slot != failed},
        )

    # --- outputs -----------------------------------------------------------------------------------------------------

    def _take(self, outputs: StepOutputs) -> None:
        """Bring outputs to the outcomes, as the engine does, and check the requests that have ended."""
        self._core.check_integrity()
        touched: set[RequestKey] = set()
        for sequence, prompt_logprobs in outputs.prompt_logprobs:
            self._outcome(sequence).prompt_logprobs.append(prompt_logprobs)
        logprobs = {sequence: iter(found) for sequence, found in outputs.logprobs.items()}
        for sequence, token_id in zip(outputs.sequences, outputs.token_ids, strict=True):
            outcome = self._outcome(sequence)
            found = next(logprobs[sequence]) if sequence in logprobs else None
            outcome.token(sequence.sample_index, token_id, found)
            touched.add(sequence.group.key)
        for sequence, finish in outputs.finishes.items():
            self._outcome(sequence).finish(sequence.sample_index, finish)
            touched.add(sequence.group.key)
        for output in outputs.hypotheses:
            self._live[output.group.key].hypothesis(output)
            touched.add(output.group.key)
        for sequence in outputs.sequences:
            self._stop_by_string(sequence)
        for key in sorted(touched):
            self._check_ended(key)

    def _outcome(self, sequence: Sequence) -> Outcome:
        return self._live[sequence.group.key]

    def _stop_by_string(self, sequence: Sequence) -> None:
        """The engine finds a stop string in a sample's text, now and then."""
        if sequence.state is not SequenceState.FINISHED and self._rng.random() < self.settings.stop_strings:
            self._core.stop_sample(sequence.group.key, sequence.sample_index)
            self._outcome(sequence).finish(sequence.sample_index, Finish(FinishDetail.STOP_STRING))
            self._core.check_integrity()

    def _check_ended(self, key: RequestKey) -> None:
        outcome = self._live[key]
        if not outcome.ended:
            return
        del self._live[key]
        assert key not in self._core.groups
        details = {finish.detail for finish in outcome.finishes.values()}
        assert FinishDetail.ABORTED not in details or key in self._aborted
        assert FinishDetail.EXECUTOR_ERROR not in details or self._has_changed, "no step is known to have begun"
        assert FinishDetail.NON_FINITE_LOGITS not in details or self.counts["errors"]
        num_blocks = None if self._has_changed else self._spec.num_blocks
        spec = self._spec
        limits = Limits(self.settings.vocab_size, spec.max_model_len, spec.block_size, num_blocks, spec.pages_per_state)
        try:
            check(outcome, limits)
        except AssertionError as error:
            error.add_note(f"{outcome.spec}, ended {outcome.finishes}")
            raise
        self.counts.update(f"ended {finish.detail.name}" for finish in outcome.finishes.values())
        self.counts["tokens"] += sum(map(len, outcome.tokens))
        self.counts["searches"] += outcome.spec.beams is not None
        if outcome.tokens[0]:
            self._past = [*self._past[-4:], (*outcome.spec.prompt_token_ids, *outcome.tokens[0])]

    def _count_lane(self) -> None:
        self.counts["prefix hits"] = self._core.prefix_counts.num_hits
        self.counts["preemptions"] = self._core.num_preemptions
