"""Routers in front of several schedulers: the policies of the field, each scheduler being one of their endpoints.

| name | source |
|---|---|
| `round-robin` | each in turn |
| `least-requests` | the fewest unfinished requests: Envoy's LEAST_REQUEST over all endpoints, smg's `least_load` |
| `power-of-two` | the less loaded of two random ones: smg's `power_of_two`, by the requests that it counts itself |
| `session-hash` | smg's `consistent_hashing`: a ring, the routing key of the session, no bound |
| `bounded-hash` | the same ring; one over 1.25 times the mean load is passed: Mirrokni et al., arXiv 1608.01350 |
| `prefix-hash` | smg's `prefix_hash`: the ring, by the first 256 tokens; over 1.25 times the mean: the least loaded |
| `cache-aware` | smg's and SGLang's `cache_aware`, as in `cadenza_simulator.placement.SglangCacheAware` |
| `llm-d` | the default profile of llm-d's endpoint picker, as in `cadenza_simulator.placement.LlmdScores` |

smg: github.com/lightseekorg/smg, docs/configuration/routing.md at 6fcadf99f5e1f4fd8b49a7f44e9e7194c9b763cb (defaults)
and model_gateway/src/policies/{prefix_hash.rs at 3adfd7d7d2b4ea4aa03d7536a30e25b94a51f03d, power_of_two.rs at
1373e8d88052e54567574661c18f1642e773e2a2}. Rings have 160 places for each endpoint, as there. All routers know what
they sent themselves and, once in each reading of 50 ms at most, what endpoints say of their queues and memory.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from benchmarks.fleet.arrivals import Arrivals
from benchmarks.fleet.caches import PrefixCaches
from cadenza_loadtest.requests import Floats, Ints, LoadTestError
from cadenza_loadtest.seeds import stream

RouterName = Literal[
    "round-robin", "least-requests", "power-of-two", "session-hash", "bounded-hash", "prefix-hash", "cache-aware",
    "llm-d",
]  # fmt: skip
_RING_PLACES = 160
_LOAD_FACTOR = 1.25
_PREFIX_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Load:
    """What schedulers say of themselves at the beginning of a time slice; [schedulers] each."""

    unfinished: Ints
    """Requests that they have."""
    waiting: Ints
    """Requests of them that wait."""
    used: Floats
    """Share of the KV pools that requests hold."""
    up: np.ndarray[tuple[int], np.dtype[np.bool_]]
    """Whether they can serve."""


class Router(abc.ABC):
    """Chooses schedulers for requests. `num_schedulers` endpoints, of which at least one must be up."""

    def __init__(self, num_schedulers: int, num_sessions: int, num_groups: int, pool_tokens: int, seed: int) -> None:
        """`pool_tokens`: of one scheduler's executors together."""
        self.num_schedulers = num_schedulers
        self._rng = stream(seed, "router")
        self._sent = PrefixCaches(num_schedulers, num_sessions, num_groups)
        self._room = np.full(num_schedulers, pool_tokens)

    def forget(self, sessions: Ints) -> None:
        """These numbers of sessions are used for new ones."""
        self._sent.forget_sessions(sessions)

    @abc.abstractmethod
    def choose(self, arrivals: Arrivals, load: Load) -> Ints:
        """The scheduler of each request [n]."""

    def _record(self, arrivals: Arrivals, chosen: Ints) -> None:
        """Remember what was sent where."""
        new = arrivals.prompt - np.minimum(arrivals.prompt, arrivals.shared)
        self._sent.touch(arrivals.session, arrivals.group, chosen, arrivals.prompt, new)


class RoundRobin(Router):
    """Each in turn, those that are down left out."""

    _next = 0

    def choose(self, arrivals: Arrivals, load: Load) -> Ints:
        (able,) = load.up.nonzero()
        chosen = able[(self._next + np.arange(len(arrivals.due_s))) % len(able)]
        self._next = (self._next + len(chosen)) % len(able)
        return chosen


class LeastRequests(Router):
    """The fewest unfinished requests, what was sent in this slice included; the first of equal ones."""

    def choose(self, arrivals: Arrivals, load: Load) -> Ints:
        return fill_up(np.where(load.up, load.unfinished, 1 << 40), len(arrivals.due_s))


