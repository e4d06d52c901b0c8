"""Supervision of one child service: notices that it ended, is stopped or does not get ready, and starts it again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from cadenza.errors import LocalServiceError

_MAX_DOUBLINGS = 30
_SCHEDULER_PROGRESS_S = 1.0
_SCHEDULER_MAX_DELAY_S = 5.0
"""Far less than our clients' 30 s for reaching a server again."""
_STOPPED = "T"  # a process that a debugger holds is "t", and is left alone
_MAX_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When a service that died is started again, and when it is given up.

    The first restart comes after `first_delay_s` seconds. Each death without progress doubles the delay, up to
    `max_delay_s`. A service has made progress when it lived for `progress_after_s` seconds after it was ready; an
    executor also when it completed a step. The figures are those of an executor. There is no jitter: nothing else waits
    for the same moment.
    """

    first_delay_s: float = 0.2
    max_delay_s: float = 30.0
    progress_after_s: float = 10.0
    stopped_limit_s: float = 3.0
    """A process that a signal (SIGSTOP) has stopped for this long is killed; noticed on Linux only."""
    max_deaths: int | None = 5
    """After so many deaths of one service without progress it is given up; None: never."""

    def of_scheduler(self) -> RestartPolicy:
        """The policy of a scheduler, which loads no model and serves at once, and whose clients wait for it."""
        return replace(
            self,
            progress_after_s=min(self.progress_after_s, _SCHEDULER_PROGRESS_S),
            max_delay_s=min(self.max_delay_s, _SCHEDULER_MAX_DELAY_S),
        )

    def delay_s(self, num_deaths: int) -> float:
        """Seconds between the death and the restart; `num_deaths` without progress, this one included."""
        return min(self.max_delay_s, self.first_delay_s * 2.0 ** min(num_deaths - 1, _MAX_DOUBLINGS))


class SupervisedChild(Protocol):
    """The process of a service, such as `ChildService`."""

    @property
    def pid(self) -> int:
        """Process id; 0: it is not of this machine."""

    @property
    def is_ready(self) -> bool:
        """Whether it has said that it is ready."""

    def exit_code(self) -> int | None:
        """Its exit code; None while it runs."""

    def exit_reason(self) -> str:
        """How it ended, in one line."""

    def kill(self, reason: str) -> None:
        """Send SIGKILL; `exit_reason` gives the reason."""

    def stop(self, grace_s: float) -> None:
        """Stop it and release what it holds."""


def process_state(pid: int) -> str:
    """The letter of proc(5), such as R, S or T; empty if the process is gone or the system has no /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    _, _, fields = stat.rpartition(")")  # the program's name, before it, may hold spaces and parentheses
    return fields.split()[0]


class StoppedTimer:
    """Measures for how long a process has been stopped by a signal.

    The time between two observations counts for at most half a second. So an observer that was itself suspended does
    not take the time of its own pause for the other's.
    """

    def __init__(self, pid: int, state: Callable[[int], str] = process_state) -> None:
        self._pid = pid
        self._state = state
        self._observed_at: float | None = None
        self._stopped_s = 0.0

    def seconds(self, now: float) -> float:
        """Observe the process: seconds that it has been stopped, 0 if it runs. Call it several times a second."""
        if self._state(self._pid) != _STOPPED:
            self._observed_at, self._stopped_s = None, 0.0
            return 0.0
        if self._observed_at is not None:
            self._stopped_s += min(now - self._observed_at, _MAX_LOOK_S)
        self._observed_at = now
        return self._stopped_s


class SupervisedService:
    """One service: its process, or the moment of the next attempt. `look` must be called often; it never waits.

    `name` is the subject of sentences, such as "the executor". `spawn` starts a process and returns at once
    (LocalServiceError if it cannot). `completed_step` says whether the process that just ended had completed a step.
    `on_event` gets one line for each death, and `on_back` is called when the service is ready again. `state_of` gives
    the state of a process id, as in proc(5). Times are seconds of a monotonic clock.
    """

    def __init__(
        self,
        name: str,
        child: SupervisedChild,
        now: float,
        *,
        spawn: Callable[[], SupervisedChild],
        policy: RestartPolicy,
        start_timeout_s: float,
        completed_step: Callable[[], bool],
        on_event: Callable[[str], None],
        on_back: Callable[[], None],
        is_ready: bool = True,
        state_of: Callable[[int], str] = process_state,
    ) -> None:
        """is_ready: whether the first process has become ready already."""
        self._name = name
        self._child = child
        self._spawn = spawn
        self._policy = policy
        self._start_timeout_s = start_timeout_s
        self._completed_step = completed_step
        self._on_event = on_event
        self._on_back = on_back
        self._state_of = state_of
        self._stopped = StoppedTimer(child.pid, state_of)
        self._num_deaths = 0  # without progress in between
        self._started_at = now
        self._ready_at: float | None = now if is_ready else None
        self._retry_at: float | None = None

    def look(self, now: float) -> None:
        """Do what is due; raises LocalServiceError when the service is given up."""
        if self._retry_at is not None:
            if now >= self._retry_at:
                self._try_again(now)
        elif self._child.exit_code() is not None:
            self._ended(now)
        elif self._ready_at is None and self._child.is_ready:
            self._is_back(now)
        else:
            self._kill_if_stuck(now)

    def _try_again(self, now: float) -> None:
        self._retry_at, self._ready_at, self._started_at = None, None, now
        try:
            self._child = self._spawn()
        except LocalServiceError as error:
            self._record_death(f"did not start ({error})", now)
            return
        self._stopped = StoppedTimer(self._child.pid, self._state_of)

    def _kill_if_stuck(self, now: float) -> None:
        stopped_s = self._stopped.seconds(now)
        if stopped_s >= self._policy.stopped_limit_s:
            self._child.kill(f"killed because a signal had stopped it for {stopped_s:.0f} s")
        elif self._ready_at is None and now - self._started_at > self._start_timeout_s:
            self._child.kill(f"killed because it was not ready after {self._start_timeout_s:g} s")

    def _is_back(self, now: float) -> None:
        self._ready_at = now
        self._on_back()

    def _ended(self, now: float) -> None:
        reason = self._child.exit_reason()  # all of its output has been read now
        if self._ready_at is None and self._child.is_ready:
            self._is_back(now)  # it lived between two looks
        self._child.stop(0)
        if self._ready_at is not None and self._child.exit_code() == 0:
            # A signal stopped it, as in a rolling restart: no death.
            self._retry_at = now + self._policy.first_delay_s
            self._on_event(f"{self._name} was stopped; starting it again in {self._policy.first_delay_s:g} s")
            return
        what = "did not start" if self._ready_at is None else "died"
        if self._ready_at is not None and self._made_progress(now - self._ready_at):
            self._num_deaths = 0
        self._record_death(f"{what} ({reason})", now)

    def _made_progress(self, lived_s: float) -> bool:
        return lived_s >= self._policy.progress_after_s or self._completed_step()

    def _record_death(self, what: str, now: float) -> None:
        self._num_deaths += 1
        message = f"{self._name} {what}"
        if self._num_deaths > 1:
            message += f"; it has died {self._num_deaths} times without progress"
        if self._policy.max_deaths is not None and self._num_deaths >= self._policy.max_deaths:
            raise LocalServiceError(f"{message} and is given up")
        delay_s = self._policy.delay_s(self._num_deaths)
        self._retry_at = now + delay_s
        self._on_event(f"{message}; starting it again in {delay_s:g} s")
