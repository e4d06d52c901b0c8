"""Builds the simulated system from the options of the services and of `cadenza simulate`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from cadenza_common.settings.service import reason
from cadenza_common.spelling import suggestion
from cadenza_launcher.services.options import route_options
from cadenza_loadtest.requests import LoadTestError
from cadenza_loadtest.results.results import LoadTestFile
from cadenza_simulator.campaign import Simulated
from cadenza_simulator.executor_profiles import ExecutorProfile, read_profile
from cadenza_simulator.placement import PlacementName, read_placement
from cadenza_simulator.published import PUBLISHED
from scheduler_svc.config import SchedulerConfig

DEFAULT_EXECUTOR = "a100-40gb-opt-13b"
EXECUTOR_OPTIONS = (
    "block_size", "num_gpu_blocks", "num_cpu_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len",
    "max_inflight_plans",
)  # fmt: skip
"""The executor options that set its limits."""
_NOT_SIMULATED = (
    "executor", "listen", "config", "placement", "tokenizer", "skip_tokenizer_init", "record", "log_level",
)  # fmt: skip
SCHEDULER_OPTIONS = tuple(name for name in SchedulerConfig.model_fields if name not in _NOT_SIMULATED)
"""The scheduler options that its core uses."""
_MOST_EXECUTORS = 1024


def make_simulated(
    executors: Sequence[str],
    counts: str | None,
    options: Mapping[str, Any],
    *,
    config: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
    before: Simulated | None = None,
    placement: str | None = None,
) -> Simulated:
    """The simulated system of `--executor` (names and files), `--executors`, `--placement` and the services' options.

    The options may also come from the environment and from the file `config`, as for the services themselves. `before`:
    the system of an earlier simulation that is run again; options given here override it, and the environment is
    ignored, because it may have changed. Raises OptionError and LoadTestError, which name the wrong option.
    """
    environment = {} if before is not None else environment
    settings = route_options("simulated", options, config=config, environment=environment).settings
    given = {name: setting.value for name, setting in settings.items()}
    limits = {name: given[name] for name in EXECUTOR_OPTIONS if name in given}
    chosen = {name: given[name] for name in SCHEDULER_OPTIONS if name in given}
    base = before or Simulated((find_profile(DEFAULT_EXECUTOR),), scheduler_config({}))
    profiles = [find_profile(text) for text in executors] or base.fleet
    return Simulated(
        tuple(profile.changed(limits) for profile in profiles),
        scheduler_config(base.config.model_dump(exclude_defaults=True) | chosen),
        base.counts if counts is None else read_counts(counts),
        base.placement if placement is None else read_placement(placement),
    )


def simulated_of(file: LoadTestFile, path: str) -> Simulated:
    """The system that was simulated for the result at `path`; raises LoadTestError if the result does not state it."""
    try:
        facts = _Facts.model_validate(file.server or {})
        return Simulated(facts.executors, scheduler_config(facts.options), facts.times, facts.placement)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(map(str, ("server", *problem["loc"])))
        raise LoadTestError(f"--rerun {path}: {where}: {reason(problem)}") from None
    except LoadTestError as error:
        raise LoadTestError(f"--rerun {path}: {error}") from None


class _Facts(BaseModel):
    """`Simulated.facts`, read back."""

    executors: tuple[ExecutorProfile, ...] = Field(min_length=1)
    times: tuple[Annotated[int, Field(ge=1, le=_MOST_EXECUTORS)], ...] = Field(min_length=1)
    options: dict[str, str]
    placement: PlacementName | None = None


def scheduler_config(options: Mapping[str, Any]) -> SchedulerConfig:
    """The scheduler's config with these options and defaults for all others; ignores the environment. Raises
    LoadTestError."""
    fields = SchedulerConfig.model_fields.items()
    defaults = {name: field.get_default(call_default_factory=True) for name, field in fields}
    try:
        return SchedulerConfig(**{**defaults, **options})
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise LoadTestError(f"option {'.'.join(map(str, problem['loc']))}: {reason(problem)}") from None


def find_profile(text: str) -> ExecutorProfile:
    """A profile by its name or from a file; raises LoadTestError."""
    if text in PUBLISHED:
        return PUBLISHED[text]
    if os.path.exists(text) or text.endswith(".json"):
        return read_profile(text)
    hint = suggestion(text, set(PUBLISHED)) or f"; there are {', '.join(PUBLISHED)}"
    raise LoadTestError(f"--executor {text}: neither a file nor a known profile{hint}")


def read_counts(text: str) -> tuple[int, ...]:
    """Parse numbers such as `1,2,4`; raises LoadTestError."""
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = (0,)
    if not all(1 <= count <= _MOST_EXECUTORS for count in counts) or len(set(counts)) != len(counts):
        raise LoadTestError(
            f"--executors {text}: must be different numbers from 1 to {_MOST_EXECUTORS} separated by commas, as 1,2,4"
        )
    return counts
