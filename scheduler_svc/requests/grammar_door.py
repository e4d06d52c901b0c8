"""The door for constraints: each is compiled once in another process, and refused with the compiler's own message.

Tenants take turns, and what takes longer than a slice of time goes on beside the others, one at a time: so a constraint
that takes seconds delays the next ones by the slice. A constraint that several tenants wait for takes the turn of each.
Processes have bounds on memory and time; one that hangs, or dies of a constraint, is ended, and nothing of it reaches
this process. A constraint that nobody waits for any more is dropped.

A refusal follows from the constraint. What the bounds of a process end is none: another moment, or another machine, may
have more time and memory, so that the answer is that of a full queue.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
from collections import Counter
from dataclasses import dataclass, field

from cadenza_common.grammar.bounded_cache import BoundedCache
from cadenza_common.grammar.spec import GrammarSpec
from cadenza_common.grammar.table import GrammarEngine, TableSource
from cadenza_common.grammar.tenant_turns import TenantTurns
from scheduler_svc.core.errors import PreconditionError, RequestRejectedError, SchedulerError, WaitingQueueFullError
from scheduler_svc.requests.compiling_child import ChildStartError, CompilingChild
from scheduler_svc.requests.field_rules import PATH

GRAMMAR_PATH = PATH + "grammar"
NO_COMPILER = (
    "the scheduler compiles no grammars: it needs llguidance, and a tokenizer with tokenizer.json or of a GGUF file"
)
COMPILE_S = 10.0
"""Longest time for one constraint. llguidance's own limits end what is too large long before."""
SLICE_S = 0.1
"""Time of a processor after which a constraint is slow: most take some milliseconds."""
MAX_CHILD_BYTES = 2**31
"""Of the memory of each process that compiles; there are two at most, and the one that forks them."""
MAX_WAITING = 512
"""Constraints that wait to be compiled; of one tenant no more than there are free places."""
MAX_WAITING_REQUESTS = 1024
"""Requests that wait for constraints, shared in the same way."""
_ANSWER_S = 5.0
"""Longest time in which the child says that it has dropped a constraint: it does nothing else."""
_MAX_CACHED, _MAX_CACHED_BYTES = 16_384, 2**22
_LOG = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Job:
    """A constraint that is not known yet."""

    spec: GrammarSpec
    key: bytes
    verdict: asyncio.Future[str]
    """What is wrong with it; empty: nothing."""
    num_waiting: Counter[str] = field(default_factory=Counter)
    """Requests that wait for it, by tenant: it takes the turn of each."""
    num_tries: int = 0
    is_slow: bool = False
    number: int = 0
    """Its id while it is compiled; else 0."""
    began: float = 0.0
    timer: asyncio.TimerHandle | None = None


