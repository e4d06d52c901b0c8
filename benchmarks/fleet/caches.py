"""What of a prompt is cached where: by session and by shared beginning, not by block.

A session's KV stays where it was computed last, until as many tokens have come into that cache as it has room for: an
LRU list by what was computed since, in place of a list of blocks. A beginning that many sessions share (a system
prompt) has an entry for each place.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cadenza_loadtest.requests import Ints

NOWHERE = -1


class PrefixCaches:
    """Caches of `num_places`, executors or schedulers, over the sessions of a source of traffic."""

    def __init__(self, num_places: int, num_sessions: int, num_groups: int) -> None:
        self._place = np.full(max(1, num_sessions), NOWHERE, np.int32)
        self._tokens = np.zeros(max(1, num_sessions), np.int32)
        self._stamp = np.zeros(max(1, num_sessions))
        self._inserted = np.zeros(num_places)
        """Tokens that have come into each cache."""
        self._group_stamp = np.full((num_places, max(1, num_groups)), -np.inf)

    def home(self, sessions: Ints, room: Ints) -> tuple[Ints, Ints]:
        """Of each session [n] the place that has it, and how many of its tokens; NOWHERE and 0 if none has.

        `room` [places]: tokens of each cache.
        """
        place = self._place[sessions].astype(np.int64)
        age = self._inserted[place] - self._stamp[sessions]
        alive = (place >= 0) & (sessions >= 0) & (age <= room[place])
        return np.where(alive, place, NOWHERE), np.where(alive, self._tokens[sessions], 0)

    def has_group(self, groups: Ints, places: Ints, room: Ints) -> npt.NDArray[np.bool_]:
        """Whether a place [n] has the shared beginning [n], -1 for none."""
        age = self._inserted[places] - self._group_stamp[places, groups]
        has: npt.NDArray[np.bool_] = (groups >= 0) & (age <= room[places])
        return has

    def touch(self, sessions: Ints, groups: Ints, places: Ints, tokens: Ints, new_tokens: Ints) -> None:
        """These places [n] have the first `tokens` [n] of sessions now, of which `new_tokens` were computed."""
        known, shared = sessions >= 0, groups >= 0
        self._inserted += np.bincount(places, new_tokens, minlength=len(self._inserted))
        where = sessions[known]
        self._place[where] = places[known]
        self._tokens[where] = tokens[known]
        self._stamp[where] = self._inserted[places[known]]
        self._group_stamp[places[shared], groups[shared]] = self._inserted[places[shared]]

    def forget_sessions(self, sessions: Ints) -> None:
        """The numbers of these sessions are used for others."""
        self._place[sessions] = NOWHERE

    def forget_place(self, place: int) -> None:
        """A place has lost all that it had."""
        self._place[self._place == place] = NOWHERE
        self._group_stamp[place] = -np.inf
