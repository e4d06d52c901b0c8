"""Runs the plans of a plan log and compares their results with the recorded ones.

The executor is that of the service, without gRPC and without a scheduler. Plans run one after the other in the order
in which they were planned (docs/replay.md).
"""

from __future__ import annotations

import logging
import queue
import sys
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

from cadenza.v1 import execution_pb2 as pb
from cadenza.v1.planlog_pb2 import AdapterCommandsCall, PlanLogRecord
from cadenza_common.plan.errors import InvalidPlan
from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan.result import StepResult
from cadenza_common.plan_wire.reading import plan_from_wire
from cadenza_common.plan_wire.results import result_to_wire
from cadenza_common.settings import service as settings
from executor_svc.app import build_executor
from executor_svc.config import ExecutorConfig
from executor_svc.errors import StartError
from executor_svc.plan.description import Description
from executor_svc.replay.checks import contradictions, first_difference, numerics_difference, recorded_arguments
from executor_svc.replay.recorded_drafts import RecordedDrafts, late_slots
from executor_svc.service.description import description_to_wire
from executor_svc.worker.adapters import AdapterRefused
from executor_svc.worker.session import PlanSession, RejectedPlan
from executor_svc.worker.worker import Worker

_STOP_S = 10.0
_OF_AN_EXECUTOR = ("session_opened", "plan_step", "apply_result", "step_failed", "adapter_commands")


class ReplayError(Exception):
    """The log cannot run with these options; the message is for the user, and may have been printed already."""


class _Executor:
    """One incarnation of an executor on its device thread. `open` must be called before `run`."""

    _session: PlanSession

    def __init__(self, config: ExecutorConfig) -> None:
        """Build the executor as the service does; raises StartError."""
        described: Future[Description] = Future()
        self._drafts = RecordedDrafts()
        self._worker = Worker(lambda: build_executor(config, described, self._drafts))
        self._worker.start()
        executor = self._worker.ready.result()
        self._adapters = executor.adapters
        self._late: frozenset[int] = frozenset()
        grammars = getattr(executor, "grammars", None)
        if grammars is not None:
            grammars.recorded = lambda slot: slot in self._late
        self.description = description_to_wire(described.result())
        self._results: queue.SimpleQueue[StepResult] = queue.SimpleQueue()

    def open(self, epoch: int) -> None:
        """Open a session, which clears all slots."""
        self._session, opened = self._worker.open_session(epoch, self._results.put)
        opened.result()

    def run(self, message: pb.StepPlan, recorded: pb.StepResult | None) -> pb.StepResult:
        """Run a plan; every failure becomes a result, as in the service. recorded: its result, if there is one."""
        self._drafts.expect(recorded)
        self._late = late_slots(recorded)
        plan: StepPlan | RejectedPlan
        try:
            plan = plan_from_wire(message)
        except InvalidPlan as exc:
            plan = RejectedPlan(message.step_id, str(exc))
        self._worker.submit(self._session, plan, time.monotonic_ns())
        return result_to_wire(self._results.get(), message.epoch, self.description.incarnation)

    def load(self, message: pb.LoadAdapter) -> str:
        """Load an adapter; returns why it cannot be, as the service answers then."""
        try:
            if self._adapters is None:
                return "the executor has no adapters"
            self._adapters.load(message.adapter_index, message.name, message.path)
        except AdapterRefused as exc:
            return str(exc)
        return ""

    def unload(self, index: int) -> None:
        """Unload an adapter after the plans so far, which have run."""
        if self._adapters is not None:
            self._adapters.unload(index)

    def stop(self) -> None:
        """End the thread, so that its memory can be freed."""
        self._worker.stop(_STOP_S)


def _groups(description: pb.DescribeResponse) -> str:
    """The windows and pages of an executor's KV groups, for a message."""
    return str([(group.window, group.pages_per_block) for group in description.kv.groups])


