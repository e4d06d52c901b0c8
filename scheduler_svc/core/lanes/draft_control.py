"""How many drafts each sequence of a step gets: chosen from measured acceptance and measured step times."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from scheduler_svc.core.lanes.draft_acceptance import DraftAcceptance
from scheduler_svc.core.lanes.draft_costs import DraftCosts, bucket_of
from scheduler_svc.core.lanes.drafted_step import DraftedStep, ScopeDrafts

_MARGIN = 0.015
"""Gain from which another number of drafts is taken; none is taken at no loss at all."""
_RARE, _RARE_EACH = 0.006, 0.0016
"""Advantage of drafting, and of each draft allowed, where the source has no drafts: looking costs next to nothing."""
_RARE_COVERAGE = 0.1
"""How often the source has drafts where that advantage has fallen to 0."""
_DWELL_WITHOUT = 24
"""Results between two decisions of a bucket while the source has no drafts."""
_EACH = 3
"""Of the results in which nobody had drafts, each so many is looked at; others are only counted."""
_RARELY, _LOOK = 64, 4
"""Results in a row in which nobody had drafts, after which one plan of so many allows them."""
_FLAT = 0.004
"""Loss at which fewer drafts are as good as the best number."""
_LEAST_PLAIN = 2
"""Results of a batch size without drafts before its first probe."""
_DWELL = 6
"""Results between two decisions of a bucket: two plans are in flight when a choice is made."""
_STALE = 32
"""Results after which a bucket that comes back is decided anew."""
_TRIALS = 8
"""Sequences' drafts that a probe sees at least, if it has steps enough."""
_LEAST_PROBE, _MOST_PROBE = 3, 8
"""Steps of a probe."""
_FIRST_INTERVAL, _LAST_INTERVAL = 16, 128
"""Results between two probes for news: doubled while they change nothing."""
_LOSS_SHARE = 0.004
"""Share of all time that probes may lose, but for the first of a batch size."""
_LONGEST_WAIT = 1000
"""Results that make up for a first probe, whatever it lost."""
_LATE = 4
"""A probe waits for so many results; then it ends, since its plans were made with fewer drafts."""
_FIRST_ROWS = 12
"""Drafts of all sequences together in a batch size's first probe, about."""
_MOST_SCOPES = 64
"""Scopes whose acceptance is kept, those that drafted last."""
_OPTIMISM = 0.5
"""Share of the last draft's cost that an untried further one is hoped to have."""
_DRAFTING_DECAY = 0.9
"""Weight of earlier results in the share of sequences that may draft."""


class _Bucket:
    """Batch sizes that share a choice."""

    __slots__ = ("choice", "decided_at", "good", "index", "num_results", "was_probed")

    def __init__(self, index: int) -> None:
        self.index = index
        self.choice = 0
        self.good: frozenset[int] = frozenset()
        """Choices as good as the best, up to the margin."""
        self.num_results = 0
        """Results since the last decision."""
        self.decided_at = 0
        self.was_probed = False


@dataclass(slots=True)
class _Probe:
    """A few steps with another number of drafts than the chosen one."""

    bucket: _Bucket
    max_drafts: int
    num_steps: int
    ends_at: int
    """The number of the last result that it waits for."""
    num_to_plan: int
    num_seen: int = 0
    is_news: bool = False
    """Whether it looks for news, not for a first measurement."""


