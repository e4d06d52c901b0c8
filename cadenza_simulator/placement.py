"""The placement policies that a simulation can compare: the scheduler's own, and those of two well-known routers.

A router in front of independent servers sends each request to one of them for good, so its policies never rebalance,
and a preempted request stays where it is.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from cadenza_loadtest.requests import LoadTestError
from scheduler_svc.core.policies.placement import Candidate, ExpectedTime, NeededTokens, PlacementPolicy, RoundRobin
from scheduler_svc.core.sequences.sequence import SequenceGroup

PlacementName = Literal["expected-time", "round-robin", "llm-d", "sglang"]


@dataclass(slots=True)
class LlmdScores:
    """The default profile of llm-d's endpoint picker: the executor with the highest sum of weighted scores.

    Scores from 0 to 1: `queue-scorer` (weight 2), the waiting requests between the longest and the shortest queue;
    `kv-cache-utilization-scorer` (weight 2), the share of the KV pool that no running request holds;
    `prefix-cache-scorer` (weight 3), the share of the prompt's blocks that were sent there before. The picker
    `max-score-picker` breaks ties at random. Queues and pools are scraped every 50 ms; the prefixes are those of the
    prompts sent, in blocks of 64 tokens at least, an LRU list of as many as the executor has KV blocks. Blocks match
    one by one, as there: a block counts for each executor that has it until a block that none has.

    Source: github.com/llm-d/llm-d-router at ebab687927f5331c1b39defcb579a07951bce56c, pkg/epp/config/loader/defaults.go
    (weights), pkg/epp/framework/plugins/scheduling/scorer/{queuedepth/queue,kvcacheutilization/kvcache_utilization,
    prefix/plugin}.go, scheduling/picker/maxscore/picker.go,
    requestcontrol/dataproducer/approximateprefix/{plugin,indexer}.go and pkg/epp/server/options.go (the interval).
    """

    rebalances: ClassVar[bool] = False
    seed: int = 0
    """Seeds the order of equal scores."""
    queue_weight: float = 2.0
    kv_weight: float = 2.0
    prefix_weight: float = 3.0
    refresh_s: float = 0.05
    """Seconds between two readings of queues and pools."""
    min_block_size: int = 64
    _random: random.Random = field(init=False)
    _sent: dict[int, OrderedDict[int, None]] = field(default_factory=dict)
    """By executor: the hashes of the blocks sent there, the least recently used first."""
    _read: dict[int, tuple[float, int, float]] = field(default_factory=dict)
    """By executor: when it was read last, its waiting requests, and the used share of its pool."""

    def __post_init__(self) -> None:
        """Seed the generator."""
        self._random = random.Random(f"llm-d {self.seed}")

    def choose(self, group: SequenceGroup, candidates: Ids[Candidate], needed: NeededTokens, now: float) -> Candidate:
        """The candidate with the highest score."""
        if (stays := _present(group, candidates)) is not None:
            return stays
        hashes = list(self._hashes(group.spec.prompt_token_ids, candidates[0].lane.spec.block_size))
        matches = self._matches(hashes)
        readings = [self._reading(each, now) for each in candidates]
        least, most = min(reading[0] for reading in readings), max(reading[0] for reading in readings)
        scored = []
        for each, (num_waiting, used) in zip(candidates, readings, strict=True):
            queue = (most - num_waiting) / (most - least) if most > least else 1.0
            prefix = matches.get(each.lane.executor_id, 0) / len(hashes) if hashes else 0.0
            score = self.queue_weight * queue + self.kv_weight * (1 - used) + self.prefix_weight * prefix
            scored.append((score, self._random.random(), each))
        chosen = max(scored, key=lambda entry: entry[:2])[2]
        self._record(hashes, chosen)
        return chosen

    def _reading(self, candidate: Candidate, now: float) -> tuple[int, float]:
        lane = candidate.lane
        found = self._read.get(lane.executor_id)
        if found is None or now >= found[0] + self.refresh_s:
            used = 1 - lane.blocks.num_free / lane.spec.num_blocks
            # Readings come at multiples of the interval.
            read_at = now - now % self.refresh_s if self.refresh_s else now
            found = self._read[lane.executor_id] = (read_at, candidate.num_queued, used)
        return found[1:]

    def _hashes(self, token_ids: Ids[int], block_size: int) -> Iterator[int]:
        """A hash for each full block and all before it."""
        size, chained = max(block_size, self.min_block_size), 0
        for end in range(size, len(token_ids) + 1, size):
            chained = hash((chained, tuple(token_ids[end - size : end])))
            yield chained

    def _matches(self, hashes: list[int]) -> dict[int, int]:
        """Number of blocks that each executor has."""
        found: dict[int, int] = {}
        for block in hashes:
            holders = [executor_id for executor_id, sent in self._sent.items() if block in sent]
            if not holders:
                break
            for executor_id in holders:
                found[executor_id] = found.get(executor_id, 0) + 1
        return found

    def _record(self, hashes: list[int], chosen: Candidate) -> None:
        sent = self._sent.setdefault(chosen.lane.executor_id, OrderedDict())
        for block in hashes:
            sent[block] = None
            sent.move_to_end(block)
        while len(sent) > chosen.lane.spec.num_blocks:
            sent.popitem(last=False)


class _Node:
    """A node of a radix tree over token ids."""

    __slots__ = ("children", "executor_id", "token_ids")

    def __init__(self, token_ids: tuple[int, ...], executor_id: int) -> None:
        self.token_ids = token_ids
        """The tokens that follow its parent's."""
        self.executor_id = executor_id
        """The executor to which they were sent first."""
        self.children: dict[int, _Node] = {}
        """By first token."""


