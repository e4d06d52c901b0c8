"""LoRA adapters in a history: their folders and names, what a process has loaded of them, and how long a load takes."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

from scheduler_svc.core.adapters import turns
from scheduler_svc.core.adapters.events import AdapterFailure, AdapterLoaded, AdapterRegistered
from tests.helpers.core.known import adapter_hash

CONTENTS = (1, 2, 3)
"""What the folder of an adapter may hold; 0: nothing that can be loaded."""
CONTENT_OF_HASH = {adapter_hash(content): content for content in (0, *CONTENTS)}
FAILED, INVALID = "reading has failed", "is broken"
"""In the messages of loads that failed by a fault, and of folders that nobody can load."""
_INTERNAL, _INVALID_ARGUMENT = 13, 3


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """The adapters of a history."""

    contents: tuple[tuple[str, int], ...] = ()
    """(name, content) of each folder at the start; all have names then."""
    load_s: float = 0.0
    """The usual duration of a load."""
    max_passed: int = turns.MAX_PASSED
    max_passed_s: float = turns.MAX_PASSED_S
    """The bounds of a turn: smaller than in service, so that short histories reach them."""

    @property
    def names(self) -> list[str]:
        """The names at the start."""
        return [name for name, _ in self.contents]


NO_ADAPTERS = AdapterPlan()


@contextlib.contextmanager
def turn_bounds(plan: AdapterPlan) -> Iterator[None]:
    """Let the core go by the plan's bounds."""
    before = turns.MAX_PASSED, turns.MAX_PASSED_S
    turns.MAX_PASSED, turns.MAX_PASSED_S = plan.max_passed, plan.max_passed_s
    try:
        yield
    finally:
        turns.MAX_PASSED, turns.MAX_PASSED_S = before


def path_of(name: str) -> str:
    """The folder of an adapter."""
    return f"/adapters/{name}"


@dataclass(slots=True)
class AdapterFiles:
    """The folders as they are now, the names, and what became of the indexes."""

    contents: dict[str, int]
    """By path."""
    names: set[str]
    """Adapters that the operator has given a name and not taken it."""
    answered: dict[int, set[int]] = field(default_factory=dict)
    """By index: the contents that executors have answered."""
    failed: set[int] = field(default_factory=set)
    """Indexes of which a load has failed."""
    used: dict[int, int] = field(default_factory=dict)
    """By index: the content that requests were admitted with."""

    @classmethod
    def of(cls, plan: AdapterPlan) -> AdapterFiles:
        """The folders at the start."""
        return cls({path_of(name): content for name, content in plan.contents}, set(plan.names))

    def on_answer(self, answer: AdapterLoaded) -> None:
        """An answer has reached the scheduler."""
        if answer.error is not None:
            self.failed.add(answer.index)
        else:
            self.answered.setdefault(answer.index, set()).add(CONTENT_OF_HASH[answer.content_hash])

    def on_admitted(self, index: int, content_hash: bytes) -> str:
        """A plan names an adapter, of which the core knows this content; returns what is wrong, if anything is."""
        content = CONTENT_OF_HASH[content_hash]
        if content not in self.answered.get(index, ()):
            return f"adapter {index} has content {content}, which no executor has answered"
        if self.used.setdefault(index, content) != content:
            return f"adapter {index} has content {content}, after {self.used[index]}"
        return ""


@dataclass(slots=True)
class NextLoad:
    """What becomes of the next load that begins."""

    seconds: float = 0.0
    """It takes so much longer."""
    fails: bool = False


class AdapterLoads:
    """The thread of one process that loads adapters, one after another, and those that it has loaded."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        rng: Random,
        files: AdapterFiles,
        load_s: float,
        on_loaded: Callable[[int, int], None],
    ) -> None:
        """on_loaded: called with the index and the content of an adapter that is loaded."""
        self.loaded: dict[int, int] = {}
        """Content by index."""
        self.next_load: NextLoad | None = None
        self.ended_at = 0.0
        """When the last load has ended."""
        self.stopped = False
        """Whether the process is suspended."""
        self._loop, self._rng, self._files, self._load_s = loop, rng, files, load_s
        self._on_loaded = on_loaded
        self._waiting: deque[tuple[AdapterRegistered, Callable[[AdapterLoaded], None]]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._ended_while_stopped: Callable[[], None] | None = None
        self._when_idle: Callable[[], None] | None = None

    @property
    def num_held(self) -> int:
        """Number of adapters that are loaded, or are to be."""
        return len(self.loaded) + len(self._waiting) + (self._timer is not None)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being loaded."""
        return self._timer is None and not self._waiting

    def answers(self) -> tuple[AdapterLoaded, ...]:
        """The loaded adapters, as a session's opening lists them."""
        return tuple(_loaded(index, content) for index, content in self.loaded.items())

    def load(self, registered: AdapterRegistered, answer: Callable[[AdapterLoaded], None]) -> None:
        """Load an adapter after those before it."""
        self._waiting.append((registered, answer))
        self._begin()

    def open_session(self, call: Callable[[], None]) -> None:
        """Drop the loads that have not begun, and call this once the one that runs is done."""
        self._when_idle = call
        self._end_opening()

    def drop_waiting(self) -> None:
        """Another session opens, or this one has ended: what has not begun is not begun."""
        self._waiting.clear()
        self._when_idle = None

    def stop(self) -> None:
        """The process ends."""
        self.drop_waiting()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def resume(self) -> None:
        """The process goes on after a suspension."""
        self.stopped = False
        ended, self._ended_while_stopped = self._ended_while_stopped, None
        if ended is not None:
            ended()

    def _begin(self) -> None:
        if self._timer is not None or not self._waiting:
            return
        registered, answer = self._waiting.popleft()
        fault, self.next_load = self.next_load or NextLoad(), None
        seconds = self._load_s * (0.5 + self._rng.random()) + fault.seconds
        self._timer = self._loop.call_later(seconds, lambda: self._end(registered, fault, answer))

    def _end(self, registered: AdapterRegistered, fault: NextLoad, answer: Callable[[AdapterLoaded], None]) -> None:
        if self.stopped:
            self._ended_while_stopped = lambda: self._end(registered, fault, answer)
            return
        self._timer, self.ended_at = None, self._loop.time()
        index, content = registered.index, self._files.contents[registered.path]
        if fault.fails:
            answer(AdapterLoaded(index, error=AdapterFailure(_INTERNAL, FAILED)))
        elif not content:
            answer(AdapterLoaded(index, error=AdapterFailure(_INVALID_ARGUMENT, f"{registered.name} {INVALID}")))
        else:
            self.loaded[index] = content
            self._on_loaded(index, content)
            answer(_loaded(index, content))
        self._end_opening()
        self._begin()

    def _end_opening(self) -> None:
        if self._timer is None and self._when_idle is not None:
            call, self._when_idle = self._when_idle, None
            call()


def _loaded(index: int, content: int) -> AdapterLoaded:
    return AdapterLoaded(index, adapter_hash(content), 1000 * content, 8)
