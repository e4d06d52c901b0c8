"""Repeats the calls of a plan log into the core, and compares the plans.

Needs no clock, executor or network: the log holds all that the core's decisions depend on (docs/replay.md).
"""

from __future__ import annotations

from pydantic import ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from cadenza.v1.planlog_pb2 import AdapterCommandsCall, PlanLogHeader, PlanLogRecord
from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan_wire.results import result_from_wire
from cadenza_common.plan_wire.writing import plan_to_wire
from cadenza_common.serving.plan_log import PlanLogError
from cadenza_common.settings.service import reason
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.adapters.events import AdapterCommands
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import FinishDetail
from scheduler_svc.engine.policies_from_options import policies_from_options
from scheduler_svc.executors.adapters import loaded_adapter
from scheduler_svc.recording.recorded import adapter_event, executor_spec, request_spec, session_end
from scheduler_svc.recording.records import adapter_commands, differences, error_text, recorded_options

_OLD_WEIGHTS = "tenant_weights"
"""An option of earlier versions, which had no set_weights records: NAME=WEIGHT,…"""
_NO_CALLS = ("executor_described", "step_failed")


class RecordedConfig(SchedulerConfig):
    """The options of a log, independent of the environment."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only the header's options."""
        return (init_settings,)


class CoreReplay:
    """A core that repeats the calls of a log."""

    def __init__(self, header: PlanLogHeader) -> None:
        """Create the core with the recorded options; raises PlanLogError if this version does not know them."""
        self._core = Scheduler(policies_from_options(_config(header)))
        self._core.set_weights(_weights(header))
        self._commands = AdapterCommands()
        """The commands of the last call."""
        self.num_calls = 0
        self.num_plans = 0
        self.num_requests = 0

    @property
    def num_tokens(self) -> int:
        """Output tokens so far."""
        return self._core.num_output_tokens

    def make(self, record: PlanLogRecord) -> list[str]:
        """Repeat the call of a record; returns the differences from the recorded outcome, one per line."""
        if record.WhichOneof("record") in _NO_CALLS:
            return []
        self.num_calls += 1
        plan, error = None, ""
        try:
            plan = self._call(record)
        except Exception as exc:
            error = error_text(exc)
        # As the engine does; these have no effect on plans.
        self._core.take_outputs()
        self._core.take_finished()
        if error != record.error:
            return [f"error: recorded {record.error or 'none'}, now {error or 'none'}"]
        if record.HasField("adapter_commands"):
            return self._compare_commands(record.adapter_commands)
        return self._compare(record, plan) if record.HasField("plan_step") else []

    def _compare_commands(self, recorded: AdapterCommandsCall) -> list[str]:
        made = adapter_commands(recorded.executor_id, self._commands).adapter_commands
        return list(differences(recorded, made))

    def _compare(self, record: PlanLogRecord, plan: StepPlan | None) -> list[str]:
        recorded = record.plan_step
        self.num_plans += plan is not None
        if plan is None or not recorded.HasField("plan"):
            same = plan is None and not recorded.HasField("plan")
            return [] if same else [f"plan: {'recorded only, now there is none' if plan is None else 'now only'}"]
        made = plan_to_wire(plan, recorded.plan.epoch)
        return list(differences(recorded.plan, made)) if made != recorded.plan else []

    def _call(self, record: PlanLogRecord) -> StepPlan | None:
        """Make one call; returns its plan, if any. Raises the core's errors."""
        core = self._core
        match record.WhichOneof("record"):
            case "plan_step":
                return core.plan_step(record.plan_step.executor_id, record.plan_step.now)
            case "apply_result":
                applied = record.apply_result
                core.apply_result(applied.executor_id, result_from_wire(applied.result), applied.now)
            case "add_request":
                core.add_request(request_spec(record.add_request.request), record.add_request.now)
                self.num_requests += 1
            case "abort":
                aborted = record.abort
                core.abort((aborted.tenant, aborted.request_id), FinishDetail(aborted.detail))
            case "stop_sample":
                stopped = record.stop_sample
                core.stop_sample((stopped.tenant, stopped.request_id), stopped.sample_index)
            case "set_weights":
                core.set_weights(record.set_weights.weights)
            case "drain":
                core.drain(record.drain.draining)
            case "flush_prefix_caches":
                core.flush_prefix_caches(record.flush_prefix_caches.most)
            case "add_executor":
                core.add_executor(record.add_executor.executor_id, executor_spec(record.add_executor.spec))
            case "session_opened":
                opened = record.session_opened
                core.session_opened(
                    opened.last_completed_step_id,
                    executor_id=opened.executor_id,
                    same_incarnation=opened.same_incarnation,
                    keeps_kv=opened.keeps_kv,
                    adapters=list(map(loaded_adapter, opened.adapters)),
                )
            case "adapter_event":
                core.adapter_event(adapter_event(record.adapter_event), record.adapter_event.executor_id)
            case "adapter_commands":
                self._commands = core.adapter_commands(record.adapter_commands.executor_id)
            case "executor_lost":
                lost = record.executor_lost
                core.executor_lost(lost.executor_id, lost.now, session_end(lost))
            case "give_up_executor":
                core.give_up_executor(record.give_up_executor.executor_id, record.give_up_executor.now)
            case "drain_executor":
                drained = record.drain_executor
                core.drain_executor(drained.executor_id, drained.draining, drained.now)
            case "remove_executor":
                core.remove_executor(record.remove_executor.executor_id, record.remove_executor.now)
        return None


def _config(header: PlanLogHeader) -> SchedulerConfig:
    try:
        options = {name: value for name, value in recorded_options(header).items() if name != _OLD_WEIGHTS}
        return RecordedConfig(**options)  # type: ignore[arg-type]  # texts, as on a command line
    except ValidationError as exc:
        problem = exc.errors()[0]
        name = ".".join(map(str, problem["loc"]))
        raise PlanLogError(
            f"recorded by Cadenza {header.cadenza_version}, whose option {name} is not read here: {reason(problem)}"
        ) from None


def _weights(header: PlanLogHeader) -> dict[str, float]:
    """The weights of a log of an earlier version; empty for others."""
    entries = filter(None, (recorded_options(header).get(_OLD_WEIGHTS) or "").split(","))
    return {name.strip(): float(weight) for name, _, weight in (entry.partition("=") for entry in entries)}