class PlanReplay:
    """Replays what one executor of a log did: a new one, with empty memory, for each recorded incarnation."""

    def __init__(
        self, path: str, recorded: pb.DescribeResponse, arguments: Sequence[str], executor_id: int | None = None
    ) -> None:
        """`recorded`: the header's description. `arguments`: options that differ from the recorded executor's.

        `executor_id`: the index of the executor; None: the one that the log adds first.
        """
        self._path = path
        self._recorded = recorded
        self._descriptions: dict[int, pb.DescribeResponse] = {}
        self.executor_id = executor_id
        self._arguments = arguments
        self._executor: _Executor | None = None
        self._incarnation = 0
        self._exact = True
        self._adapters: dict[int, pb.LoadAdapter] = {}
        """By index: all that had names so far."""
        self._unloads: list[tuple[int, int]] = []
        """(step id, index) of adapters to unload once the plans up to this step have run."""
        self._waiting: deque[pb.StepPlan] = deque()
        """Plans whose results come later in the log: a plan runs once its recorded result is known."""
        self.num_plans = 0
        self.num_results = 0
        self.num_tokens = 0

    def replay_record(self, record: PlanLogRecord) -> str:
        """Replay one record; return the difference to the recorded result, empty if there is none.

        Raises ReplayError.
        """
        kind = record.WhichOneof("record")
        if kind == "executor_described":
            self._descriptions[record.executor_described.executor_id] = record.executor_described.executor
            return ""
        if kind == "adapter_event" and record.adapter_event.HasField("registered"):
            registered = record.adapter_event.registered
            self._adapters[registered.adapter_index] = registered
            return ""
        if kind == "add_executor" and self.executor_id is None:
            self.executor_id = record.add_executor.executor_id
        if kind not in _OF_AN_EXECUTOR or getattr(record, kind).executor_id != self.executor_id:
            return ""
        match kind:
            case "session_opened":
                self._open(record.session_opened.epoch, record.session_opened.incarnation)
            case "plan_step" if record.plan_step.HasField("plan"):
                if self._executor is None:
                    raise ReplayError(f"the plan of step {record.plan_step.plan.step_id} comes before any session")
                self._waiting.append(record.plan_step.plan)
            case "adapter_commands":
                self._load(record.adapter_commands)
            case "apply_result":
                return self._compare(record.apply_result.result)
            case "step_failed":
                return self._compare(record.step_failed.result)
        return ""

    def stop(self) -> None:
        """Run what has no result, and stop the current executor."""
        self._run_waiting()
        if self._executor is not None:
            executor, self._executor = self._executor, None
            executor.stop()

    def _open(self, epoch: int, incarnation: int) -> None:
        self._run_waiting()
        if self._executor is None or incarnation != self._incarnation:
            self.stop()
            self._executor = self._build()
            self._incarnation = incarnation
        self._executor.open(epoch)

    def _load(self, commands: AdapterCommandsCall) -> None:
        """Load adapters, and unload others once the plans that may name them have run: loads may come before that."""
        last = self._waiting[-1].step_id if self._waiting else 0
        self._unloads += [(last, index) for index in commands.unloads]
        self._unload()
        if self._executor is None:
            return
        for index in commands.loads:
            reason = self._executor.load(self._adapters[index])
            if reason:
                print(f"{self._path}: adapter {index} is not loaded here: {reason}", file=sys.stderr)

    def _unload(self) -> None:
        """Unload what no plan that waits may name."""
        first = self._waiting[0].step_id if self._waiting else None
        for step_id, index in [each for each in self._unloads if first is None or each[0] < first]:
            self._unloads.remove((step_id, index))
            if self._executor is not None:
                self._executor.unload(index)

    def _build(self) -> _Executor:
        """Build an executor like the recorded one, with the overrides of `arguments`."""
        # The header describes the executor that has no description of its own.
        self._recorded = self._descriptions.get(self.executor_id or 0, self._recorded)
        errors: list[str] = []
        arguments = [*recorded_arguments(self._recorded, self._arguments), *self._arguments]
        config = settings.read_config(ExecutorConfig, arguments, errors.append)
        if config is not None:
            errors += contradictions(config, self._recorded)
        if config is None or errors:
            raise ReplayError("\n".join(errors))
        logging.getLogger().setLevel(config.log_level.upper())
        config = config.with_pages(self._recorded.kv.num_device_blocks, self._recorded.kv.num_host_blocks)
        if not self._recorded.kv.groups:
            config = config.model_copy(update={"disable_hybrid_kv_cache_manager": True})
        try:
            executor = _Executor(config)
        except StartError as exc:
            raise ReplayError(str(exc)) from exc
        self._check_model(executor)
        return executor

    def _check_model(self, executor: _Executor) -> None:
        """Require the recorded vocabulary size; warn about different numerics, under which tokens may differ."""
        recorded, here = self._recorded, executor.description
        if recorded.model.vocab_size != here.model.vocab_size:
            executor.stop()
            raise ReplayError(
                f"--model: {here.model.name} has {here.model.vocab_size} token ids, the recorded "
                f"{recorded.model.name} had {recorded.model.vocab_size}"
            )
        if list(recorded.kv.groups) != list(here.kv.groups):
            executor.stop()
            raise ReplayError(
                f"--model: {here.model.name} has KV groups {_groups(here)}, the recorded {recorded.model.name} had "
                f"{_groups(recorded)}"
            )
        if recorded.kv.state.pages_per_state != here.kv.state.pages_per_state:
            executor.stop()
            raise ReplayError(
                f"--model: {here.model.name} has recurrent states of {here.kv.state.pages_per_state} pages, the "
                f"recorded {recorded.model.name} had {recorded.kv.state.pages_per_state}"
            )
        difference = numerics_difference(recorded, here)
        self._exact = not difference
        if difference:
            print(
                f"{self._path}: the numerics fingerprint is not the recorded one ({difference}): tokens may differ, "
                "and logprobs are not compared",
                file=sys.stderr,
            )

    def _run_waiting(self) -> None:
        """Run the plans of a session that has ended, to which no result came."""
        while self._waiting and self._executor is not None:
            self._executor.run(self._waiting.popleft(), None)
            self.num_plans += 1

    def _compare(self, recorded: pb.StepResult) -> str:
        if self._executor is None or not self._waiting or self._waiting[0].step_id != recorded.step_id:
            return f"step {recorded.step_id}: there is a result, but no plan of this session"
        replayed = self._executor.run(self._waiting.popleft(), recorded)
        self.num_plans += 1
        self.num_results += 1
        self.num_tokens += len(replayed.token_ids)
        self._unload()
        difference = first_difference(recorded, replayed, exact=self._exact)
        return f"step {recorded.step_id}: {difference}" if difference else ""