class GrammarDoor:
    """Checks constraints for one table of tokens; for use on one event loop."""

    def __init__(
        self,
        source: TableSource,
        *,
        compile_s: float = COMPILE_S,
        slice_s: float = SLICE_S,
        max_bytes: int = MAX_CHILD_BYTES,
        max_waiting: int = MAX_WAITING,
        max_waiting_requests: int = MAX_WAITING_REQUESTS,
    ) -> None:
        """Start nothing yet: the first constraint starts the child."""
        self.child: CompilingChild | None = None
        self._max_requests = max_waiting_requests
        self._num_requests: Counter[str] = Counter()
        """That wait for constraints, by tenant."""
        self._source, self._max_bytes, self._max_waiting = source, max_bytes, max_waiting
        self._compile_s, self._slice_s = compile_s, slice_s
        self._engine: GrammarEngine | None = None
        self._found: BoundedCache[bytes, str] = BoundedCache(_MAX_CACHED, _MAX_CACHED_BYTES)
        """By the digest of a constraint: what is wrong with it; empty: nothing."""
        self._jobs: dict[bytes, _Job] = {}
        self._running: dict[int, _Job] = {}
        self._waiting: dict[bool, TenantTurns[str, _Job]] = {False: TenantTurns(), True: TenantTurns()}
        """By whether they are slow."""
        self._numbers = itertools.count(1)
        self._dropped: dict[int, asyncio.TimerHandle] = {}
        self._opening: asyncio.Task[None] | None = None
        self._mean_s = 0.01
        """Of a constraint, as the last ones took."""
        self._is_closed = False

    async def check(self, spec: GrammarSpec, wire: bytes, engine: bytes, tenant: str = "") -> None:
        """Raise RequestRejectedError for a constraint that cannot be followed.

        wire: identifies the constraint; engine: the executor's, as `GrammarEngine.key`. Raises PreconditionError if
        that is not this one's, or if no child can be started, and QueueFullError if too much waits already, or if the
        constraint exceeds a bound of its process.
        """
        await self._check_engine(engine)
        key = hashlib.sha256(wire).digest()
        error = self._found.get(key)
        if error is None:
            error = await self._verdict(spec, key, tenant)
        if error:
            raise RequestRejectedError(f"{GRAMMAR_PATH}.{spec.kind}", error)

    def close(self) -> None:
        """End the child once nobody waits for it any more."""
        self._is_closed = True
        self._go_on()

    @property
    def num_waiting(self) -> int:
        """Constraints that wait to be compiled."""
        return len(self._jobs) - len(self._running)

    async def _check_engine(self, engine: bytes) -> None:
        if self._engine is None:
            self._engine = await asyncio.get_running_loop().run_in_executor(None, self._source.engine)
        if self._engine.key != engine:
            raise PreconditionError(
                GRAMMAR_PATH,
                f"the scheduler's {self._engine.library}, or its tokenizer, is not that of the executor: both need the "
                "same version, and the same tokenizer.json",
            )

    async def _verdict(self, spec: GrammarSpec, key: bytes, tenant: str) -> str:
        """Return what is wrong with a constraint, once it is compiled; raises as `check`."""
        job = self._jobs.get(key)
        self._check_room(tenant, is_new=job is None)
        if job is None:
            job = self._jobs[key] = _Job(spec, key, asyncio.get_running_loop().create_future())
        job.num_waiting[tenant] += 1
        self._num_requests[tenant] += 1
        if job.num_waiting[tenant] == 1 and not job.number:
            self._waiting[job.is_slow].add(tenant, job)
        self._go_on()
        try:
            return await asyncio.shield(job.verdict)
        finally:
            self._num_requests -= Counter([tenant])
            job.num_waiting -= Counter([tenant])
            if not job.verdict.done() and tenant not in job.num_waiting:
                self._give_up(job, tenant)

    def _check_room(self, tenant: str, *, is_new: bool) -> None:
        """Raise QueueFullError if there is no place for a request of this tenant: as in `tenants.quotas`.

        is_new: whether nobody waits for its constraint.
        """
        waiting, requests = self.num_waiting, self._num_requests.total()
        own = sum(turns.num_of(tenant) for turns in self._waiting.values())
        if is_new and own >= _share(tenant, self._max_waiting, waiting):
            what = f"{waiting} constraints on outputs wait to be compiled"
        elif self._num_requests[tenant] >= _share(tenant, self._max_requests, requests):
            what = f"{requests} requests wait for constraints to be compiled"
        else:
            return
        raise WaitingQueueFullError(f"{what} already, too many of them this tenant's", max(1.0, waiting * self._mean_s))

    # ------------------------------------------------------------ the work

    def _go_on(self) -> None:
        """Start whatever may start."""
        if self.child is None:
            if self._jobs and self._opening is None:
                self._opening = asyncio.create_task(self._open(), name="grammar-door")
            return
        if self._is_closed and not self._jobs:
            self._end()
            return
        for is_slow, turns in self._waiting.items():
            while turns and all(job.is_slow != is_slow for job in self._running.values()):
                self._start(self.child, self._next(turns))

    def _next(self, turns: TenantTurns[str, _Job]) -> _Job:
        """Remove and return the constraint whose turn it is."""
        tenant, job = turns.pop()
        for other in job.num_waiting:
            if other != tenant:
                turns.remove(other, job)
        return job

    async def _open(self) -> None:
        """Start a child; if that fails, so does every constraint."""
        try:
            # Of the file that the child is about to read: it may have been replaced.
            self._engine = await asyncio.get_running_loop().run_in_executor(None, self._source.engine)
            child = await CompilingChild.start(self._source, self._max_bytes)
        except (ChildStartError, OSError) as error:
            _LOG.error("the process that compiles grammars cannot start: %s", error)
            failure = PreconditionError(GRAMMAR_PATH, f"the process that compiles grammars cannot start: {error}")
            self._waiting = {False: TenantTurns(), True: TenantTurns()}
            for job in [*self._jobs.values()]:
                self._finish(job, failure)
            return
        finally:
            self._opening = None
        child.listen(self._answered, self._child_ended)
        self.child = child
        self._go_on()

    def _start(self, child: CompilingChild, job: _Job) -> None:
        loop = asyncio.get_running_loop()
        job.number, job.began = next(self._numbers), loop.time()
        self._running[job.number] = job
        child.compile(job.number, job.spec)
        if job.is_slow:
            child.slow_down(job.number)
        job.timer = loop.call_later(self._compile_s if job.is_slow else self._slice_s, self._overdue, job)

    def _overdue(self, job: _Job) -> None:
        """A constraint has had its slice of time, or all of it."""
        if job.is_slow:
            self._stop(job)
            self._exceeds(job, f"takes over {self._compile_s:g} s to compile")
        elif (left := self._slice_left(job)) > 0:
            job.timer = asyncio.get_running_loop().call_later(left, self._overdue, job)
            return
        elif any(other.is_slow for other in self._running.values()):
            self._stop(job)
            job.is_slow = True
            self._wait_again(job)
        else:
            left = max(0.0, job.began + self._compile_s - asyncio.get_running_loop().time())
            job.timer = asyncio.get_running_loop().call_later(left, self._overdue, job)
            if self.child is not None:
                self.child.slow_down(job.number)
        job.is_slow = True
        self._go_on()

    def _slice_left(self, job: _Job) -> float:
        """Return the seconds of a processor that a constraint may still have before it is slow; 0 if time is up."""
        had = self._slice_s if self.child is None else self.child.cpu_s(job.number)
        if asyncio.get_running_loop().time() - job.began >= self._compile_s:
            return 0.0
        return max(0.0, self._slice_s - had)

    def _wait_again(self, job: _Job, *, first: bool = False) -> None:
        for tenant in job.num_waiting:
            self._waiting[job.is_slow].add(tenant, job, first=first)

    def _answered(self, number: int, error: str | None) -> None:
        """The child says what is wrong with a constraint; None: its process has died."""
        if (watch := self._dropped.pop(number, None)) is not None:
            watch.cancel()
        job = self._running.pop(number, None)
        if job is None:
            return
        _halt(job)
        if error is None:
            self._try_again(job)
        else:
            self._mean_s += (asyncio.get_running_loop().time() - job.began - self._mean_s) / 8
            self._found.put(job.key, error, len(job.key) + 4 * len(error))
            self._finish(job, error)
        self._go_on()

    def _child_ended(self, child: CompilingChild) -> None:
        child.end()
        self._forget_child()
        self._go_on()

    def _forget_child(self) -> None:
        """Let what a lost child compiled be compiled by the next."""
        self.child = None
        for watch in self._dropped.values():
            watch.cancel()
        self._dropped.clear()
        jobs, self._running = [*self._running.values()], {}
        for job in jobs:
            _halt(job)
            self._try_again(job)

    def _try_again(self, job: _Job) -> None:
        """Compile a constraint whose process has died once more: something else may have killed it."""
        job.num_tries += 1
        if job.num_tries < 2:
            self._wait_again(job, first=True)
        else:
            self._exceeds(job, f"its process has died twice; it may have {self._max_bytes // 2**20} MiB of memory")

    def _exceeds(self, job: _Job, message: str) -> None:
        """Tell all callers that a constraint exceeds a bound of its process. Another time it may fit."""
        error = WaitingQueueFullError(f"{GRAMMAR_PATH}.{job.spec.kind}: {message}", self._compile_s)
        self._finish(job, error)

    def _finish(self, job: _Job, verdict: str | SchedulerError) -> None:
        """Answer all who wait."""
        del self._jobs[job.key]
        if isinstance(verdict, str):
            job.verdict.set_result(verdict)
            return
        job.verdict.set_exception(verdict)
        job.verdict.exception()  # All who waited may have gone.

    def _give_up(self, job: _Job, tenant: str) -> None:
        """A tenant does not wait for a constraint any more; drop it if nobody does."""
        if not job.number:
            self._waiting[job.is_slow].remove(tenant, job)
        elif not job.num_waiting:
            self._stop(job)
        if not job.num_waiting:
            del self._jobs[job.key]
        self._go_on()

    def _stop(self, job: _Job) -> None:
        """End the process that compiles a constraint."""
        number = job.number
        del self._running[number]
        _halt(job)
        if self.child is not None:
            self.child.drop(number)
            self._dropped[number] = asyncio.get_running_loop().call_later(_ANSWER_S, self._hangs, self.child)

    def _hangs(self, child: CompilingChild) -> None:
        if child is self.child:
            _LOG.error("the process that compiles grammars does not answer, and is replaced")
            self._end()
            self._go_on()

    def _end(self) -> None:
        if self.child is not None:
            self.child.end()
            self._forget_child()


def _share(tenant: str, places: int, taken: int) -> int:
    """Return how many places a tenant may have: as many as are free, and all if there are no tenants."""
    return places - taken if tenant else places


def _halt(job: _Job) -> None:
    job.number = 0
    if job.timer is not None:
        job.timer.cancel()
        job.timer = None
