"""`python -m executor_svc.replay FILE [OPTIONS]`: runs the plans of a plan log, and checks what comes out of them.

The executor is the service's own, without its gRPC; no scheduler has a part in it. Plans run one after the other in
the order in which they were planned (docs/replay.md).
"""

from __future__ import annotations

import logging
import queue
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future

from cadenza.settings import service as settings
from cadenza.v1 import execution_pb2 as pb
from cadenza.v1.planlog_pb2 import PlanLogRecord
from executor_svc.app import build_executor
from executor_svc.config import ExecutorConfig
from executor_svc.errors import StartError
from executor_svc.plan.description import Description
from executor_svc.plan.plan import InvalidPlan, StepPlan, StepResult
from executor_svc.replay.checks import contradictions, first_difference, other_numerics, recorded_arguments
from executor_svc.service.convert import description_to_wire, plan_from_wire, result_to_wire
from executor_svc.worker.worker import RejectedPlan, Session, Worker

_STOP_S = 10.0


class ReplayError(Exception):
    """The log cannot be run with these options; the message is for the user, who may have been told already."""


class _Executor:
    """One incarnation of an executor on its device thread. A session is to be opened before plans are run."""

    _session: Session

    def __init__(self, config: ExecutorConfig) -> None:
        """Build it as the service does; raises StartError."""
        described: Future[Description] = Future()
        self._worker = Worker(lambda: build_executor(config, described))
        self._worker.start()
        self._worker.ready.result()
        self.description = description_to_wire(described.result())
        self._results: queue.SimpleQueue[StepResult] = queue.SimpleQueue()

    def open(self, epoch: int) -> None:
        """Begin a session: all slots are clear."""
        self._session, opened = self._worker.open_session(epoch, self._results.put)
        opened.result()

    def run(self, message: pb.StepPlan) -> pb.StepResult:
        """Run a plan; every failure becomes a result, as in service."""
        plan: StepPlan | RejectedPlan
        try:
            plan = plan_from_wire(message)
        except InvalidPlan as exc:
            plan = RejectedPlan(message.step_id, str(exc))
        self._worker.submit(self._session, plan, time.monotonic_ns())
        return result_to_wire(self._results.get(), message.epoch, self.description.incarnation)

    def stop(self) -> None:
        """End its thread, so that its memory can go."""
        self._worker.stop(_STOP_S)


class PlanReplay:
    """Executors that are led through a log: a new one for each incarnation, whose memory is empty."""

    def __init__(self, path: str, recorded: pb.DescribeResponse, arguments: Sequence[str]) -> None:
        """`arguments`: options that differ from the recorded executor's."""
        self._path = path
        self._recorded = recorded
        self._arguments = arguments
        self._executor: _Executor | None = None
        self._incarnation = 0
        self._exact = True
        self._made: dict[int, pb.StepResult] = {}
        """By step: results that have not been held against recorded ones."""
        self.num_plans = 0
        self.num_results = 0
        self.num_tokens = 0

    def take(self, record: PlanLogRecord) -> str:
        """Do what a record says; returns in what the outcome differs, empty if it does not. Raises ReplayError."""
        match record.WhichOneof("record"):
            case "executor_described":
                self._recorded = record.executor_described.executor
            case "session_opened":
                self._open(record.session_opened.epoch, record.session_opened.incarnation)
            case "plan_step" if record.plan_step.HasField("plan"):
                self._run(record.plan_step.plan)
            case "apply_result":
                return self._compare(record.apply_result.result)
            case "step_failed":
                return self._compare(record.step_failed.result)
        return ""

    def stop(self) -> None:
        """End the executor."""
        if self._executor is not None:
            executor, self._executor = self._executor, None
            executor.stop()

    def _open(self, epoch: int, incarnation: int) -> None:
        self._made.clear()
        if self._executor is None or incarnation != self._incarnation:
            self.stop()
            self._executor = self._build()
            self._incarnation = incarnation
        self._executor.open(epoch)

    def _build(self) -> _Executor:
        """An executor like the recorded one, unless options say otherwise."""
        problems: list[str] = []
        arguments = [*recorded_arguments(self._recorded, self._arguments), *self._arguments]
        config = settings.read_config(ExecutorConfig, arguments, problems.append)
        if config is not None:
            problems += contradictions(config, self._recorded)
        if config is None or problems:
            raise ReplayError("\n".join(problems))
        logging.getLogger().setLevel(config.log_level.upper())
        try:
            executor = _Executor(config)
        except StartError as exc:
            raise ReplayError(str(exc)) from exc
        self._check_model(executor)
        return executor

    def _check_model(self, executor: _Executor) -> None:
        """The same vocabulary is a must; equal numerics are not, but then other tokens are no wonder."""
        recorded, here = self._recorded, executor.description
        if recorded.model.vocab_size != here.model.vocab_size:
            executor.stop()
            raise ReplayError(
                f"--model: {here.model.name} has {here.model.vocab_size} token ids, the recorded "
                f"{recorded.model.name} had {recorded.model.vocab_size}"
            )
        other = other_numerics(recorded, here)
        self._exact = not other
        if other:
            print(
                f"{self._path}: the numerics fingerprint is not the recorded one ({other}): tokens may differ, and "
                "logprobs are not compared",
                file=sys.stderr,
            )

    def _run(self, plan: pb.StepPlan) -> None:
        if self._executor is None:
            raise ReplayError(f"the plan of step {plan.step_id} comes before any session")
        self._made[plan.step_id] = self._executor.run(plan)
        self.num_plans += 1

    def _compare(self, recorded: pb.StepResult) -> str:
        made = self._made.pop(recorded.step_id, None)
        if made is None:
            return f"step {recorded.step_id}: there is a result, but no plan of this session"
        self.num_results += 1
        self.num_tokens += len(made.token_ids)
        difference = first_difference(recorded, made, exact=self._exact)
        return f"step {recorded.step_id}: {difference}" if difference else ""