@dataclass(slots=True)
class SglangCacheAware:
    """The policy `cache_aware` of SGLang's router, with the defaults of its command line.

    While the executors' unfinished requests differ by more than 64 and the most are over 1.5 times the fewest, a
    request goes to the executor with the fewest. Otherwise, if over 0.3 of its prompt was sent before, it goes where
    that prefix was sent first, else to the executor with the fewest. What was sent where is a radix tree, here over
    tokens, there over characters; and it is never thinned out: there it is from 2^26 characters an executor on.

    Source: github.com/sgl-project/sglang, sgl-model-gateway/src/policies/cache_aware.rs at
    053b63ff26df927535ada92bf15967f27637787a, policies/tree.rs at 03744dbedc69f4db84d0a6ae6d4400ce252bb6d8, and
    sgl-model-gateway/bindings/python/src/sglang_router/router_args.py at 6614f98405b9d58cf284fd1494dd9322e9d44f76
    (defaults).
    """

    rebalances: ClassVar[bool] = False
    cache_threshold: float = 0.3
    balance_abs_threshold: int = 64
    balance_rel_threshold: float = 1.5
    _root: _Node = field(default_factory=lambda: _Node((), -1))

    def choose(self, group: SequenceGroup, candidates: Ids[Candidate], needed: NeededTokens, now: float) -> Candidate:
        """The candidate that had the prefix first, or the one with the fewest unfinished requests."""
        if (stays := _present(group, candidates)) is not None:
            return stays
        loads = [each.num_sequences + len(each.lane.finishing) for each in candidates]
        least, most = min(loads), max(loads)
        chosen = candidates[loads.index(least)]
        token_ids = group.spec.prompt_token_ids
        if most - least <= self.balance_abs_threshold or most <= self.balance_rel_threshold * least:
            num_matched, executor_id = self._match(token_ids)
            if num_matched > self.cache_threshold * len(token_ids):
                chosen = next((each for each in candidates if each.lane.executor_id == executor_id), chosen)
        self._insert(token_ids, chosen.lane.executor_id)
        return chosen

    def _match(self, token_ids: tuple[int, ...]) -> tuple[int, int]:
        """Number of tokens that were sent before, and the executor of the last ones."""
        node, place = self._root, 0
        while place < len(token_ids) and (child := node.children.get(token_ids[place])) is not None:
            shared = _num_shared(child.token_ids, token_ids, place)
            node, place = child, place + shared
            if shared < len(child.token_ids):
                break
        return place, node.executor_id

    def _insert(self, token_ids: tuple[int, ...], executor_id: int) -> None:
        node, place = self._root, 0
        while place < len(token_ids):
            child = node.children.get(token_ids[place])
            if child is None:
                node.children[token_ids[place]] = _Node(token_ids[place:], executor_id)
                return
            shared = _num_shared(child.token_ids, token_ids, place)
            if shared < len(child.token_ids):
                upper = _Node(child.token_ids[:shared], child.executor_id)
                child.token_ids = child.token_ids[shared:]
                upper.children[child.token_ids[0]] = child
                node.children[token_ids[place]] = child = upper
            node, place = child, place + shared


def _num_shared(held: tuple[int, ...], token_ids: tuple[int, ...], place: int) -> int:
    """Number of tokens at the start of `held` that are those of `token_ids` from `place` on."""
    if token_ids[place : place + len(held)] == held:
        return len(held)
    pairs = zip(held, token_ids[place : place + len(held)], strict=False)
    differing = (index for index, (one, other) in enumerate(pairs) if one != other)
    return next(differing, min(len(held), len(token_ids) - place))


def _present(group: SequenceGroup, candidates: Ids[Candidate]) -> Candidate | None:
    """The executor that already ran the group, for which it stays when it is preempted."""
    return next((each for each in candidates if each.lane.executor_id == group.lane_id), None)


_POLICIES: dict[PlacementName, Callable[[int], PlacementPolicy]] = {
    "expected-time": lambda seed: ExpectedTime(),
    "round-robin": lambda seed: RoundRobin(),
    "llm-d": LlmdScores,
    "sglang": lambda seed: SglangCacheAware(),
}
PLACEMENTS: tuple[PlacementName, ...] = tuple(_POLICIES)


def placement_policy(name: PlacementName, seed: int) -> PlacementPolicy:
    """A new policy for one run."""
    return _POLICIES[name](seed)


def read_placement(text: str) -> PlacementName:
    """Check a policy's name; raises LoadTestError."""
    for name in PLACEMENTS:
        if text == name:
            return name
    raise LoadTestError(f"--placement {text}: must be one of {', '.join(PLACEMENTS)}")