class DraftControl:
    """Chooses the number of drafts by goodput: expected tokens of a sequence per time of a step.

    Goodput, not acceptance, decides (SmartSpec / TurboSpec, arXiv 2406.14066): at equal acceptance the same drafts
    gain at batch 1 and lose at batch 32 (vllm#26504). Expected tokens come from `DraftAcceptance`, for all batch
    sizes alike and each scope of sequences by itself; what drafts add to a step comes from `DraftCosts`, measured by
    batch size and number of drafts. Each batch-size bucket keeps its own choice.

    - *Scopes*: the sequences of a scope have texts of one kind, such as those of a tenant. A request begins with the
      number that pays by what its scope has shown, and in a new scope by what all have.

    - *Hysteresis*: a choice by batch size alone flips at its threshold and counts prefills (vllm#49548). Here only
      decodes count, a choice stands for some results, and another one must be better by a margin. No drafts at all
      are preferred as soon as drafts lose. Sizes of other buckets follow the last choice while it is as good for
      them, so that a batch that wanders between buckets keeps its number.
    - *Probes* measure what the choice leaves unmeasured: a few steps of one draft more, of none, or of one less. A
      first measurement is made where an optimistic guess of its cost would pay. After that probes look for news, each
      half as often as the last while they change nothing; soon after a sudden change of acceptance. After each probe
      the next one waits until what this one lost is at most 0.4 % of the time.
    - *Upwards*: the first probe of a batch size has several drafts at once, the most that cost little if they are all
      wrong; what fewer cost is taken from the line between that and none. More are tried by doubling. So a request has
      its number within some ten steps, on an executor that has just started.
    - A source that finds drafts at times only (copying) costs next to nothing while it finds none: it stays on. After
      64 results without any it is asked in every fourth step, until it finds some or another request comes.

    Deterministic from its calls: a replay of recorded results makes the same choices. A result is attributed by its own
    `max_drafts`, so that plans in flight confuse nothing.
    """

    def __init__(self, most: int, *, adaptive: bool) -> None:
        """`most`: the greatest choice. Not adaptive: it is the only one."""
        self._most = most
        self._adaptive = adaptive and most > 0
        self._acceptance = DraftAcceptance(most)
        """Of all scopes."""
        self._by_scope: OrderedDict[int, DraftAcceptance] = OrderedDict()
        self._scopes: dict[int, int] = {}
        """How many sequences of each scope the next plan has."""
        self._expected: tuple[list[float], list[float], float] | None = None
        self._costs = DraftCosts(most)
        self._by_size: dict[int, _Bucket] = {}
        self._buckets: dict[int, _Bucket] = {}
        self._now = 0
        """Results observed."""
        self._num_without = 0
        """Sequences that were allowed drafts and had none, since the last that had some."""
        self._num_empty = self._num_looks = 0
        """Results in a row that were allowed drafts and had none; plans behind too many of them."""
        self._drafting = 1.0
        """Share of decoding sequences that may draft."""
        self._probe: _Probe | None = None
        self._probe_from = 0
        """The first result after which a probe may start: the loss of the last one is made up for."""
        self._news_from = 0
        """The first result after which a probe for news may start."""
        self._interval = _FIRST_INTERVAL
        self._leader: _Bucket | None = None
        """The bucket whose choice was the last one."""
        self._turn = 0
        """Which neighbour the next probe for news tries."""

    def choose(self, num_decodes: int, scopes: Mapping[int, int]) -> int:
        """The number of drafts per sequence for the next plan, in which `num_decodes` sequences decode.

        scopes: how many of them, that may draft, are in each scope. To be called once for each plan.
        """
        if not self._adaptive:
            return self._most
        if num_decodes <= 0:
            return 0
        bucket = self._by_size.get(num_decodes) or self._bucket(num_decodes)
        if scopes != self._scopes:
            self._change_scopes(scopes, bucket)
        probe = self._probe
        if probe is not None and probe.num_to_plan and abs(probe.bucket.index - bucket.index) <= 1:
            probe.num_to_plan -= 1
            return probe.max_drafts
        if self._now - bucket.decided_at > _STALE:
            self._decide(bucket)
        leader = self._leader
        if leader is None or leader.choice not in bucket.good or self._now - leader.decided_at > _STALE:
            leader = self._leader = bucket
        if leader.choice and self._num_empty >= _RARELY:
            self._num_looks += 1
            return 0 if self._num_looks % _LOOK else leader.choice
        return leader.choice

    def counts_only(self, num_decodes: int, num_allowed: int) -> bool:
        """Count a result in which nobody had drafts, if no more is to be learned from it now; else change nothing and
        return False: `observe` must follow.

        num_allowed: the sequences that were allowed drafts. Most results are of this kind where texts do not repeat.
        """
        bucket = self._by_size.get(num_decodes)
        if bucket is None or self._probe is not None or not (self._adaptive and bucket.was_probed):
            return False
        num_results = bucket.num_results + 1
        is_empty = num_allowed or self._num_empty >= _RARELY
        if num_results % _EACH == 0 or num_results >= (_DWELL_WITHOUT if is_empty else _DWELL):
            return False
        bucket.num_results = num_results
        self._now += 1
        self._num_without += num_allowed
        self._num_empty += num_allowed > 0
        return True

    def observe(self, step: DraftedStep) -> None:
        """Learn from a result; to be called in the order of results, but for those that `counts_only` has counted."""
        num_decodes = step.num_decodes
        if not self._adaptive or num_decodes <= 0:
            return
        self._now += 1
        bucket = self._by_size.get(num_decodes) or self._bucket(num_decodes)
        max_drafts, dwell = step.max_drafts, _DWELL
        if max_drafts and not step.num_drafts:
            # A step like one without drafts, of which most are: no more is done than that takes.
            self._num_without += step.num_drafting
            self._num_empty += 1
            max_measured, dwell = 0, _DWELL_WITHOUT
        else:
            max_measured = max_drafts
            self._observe_without()
        if max_drafts and step.num_drafts:
            self._num_empty = 0
            if self._observe_scopes(step.by_scope):
                self._interval, self._news_from = _FIRST_INTERVAL, min(self._news_from, self._now + _DWELL)
            share = step.num_drafting / num_decodes
            self._drafting = _DRAFTING_DECAY * self._drafting + (1 - _DRAFTING_DECAY) * share
        if not step.num_other_tokens and step.step_ns > 0 and max_drafts <= self._most:
            self._costs.observe(bucket.index, max_measured, num_decodes, step.num_drafts, step.step_ns, self._now)
        bucket.num_results += 1
        probe = self._probe
        if probe is not None:
            probe.num_seen += max_drafts == probe.max_drafts
            if probe.num_seen >= probe.num_steps or self._now >= probe.ends_at:
                self._observe_without()
                self._end(probe)
        elif bucket.num_results >= (dwell if bucket.was_probed else _LEAST_PLAIN):
            self._observe_without()
            values = self._decide(bucket)
            if self._now >= self._probe_from:
                self._start_probe(bucket, num_decodes, values)

    def _change_scopes(self, scopes: Mapping[int, int], bucket: _Bucket) -> None:
        """Choose by what other scopes have shown."""
        is_new = scopes.keys() != self._scopes.keys()
        self._scopes, self._expected = dict(scopes), None
        self._num_empty = 0
        if is_new:
            self._decide(bucket)
            self._leader = None
            self._interval, self._news_from = _FIRST_INTERVAL, min(self._news_from, self._now + _DWELL)

    def _observe_without(self) -> None:
        """Learn from the results in which nobody had drafts, since the last that is known."""
        if self._num_without:
            total = sum(self._scopes.values()) or 1
            none = [0] * self._most
            self._observe_scopes(
                {
                    scope: ScopeDrafts(max(1, self._num_without * count // total), none, none)
                    for scope, count in (self._scopes or {0: 1}).items()
                }
            )
            self._num_without = 0

    def _observe_scopes(self, by_scope: Mapping[int, ScopeDrafts]) -> bool:
        """Learn from the drafts of a result; returns whether acceptance has changed suddenly."""
        self._expected, has_changed = None, False
        for scope, found in by_scope.items():
            drafts = (found.num_drafting, found.drafted_at, found.accepted_at, self._now)
            own = self._by_scope.get(scope)
            if own is None:
                own = self._by_scope[scope] = self._acceptance.begun()
                if len(self._by_scope) > _MOST_SCOPES:
                    self._by_scope.popitem(last=False)
            self._by_scope.move_to_end(scope)
            self._acceptance.observe(*drafts)
            has_changed = own.observe(*drafts) or has_changed
        return has_changed

    def _expectation(self) -> tuple[list[float], list[float], float]:
        """By number of drafts: drafts found and accepted, of a drafting sequence in a step; how often there is one."""
        if self._expected is None:
            unknown = self._acceptance
            parts = [(self._by_scope.get(scope, unknown), count) for scope, count in self._scopes.items()]
            parts = parts or [(unknown, 1)]
            total = sum(count for _, count in parts)
            drafts, accepted, coverage = [0.0] * (self._most + 1), [0.0] * (self._most + 1), 0.0
            for acceptance, count in parts:
                share, (found, kept) = count / total, acceptance.expected()
                drafts = [each + share * more for each, more in zip(drafts, found, strict=True)]
                accepted = [each + share * more for each, more in zip(accepted, kept, strict=True)]
                coverage += share * acceptance.coverage
            self._expected = drafts, accepted, coverage
        return self._expected

    def _bucket(self, num_decodes: int) -> _Bucket:
        index = bucket_of(num_decodes)
        bucket = self._buckets.get(index)
        if bucket is None:
            bucket = self._buckets[index] = _Bucket(index)
            self._decide(bucket, at_once=True)
        self._by_size[num_decodes] = bucket
        return bucket

    def _decide(self, bucket: _Bucket, *, at_once: bool = False) -> list[float | None]:
        """Set the bucket's choice, if another one is better; returns the values by number of drafts."""
        bucket.num_results = 0
        bucket.decided_at = self._now
        values = self._values(bucket.index)
        best = _best(values)
        least = (values[best] or 0.0) / (1 + _MARGIN)
        bucket.good = frozenset(k for k, value in enumerate(values) if value is not None and value >= least)
        now_chosen = bucket.choice
        if best != now_chosen:
            value = values[now_chosen]
            margin = _MARGIN if best and self._expectation()[2] >= _RARE_COVERAGE else 0.0
            if value is None or at_once or (values[best] or 0.0) > value * (1 + margin):
                bucket.choice = best
        return values

    def _values(self, index: int) -> list[float | None]:
        """Goodput by number of drafts, relative to none. None: what so many cost has not been measured."""
        num_drafts, num_accepted, coverage = self._expectation()
        drafting = self._drafting
        rare = max(0.0, 1.0 - coverage / _RARE_COVERAGE)
        values: list[float | None] = [1.0]
        for k in range(1, self._most + 1):
            extra = self._costs.extra(index, k)
            if extra is None and not rare:
                values.append(None)
                continue
            cost, measured_with = extra or (0.0, 0.0)
            if measured_with > 0.02:
                # Drafts are found more often now, or less often, than when their cost was measured.
                cost *= min(2.0, drafting * num_drafts[k] / measured_with)
            bonus = 1.0 + rare * (_RARE + _RARE_EACH * k)
            values.append(bonus * (1.0 + drafting * num_accepted[k]) / (1.0 + cost))
        return values

    def _start_probe(self, bucket: _Bucket, num_decodes: int, values: list[float | None]) -> None:
        target, is_news = self._first_target(bucket, num_decodes, values), False
        if target is None and self._now >= self._news_from:
            target, is_news = self._news_target(bucket, values), True
        if target is None:
            return
        bucket.was_probed = True
        num_steps = min(_MOST_PROBE, max(_LEAST_PROBE, -(-_TRIALS // (num_decodes * max(1, target)))))
        ends_at = self._now + num_steps + _LATE
        self._probe = _Probe(bucket, target, num_steps, ends_at, num_steps, is_news=is_news)

    def _first_target(self, bucket: _Bucket, num_decodes: int, values: list[float | None]) -> int | None:
        """What is worth a first measurement in this bucket; None: nothing, or it is being measured."""
        if not self._costs.has(bucket.index, 0):
            return 0 if bucket.choice else None
        untried = next((k for k, value in enumerate(values) if value is None), None)
        if untried is None:
            return None
        num_accepted = self._expectation()[1]
        below = [self._costs.extra(bucket.index, k) for k in range(max(0, untried - 2), untried)]
        costs = [cost[0] for cost in below if cost is not None]
        cost = costs[-1] + _OPTIMISM * max(0.0, costs[-1] - costs[0]) if costs else 0.0
        value = (1.0 + self._drafting * num_accepted[untried]) / (1.0 + cost)
        if value <= (1 + _MARGIN) * max(value for value in values if value is not None):
            return None
        measured = self._costs.most_measured(bucket.index)
        further = 2 * measured if measured else _FIRST_ROWS // num_decodes
        return min(self._most, max(untried, further))

    def _news_target(self, bucket: _Bucket, values: list[float | None]) -> int | None:
        """The number of drafts to try for news: of none chosen, the best of the others; else the neighbours in turn."""
        chosen = bucket.choice
        if not chosen:
            known = [(value, -k) for k, value in enumerate(values) if k and value is not None]
            if known:
                return -max(known)[1]
            return 1 if self._costs.has(bucket.index, 0) else None
        self._turn += 1
        others = sorted({k for k in (chosen + 1, 0, chosen - 1) if 0 <= k <= self._most})
        return others[self._turn % len(others)]

    def _end(self, probe: _Probe) -> None:
        """Decide with what the probe measured, and set when the next one may start."""
        self._probe = None
        bucket = probe.bucket
        before = bucket.choice
        values = self._decide(bucket)
        tried, chosen = values[probe.max_drafts], values[before]
        if tried is not None and chosen is not None:
            # In steps of the choice before: what the probe took, less what the choice takes for as many tokens.
            num_accepted = self._expectation()[1]
            tokens = (1.0 + self._drafting * num_accepted[probe.max_drafts]) / (
                1.0 + self._drafting * num_accepted[before]
            )
            loss = probe.num_seen * tokens * max(0.0, chosen / tried - 1.0)
            wait = int(loss / _LOSS_SHARE)
            self._probe_from = self._now + (wait if probe.is_news else min(wait, _LONGEST_WAIT))
        if bucket.choice != before:
            self._interval = _FIRST_INTERVAL
        elif probe.is_news:
            self._interval = min(2 * self._interval, _LAST_INTERVAL)
        self._news_from = self._now + self._interval


def _best(values: list[float | None]) -> int:
    """The fewest drafts whose value is about the greatest."""
    least = max(value for value in values if value is not None) * (1 - _FLAT)
    return next(k for k, value in enumerate(values) if value is not None and value >= least)