class PowerOfTwo(Router):
    """The less loaded of two random ones."""

    def choose(self, arrivals: Arrivals, load: Load) -> Ints:
        (able,) = load.up.nonzero()
        count = len(arrivals.due_s)
        first = self._rng.integers(0, len(able), count)
        second = (first + 1 + self._rng.integers(0, max(1, len(able) - 1), count)) % len(able)
        loads = load.unfinished.tolist()
        chosen = []
        for one, other in zip(able[first].tolist(), able[second].tolist(), strict=True):
            best = one if loads[one] <= loads[other] else other
            loads[best] += 1
            chosen.append(best)
        return np.array(chosen, np.int64)


class Ring:
    """A hash ring with `_RING_PLACES` for each endpoint."""

    def __init__(self, num_endpoints: int) -> None:
        keys = mixed(np.arange(num_endpoints * _RING_PLACES, dtype=np.uint64) + np.uint64(1 << 40))
        order = np.argsort(keys, kind="stable")
        self._keys, self.owners = keys[order], (order // _RING_PLACES).astype(np.int64)

    def places(self, keys: Ints) -> Ints:
        """[n] the place on the ring of each key, an index of `owners`."""
        found = np.searchsorted(self._keys, mixed(keys.astype(np.uint64)))
        return np.where(found == len(self._keys), 0, found).astype(np.int64)

    def walk(self, place: int, allowed: Callable[[int], bool]) -> int:
        """The first owner from a place on that is allowed; the place's own if none is."""
        count = len(self.owners)
        for step in range(count):
            owner = int(self.owners[(place + step) % count])
            if allowed(owner):
                return owner
        return int(self.owners[place])


class SessionHash(Router):
    """A session's place on a ring; `bounded`: one that has over 1.25 times the mean load is passed."""

    bounded = False

    def __init__(self, num_schedulers: int, num_sessions: int, num_groups: int, pool_tokens: int, seed: int) -> None:
        super().__init__(num_schedulers, num_sessions, num_groups, pool_tokens, seed)
        self._ring = Ring(num_schedulers)

    def _keys(self, arrivals: Arrivals) -> Ints:
        """A request without a session is one of its own: anonymous clients are spread at random."""
        alone = self._rng.integers(1 << 40, 1 << 41, len(arrivals.due_s))
        return np.where(arrivals.session >= 0, arrivals.session, alone)

    def choose(self, arrivals: Arrivals, load: Load) -> Ints:
        places, up, loads = self._ring.places(self._keys(arrivals)), load.up.tolist(), load.unfinished.tolist()
        total, num_up = sum(loads), sum(up)
        chosen = self._ring.owners[places]
        if not self.bounded and num_up == self.num_schedulers:
            return chosen
        for index, place in enumerate(places.tolist()):
            total += 1
            most = _LOAD_FACTOR * total / num_up if self.bounded else np.inf
            allowed = [each_up and each + 1 <= max(1.0, most) for each_up, each in zip(up, loads, strict=True)]
            best = self._ring.walk(place, allowed.__getitem__)
            loads[best] += 1
            chosen[index] = best
        return chosen


class BoundedHash(SessionHash):
    """Consistent hashing with bounded loads."""

    bounded = True


class PrefixHash(SessionHash):
    """The place of the first 256 tokens; over 1.25 times the mean load: the least loaded one."""

    def _keys(self, arrivals: Arrivals) -> Ints:
        grouped = (arrivals.group >= 0) & (arrivals.group_tokens >= _PREFIX_TOKENS)
        return np.where(grouped, (1 << 42) + arrivals.group, super()._keys(arrivals))

    def choose(self, arrivals: Arrivals, load: Load) -> Ints:
        places, up, loads = self._ring.places(self._keys(arrivals)), load.up.tolist(), load.unfinished.tolist()
        total, num_up = sum(loads), sum(up)
        chosen = []
        for place in places.tolist():
            best = self._ring.walk(place, up.__getitem__)
            if total and loads[best] > _LOAD_FACTOR * (total + 1) / num_up:
                best = min((each for each in range(len(up)) if up[each]), key=loads.__getitem__)
            loads[best] += 1
            total += 1
            chosen.append(best)
        return np.array(chosen, np.int64)


class CacheAware(Router):
    """Where over 0.3 of the prompt was sent before, unless loads differ by more than 64 and by 1.5 times."""

    threshold, most_more, most_times = 0.3, 64, 1.5

    def choose(self, arrivals: Arrivals, load: Load) -> Ints:
        home, held = self._sent.home(arrivals.session, self._room)
        matched = np.minimum(held, arrivals.shared) > self.threshold * arrivals.prompt
        homes = np.where(matched, home, -1).tolist()
        loads = {each: int(load.unfinished[each]) for each in load.up.nonzero()[0].tolist()}
        chosen = []
        for each in homes:
            least = min(loads, key=loads.__getitem__)
            most = max(loads.values())
            even = most - loads[least] <= self.most_more or most <= self.most_times * loads[least]
            best = each if even and each in loads else least
            loads[best] += 1
            chosen.append(best)
        found = np.array(chosen, np.int64)
        self._record(arrivals, found)
        return found


class Llmd(Router):
    """The highest sum of weighted scores: queue (2), free memory (2), share of the prompt sent before (3)."""

    queue_weight, kv_weight, prefix_weight = 2.0, 2.0, 3.0
    reading_s = 0.05

    def choose(self, arrivals: Arrivals, load: Load) -> Ints:
        waiting, used = load.waiting.astype(np.float64), load.used
        chosen = np.zeros(len(arrivals.due_s), np.int64)
        readings = np.floor(arrivals.due_s / self.reading_s)
        for reading in np.unique(readings):
            (now,) = (readings == reading).nonzero()
            chosen[now] = self._best(arrivals, now, waiting, used, load.up)
            # Until the simulated schedulers say more, what was sent counts as waiting.
            waiting = waiting + np.bincount(chosen[now], minlength=self.num_schedulers)
        self._record(arrivals, chosen)
        return chosen

    def _best(
        self, arrivals: Arrivals, now: Ints, waiting: Floats, used: Floats,
        up: np.ndarray[tuple[int], np.dtype[np.bool_]],
    ) -> Ints:  # fmt: skip
        least, most = waiting[up].min(), waiting[up].max()
        queue = (most - waiting) / (most - least) if most > least else np.ones(self.num_schedulers)
        score = np.where(up, self.queue_weight * queue + self.kv_weight * (1 - used), -np.inf)
        scores = np.repeat(score[None], len(now), axis=0)
        home, held = self._sent.home(arrivals.session[now], self._room)
        (known,) = (home >= 0).nonzero()
        share = np.minimum(held, arrivals.shared[now]) / arrivals.prompt[now]
        scores[known, home[known]] += self.prefix_weight * share[known]
        scores += 1e-9 * self._rng.random(scores.shape)  # ties
        best: Ints = scores.argmax(axis=1)
        return best


def fill_up(loads: Ints, count: int) -> Ints:
    """[count] the least loaded endpoint, one request after the other, each counted; the first of equal ones."""
    # The same as taking the minimum each time: the `count` lowest of all places that each load would rise to.
    order = np.argsort(loads, kind="stable")
    ascending = loads[order]
    # Water rises over the k lowest; the level that takes `count` is found among the k.
    taken = np.arange(1, len(loads) + 1) * ascending - np.cumsum(ascending)
    used = int(np.searchsorted(taken, count, side="left"))
    used = max(1, min(used, len(loads)))
    levels = -(-(count + int(ascending[:used].sum())) // used)
    values = [np.arange(low, levels) for low in ascending[:used].tolist()]
    owners = np.repeat(order[:used], [len(each) for each in values])
    places = np.concatenate(values)
    first = np.lexsort((owners, places))[:count]
    return owners[first]


def mixed(keys: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """64-bit hashes: the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))


_ROUTERS: dict[RouterName, type[Router]] = {
    "round-robin": RoundRobin,
    "least-requests": LeastRequests,
    "power-of-two": PowerOfTwo,
    "session-hash": SessionHash,
    "bounded-hash": BoundedHash,
    "prefix-hash": PrefixHash,
    "cache-aware": CacheAware,
    "llm-d": Llmd,
}
ROUTERS: tuple[RouterName, ...] = tuple(_ROUTERS)


def make_router(
    name: RouterName, num_schedulers: int, num_sessions: int, num_groups: int, pool_tokens: int, seed: int
) -> Router:
    """A new router for one run; `pool_tokens`: of one scheduler's executors together."""
    return _ROUTERS[name](num_schedulers, num_sessions, num_groups, pool_tokens, seed)


def read_router(text: str) -> RouterName:
    """Check a router's name; raises LoadTestError."""
    for name in ROUTERS:
        if text == name:
            return name
    raise LoadTestError(f"--router {text}: must be one of {', '.join(ROUTERS)}")
