"""Slots for tests of draft sources, and what the sources promise, by counting."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np

from executor_svc.batch.slots import Slots
from executor_svc.plan.limits import Limits
from executor_svc.speculation.drafts import DraftSource
from executor_svc.speculation.suffix import SuffixSource


def limits(num_slots: int = 4, max_model_len: int = 1024, max_drafts: int = 5) -> Limits:
    """Return limits of slots that hold tokens and nothing else."""
    return Limits(num_slots, num_slots, 1024, max_model_len, 1 << 18, 20, 16, 8, 0, 1, max_drafts)


def num_shared_bytes(source: SuffixSource) -> int:
    """The bytes of the shared automata."""
    return 0 if source._shared is None else source._shared.num_bytes


def num_own_bytes(source: SuffixSource) -> int:
    """The bytes of the automata of the sequences."""
    return sum(own.num_bytes for own in source._own if own is not None)


class Driver:
    """Puts sequences into slots and reports them to a source."""

    def __init__(self, source: DraftSource, limits: Limits) -> None:
        self.source = source
        self.slots = Slots(limits)

    def admit(self, slot: int, prompt: Sequence[int], scope: int = 0) -> None:
        """Put a sequence into a slot."""
        self.slots.token_ids[slot, : len(prompt)] = prompt
        self.slots.num_tokens[slot] = self.slots.num_prompt_tokens[slot] = len(prompt)
        self.source.admitted(slot, scope)

    def append(self, slot: int, tokens: Sequence[int]) -> None:
        """Add known tokens."""
        size = int(self.slots.num_tokens[slot])
        self.slots.token_ids[slot, size : size + len(tokens)] = tokens
        self.slots.num_tokens[slot] += len(tokens)

    def release(self, *slots: int) -> None:
        """Take sequences away; their tokens are overwritten before the source hears of it."""
        self.slots.token_ids[list(slots)] = 0
        self.source.released(np.array(slots, np.int64))

    def text(self, slot: int) -> list[int]:
        """Return the tokens of a slot."""
        return self.slots.token_ids[slot, : self.slots.num_tokens[slot]].tolist()

    def drafts(self, rows: Sequence[int], most: int | Sequence[int] = 5) -> list[list[int]]:
        """Return the drafts of each row."""
        rows_of_all = np.array(rows, np.int64)
        looks = self.source.looks(self.slots, rows_of_all)
        numbers = np.array([most] * len(rows) if isinstance(most, int) else most, np.int64)
        drafts = self.source.propose(self.slots, rows_of_all, numbers)
        assert looks or not drafts.counts.any()
        assert drafts.counts.dtype == drafts.token_ids.dtype == np.int64
        assert drafts.counts.shape == (len(rows),)
        assert (drafts.counts <= numbers).all()
        assert len(drafts.token_ids) == drafts.counts.sum()
        return [part.tolist() for part in np.split(drafts.token_ids, drafts.counts.cumsum()[:-1])] if len(rows) else []


class Corpus:
    """Texts that grow by tokens, and the occurrences of substrings in them, found by looking everywhere."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []
        self._times: list[list[int]] = []
        self._now = 0

    def new_text(self) -> int:
        """Begin a text; returns its number."""
        self.texts.append([])
        self._times.append([])
        return len(self.texts) - 1

    def append(self, number: int, tokens: Sequence[int]) -> None:
        """Add tokens to a text."""
        for token in tokens:
            self._now += 1
            self.texts[number].append(token)
            self._times[number].append(self._now)

    def ends(self, substring: Sequence[int]) -> set[tuple[int, int]]:
        """Return (text, index behind) of every occurrence."""
        size = len(substring)
        return {
            (number, end)
            for number, text in enumerate(self.texts)
            for end in range(size, len(text) + 1)
            if text[end - size : end] == list(substring)
        }

    def followers(self, substring: Sequence[int]) -> dict[int, tuple[int, int]]:
        """Return (number of occurrences, when it occurred first) of every token behind a substring."""
        counts: Counter[int] = Counter()
        first: dict[int, int] = {}
        for number, end in self.ends(substring):
            if end < len(self.texts[number]):
                token, time = self.texts[number][end], self._times[number][end]
                counts[token] += 1
                first[token] = min(first.get(token, time), time)
        return {token: (counts[token], first[token]) for token in counts}

    def shorter(self, substring: Sequence[int]) -> list[int]:
        """Return the longest suffix that occurs at more places."""
        ends = self.ends(substring)
        return next(
            (list(substring[i:]) for i in range(1, len(substring)) if self.ends(substring[i:]) != ends),
            [],
        )

    def longest_suffix(self, text: Sequence[int]) -> list[int]:
        """Return the longest suffix of a text that is a substring."""
        return next((list(text[i:]) for i in range(len(text)) if self.ends(text[i:])), [])


def continued(corpus: Corpus, match: list[int], most: int, min_match: int) -> tuple[float, int, list[int]]:
    """Return (score, length of the match, drafts) as `SuffixSource` defines them, with its default parameters."""
    drafts: list[int] = []
    score, probability, length = 0.0, 1.0, 0
    while len(match) >= min_match and len(drafts) < most:
        followers = corpus.followers(match)
        if not followers:
            match = corpus.shorter(match)
            continue
        if not drafts:
            length, most = len(match), min(most, 3 * len(match))
        token = max(followers, key=followers.__getitem__)
        probability *= followers[token][0] / sum(count for count, _ in followers.values())
        if probability < 0.1:
            break
        score += probability
        drafts.append(token)
        match = [*match, token]
    return score, length, drafts


def ngram_drafts(text: Sequence[int], most: int, min_match: int, max_match: int, num_indexed: int) -> list[int]:
    """Return the drafts that `NgramSource` promises for a text whose first num_indexed tokens are indexed."""
    text = list(text)
    for n in range(min(max_match, len(text)), min_match - 1, -1):
        for end in range(min(num_indexed, len(text) - 1), n - 1, -1):
            if text[end - n : end] == text[-n:]:
                longer = text[:]
                for i in range(most):
                    longer.append(longer[end + i])
                return longer[len(text) :]
    return []


def random_text(rng: random.Random, size: int, vocab: int = 50_000) -> list[int]:
    """Return random tokens."""
    return [rng.randrange(vocab) for _ in range(size)]


def produce(driver: Driver, slot: int, prompt: list[int], output: list[int], scope: int) -> None:
    """Run a sequence from admission to release, ten tokens a step."""
    driver.admit(slot, prompt, scope)
    for start in range(0, len(output), 10):
        driver.append(slot, output[start : start + 10])
        driver.drafts([slot])
    driver.release(slot)


def drafts_after(driver: Driver, prompt: list[int], scope: int) -> list[int]:
    """Return the drafts of the first outputs of a new sequence."""
    driver.admit(0, prompt, scope)
    (drafts,) = driver.drafts([0])
    driver.release(0)
    return drafts
