"""The executor of a request within its scheduler: the least expected time to the first token, as the core's policy
`ExpectedTime` (`scheduler_svc.core.policies.placement`) and docs/decisions/0022 have it.

An executor's expected time: the rest of its step, the steps and tokens of the prompts that are queued there, the
request's own prompt without what is cached, and where no seat or memory is free, the ends that must come before. One
that has over 32 requests more than the least busy one of its scheduler (or half as many again) is not chosen for its
cache. A scheduler's requests of one time slice are placed a few at a time, each few on different executors.
"""

from __future__ import annotations

import numpy as np

from benchmarks.fleet.bank import ExecutorBank
from benchmarks.fleet.caches import NOWHERE, PrefixCaches
from benchmarks.fleet.requests import RequestTable
from cadenza_loadtest.requests import Floats, Ints

_MORE_REQUESTS, _MORE_SHARE = 32, 1.5
_NEVER_S = 1e12


class Placement:
    """Places requests on the executors of `num_schedulers`, which have equal numbers of them, one after the other."""

    def __init__(self, bank: ExecutorBank, table: RequestTable, caches: PrefixCaches, num_schedulers: int) -> None:
        self._bank, self._table, self._caches = bank, table, caches
        self._shape = (num_schedulers, len(bank) // num_schedulers)
        self._at_once = max(1, self._shape[1] // 4)
        self.mean_left = 200.0
        """Output tokens of a request, for the time between two ends."""

    def place(self, requests: Ints, schedulers: Ints, shared: Ints, group_tokens: Ints, now_s: float) -> None:
        """Queue requests [n]; `shared` [n]: tokens of each prompt that its session has had before, `group_tokens` [n]:
        of its shared beginning. The request's `cached` and `todo` are set by what its executor has."""
        table, room = self._table, self._room()
        home, held = self._caches.home(table.session[requests], room)
        own = home // self._shape[1] == schedulers
        home = np.where(own & self._takes()[home], home, NOWHERE)
        kept = np.where(home >= 0, np.minimum(held, shared), 0)
        at_once = max(1, min(self._at_once, int(self.num_taking[np.unique(schedulers)].min(initial=1 << 30))))
        order = np.argsort(schedulers, kind="stable")
        while len(order):
            ranks = _ranks(schedulers[order])
            is_now = ranks < at_once
            now = order[is_now]
            chosen = self._choose(schedulers[now], home[now], kept[now], ranks[is_now], now_s)
            cached = np.where(chosen == home[now], kept[now], 0)
            has_group = self._caches.has_group(table.group[requests[now]], chosen, room)
            cached = np.maximum(cached, np.where(has_group, group_tokens[now], 0))
            self._queue(requests[now], chosen, cached)
            order = order[~is_now]

    def place_decodes(self, requests: Ints, executors: Ints) -> None:
        """Queue requests whose KV comes from elsewhere: each on the decode executor that will hold the least."""
        bank, table = self._bank, self._table
        load = np.where(bank.up & ~bank.only_prefills, bank.held + bank.queued_context, np.iinfo(np.int64).max // 2)
        load = load.reshape(self._shape)
        chosen = np.zeros(len(requests), np.int64)
        for place, (request, scheduler) in enumerate(zip(requests, executors // self._shape[1], strict=True)):
            best = int(load[scheduler].argmin())
            load[scheduler, best] += table.context[request]
            chosen[place] = scheduler * self._shape[1] + best
        table.context[requests] += 1  # its first output token
        table.todo[requests] = 1
        bank.push(requests, chosen)

    @property
    def num_taking(self) -> Ints:
        """[schedulers] executors that take new requests."""
        counts: Ints = self._takes().reshape(self._shape).sum(axis=1)
        return counts

    def _choose(self, schedulers: Ints, home: Ints, kept: Ints, ranks: Ints, now_s: float) -> Ints:
        wait_s = self._wait_s(now_s).reshape(self._shape)
        best = np.argsort(wait_s, axis=1, kind="stable")
        other = best[schedulers, ranks] + schedulers * self._shape[1]
        flat = wait_s.reshape(-1)
        saved_s = kept * self._token_s()
        stays = (home >= 0) & self._not_crowded()[home] & (flat[home] - saved_s <= flat[other])
        return np.where(stays, home, other)

    def _queue(self, requests: Ints, executors: Ints, cached: Ints) -> None:
        table, size = self._table, self._bank.model.block_size
        whole = table.context[requests]
        # The last token is always computed; caches have whole blocks.
        cached = np.minimum(cached // size * size, (whole - 1) // size * size)
        table.cached[requests] = cached
        table.todo[requests] = whole - cached
        self._bank.push(requests, executors)

    def _wait_s(self, now_s: float) -> Floats:
        """[executors] seconds until a step with a new request would end, without the request's own tokens."""
        bank, model = self._bank, self._bank.model
        batch = bank.batch
        decoded = bank.context + batch
        step_s = np.maximum(model.step_s(batch, decoded, decoded, batch), bank.least_step_s)
        budget = np.maximum(1, model.max_num_batched_tokens - batch)
        wait_s: Floats = np.maximum(0.0, bank.clock_s - now_s) + step_s * (1 + bank.backlog // budget)
        wait_s += bank.backlog * self._token_s()
        lacking = np.maximum(0, batch + bank.size + 1 - model.max_num_seqs).astype(np.float64)
        mean_context = np.maximum(1, bank.context) / np.maximum(1, batch)
        over = np.maximum(0, bank.held + bank.queued_context - model.pool_tokens)
        lacking = np.maximum(lacking, over / mean_context)
        wait_s += lacking * step_s * self.mean_left / np.maximum(1, batch)
        result: Floats = np.where(self._takes(), wait_s, _NEVER_S)
        return result

    def _token_s(self) -> float:
        return self._bank.model.costs.token_us / 1e6

    def _takes(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Whether executors take new requests: with prefill executors only those do."""
        bank = self._bank
        return bank.up & bank.only_prefills if bank.only_prefills.any() else bank.up

    def _not_crowded(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        load = (self._bank.batch + self._bank.size).reshape(self._shape)
        least = np.where(self._takes().reshape(self._shape), load, np.iinfo(np.int64).max).min(axis=1, keepdims=True)
        most = np.maximum(least + _MORE_REQUESTS, least * _MORE_SHARE)
        result: np.ndarray[tuple[int], np.dtype[np.bool_]] = (load <= most).reshape(-1)
        return result

    def _room(self) -> Ints:
        """[executors] tokens of each pool that no request holds, where caches are."""
        return np.maximum(0, self._bank.model.pool_tokens - self._bank.held)


def _ranks(sorted_values: Ints) -> Ints:
    """[n] the how-manieth of its value each entry is, from 0; equal values are side by side."""
    begins = np.flatnonzero(np.diff(sorted_values, prepend=-1))
    counts = np.diff(np.append(begins, len(sorted_values)))
    return np.arange(len(sorted_values)) - np.repeat(begins, counts)
