"""How many drafts a source finds, and how many of them the target accepts, by position."""

from __future__ import annotations

from collections.abc import Sequence

_WINDOW = 400.0
"""Trials that a mean remembers. Its standard error is then at most 2.5 % of all trials."""
_MOST_AT_ONCE = 25.0
"""Trials of one step that count as forgetting: a mean remembers at least eight steps, however many decode."""
_FADE = 0.98
"""Weight that evidence keeps for each result in which its position was not tried."""
_LEAST = 4.0
"""Trials' weight that old evidence keeps: it stays the estimate, but a few new trials outweigh it."""
_BLOCK = 32.0
"""Trials after which the newest are held against the mean."""
_SUDDEN = 4.0
"""Standard errors by which the newest trials differ from a mean that no longer holds."""
_STALE = 2.0
"""Trials' weight that a position keeps in expectations while only those before it are tried."""
_PRIOR = 2.0
"""Trials' weight of the extrapolation from the position before."""


class _Share:
    """A decayed share of successes among trials; after a sudden change, the share since then."""

    __slots__ = ("_new_successes", "_new_trials", "_seen_at", "successes", "trials")

    def __init__(self, successes: float = 0.0, trials: float = 0.0) -> None:
        self.successes = successes
        self.trials = trials
        self._seen_at = 0
        self._new_successes = self._new_trials = 0.0

    def add(self, successes: float, trials: float, now: int) -> bool:
        """Add the trials of result `now`; earlier ones weigh less, the less the longer ago they were.

        Returns whether the newest trials are of another kind than those before.
        """
        gap = now - self._seen_at - 1
        self._seen_at = now
        keep = 1.0 - (trials if trials < _MOST_AT_ONCE else _MOST_AT_ONCE) / _WINDOW
        if gap > 0 and self.trials > _LEAST:
            keep *= max(_LEAST / self.trials, _FADE**gap)
        self.successes = keep * self.successes + successes
        self.trials = keep * self.trials + trials
        self._new_successes += successes
        self._new_trials += trials
        return self._new_trials >= _BLOCK and self._has_changed()

    def weighed(self, now: int) -> tuple[float, float]:
        """Return (successes, trials) as they weigh after result `now`."""
        keep = 1.0
        if now > self._seen_at and self.trials > _STALE:
            keep = max(_STALE / self.trials, _FADE ** (now - self._seen_at))
        return keep * self.successes, keep * self.trials

    def doubted(self) -> _Share:
        """Return a share that begins with this estimate, which a few trials outweigh."""
        kept = min(1.0, _LEAST / self.trials) if self.trials else 0.0
        result = _Share(kept * self.successes, kept * self.trials)
        result._seen_at = self._seen_at
        return result

    def doubt(self) -> None:
        """Keep the estimate, but let a few new trials outweigh it."""
        if self.trials > _LEAST:
            self.successes *= _LEAST / self.trials
            self.trials = _LEAST

    def _has_changed(self) -> bool:
        """Forget what was before the newest trials, if they are of another kind."""
        successes, trials = self._new_successes, self._new_trials
        self._new_successes = self._new_trials = 0.0
        share = (self.successes + 1) / (self.trials + 2)
        difference = successes / trials - share
        if difference * difference * trials <= _SUDDEN * _SUDDEN * share * (1 - share):
            return False
        self.successes, self.trials = successes, trials
        # The change may lie among them.
        self.doubt()
        return True


class DraftAcceptance:
    """Expected drafts and accepted drafts of one sequence in one step, for each number of drafts from 0 to `most`.

    Two chains of conditional shares, one share per position: `found`, the source has an i-th draft given that it has
    the one before, and `accepted`, the i-th draft is accepted given that it was drafted and all before it were
    accepted. So steps with many drafts say what fewer would have given, and drafts that are seldom found (copying in
    bursts) leave the acceptance of those that are found as it is. A position that was never tried takes the share of
    the position before it: a geometric extrapolation.
    """

    def __init__(self, most: int) -> None:
        self._now = 0
        self._accepted = [_Share() for _ in range(most)]
        self._found = [_Share() for _ in range(most)]
        if most:
            # What is not yet known is worth trying.
            self._accepted[0] = _Share(1.2, 2.0)
            self._found[0] = _Share(2.0, 2.0)

    def begun(self) -> DraftAcceptance:
        """Return another one's beginning: these estimates, which a few trials outweigh."""
        result = DraftAcceptance(0)
        result._now = self._now
        result._accepted = [share.doubted() for share in self._accepted]
        result._found = [share.doubted() for share in self._found]
        return result

    def observe(self, num_drafting: int, drafted_at: Sequence[int], accepted_at: Sequence[int], now: int) -> bool:
        """Add a result in which `num_drafting` sequences were allowed as many drafts as the columns have positions.

        Returns whether acceptance has changed suddenly. Then what is known of further positions is in doubt, too.
        """
        self._now = now
        had, survived = num_drafting, float(num_drafting)
        has_changed = False
        for i, (num_drafted, num_accepted) in enumerate(zip(drafted_at, accepted_at, strict=True)):
            if had <= 0 or i == len(self._accepted):
                break
            self._found[i].add(num_drafted, had, now)
            # Of those accepted so far, the ones with a further draft: exact if a source always drafts equally many.
            trials = survived * num_drafted / had
            if trials > 0 and self._accepted[i].add(min(num_accepted, trials), trials, now):
                has_changed = True
                for further in self._accepted[i + 1 :]:
                    further.doubt()
            had, survived = num_drafted, float(num_accepted)
        return has_changed

    def expected(self) -> tuple[list[float], list[float]]:
        """By number of drafts, 0 to `most`: drafts found, and drafts accepted, per drafting sequence and step."""
        num_drafts, num_accepted = [0.0], [0.0]
        reach = survive = 1.0
        found_here = 1.0
        drafted = accepted_in_all = 0.0
        accepted_here = 0.0
        for i, (found, accepted) in enumerate(zip(self._found, self._accepted, strict=True)):
            if i == 0:
                found_here = found.successes / found.trials
                accepted_here = accepted.successes / accepted.trials
            else:
                # The first draft is found where the source matches at all, which says nothing of the second.
                before = found_here if i > 1 else 1.0
                successes, trials = found.weighed(self._now)
                found_here = (successes + _PRIOR * before) / (trials + _PRIOR)
                successes, trials = accepted.weighed(self._now)
                accepted_here = (successes + _PRIOR * accepted_here) / (trials + _PRIOR)
            reach *= found_here
            survive *= accepted_here
            drafted += reach
            accepted_in_all += reach * survive
            num_drafts.append(drafted)
            num_accepted.append(accepted_in_all)
        return num_drafts, num_accepted

    @property
    def coverage(self) -> float:
        """How often the source has a draft at all, 0 to 1."""
        found = self._found[0]
        return found.successes / found.trials
