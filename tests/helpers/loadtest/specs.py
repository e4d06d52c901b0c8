"""Specs of workloads from their fields."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from cadenza_common.settings.names import flag
from cadenza_loadtest.requests import LoadTestError
from cadenza_loadtest.workloads.spec import WorkloadSpec


def make_spec(**values: Any) -> WorkloadSpec:
    """A spec from its fields; raises a LoadTestError that names the invalid option."""
    try:
        return WorkloadSpec.model_validate(values)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(flag(str(part)) for part in problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] != "value_error":
            message += f", not {problem['input']!r:.60}"
        raise LoadTestError(f"{where}: {message}" if where else message) from None
