"""Columns in JSON: a list for each, with times rounded to a microsecond and NaN as null; read back as arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_args, get_type_hints

import numpy as np
from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from cadenza_loadtest.measures.columns import RequestColumns, StepColumns

_MAY_LACK = {"adapter"}
"""Columns that files from before they were recorded do not have."""
DECIMALS = 6
"""Decimals of times in seconds: microseconds."""


@dataclass(frozen=True, slots=True)
class ColumnLists:
    """Marks a field whose dataclass of arrays is an object of lists in JSON.

    Each list is made, written and dropped before the next, so that a million rows never become objects all at once.
    """

    check: Callable[[Any], None]
    """Raises ValueError for inconsistent columns."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        hints = get_type_hints(source)
        columns = {
            each.name: core_schema.typed_dict_field(_column(hints[each.name]), required=each.name not in _MAY_LACK)
            for each in fields(source)
        }

        def build(values: dict[str, Any]) -> Any:
            made = source(**values)
            self.check(made)
            return made

        def take_apart(made: Any) -> dict[str, Any]:
            return {each.name: getattr(made, each.name) for each in fields(made)}

        lists = core_schema.typed_dict_schema(columns, extra_behavior="forbid")
        return core_schema.json_or_python_schema(
            json_schema=core_schema.no_info_after_validator_function(build, lists),
            python_schema=core_schema.union_schema(
                [core_schema.is_instance_schema(source), core_schema.no_info_after_validator_function(build, lists)]
            ),
            serialization=core_schema.plain_serializer_function_ser_schema(take_apart, return_schema=lists),
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(schema)


def check_requests(columns: RequestColumns) -> None:
    """Raises ValueError unless all columns are as long as the index and `gap_s` has as many gaps as the rows state."""
    _same_lengths(columns, "index", {"gap_s"})
    if (columns.num_gaps < 0).any() or int(columns.num_gaps.sum()) != len(columns.gap_s):
        raise ValueError(f"gap_s has {len(columns.gap_s)} values, num_gaps sums to {int(columns.num_gaps.sum())}")


def check_steps(columns: StepColumns) -> None:
    """Raises ValueError unless all columns are equally long."""
    _same_lengths(columns, "planned_s", {"num_dropped"})


RequestLists = Annotated[RequestColumns, ColumnLists(check_requests)]
StepLists = Annotated[StepColumns, ColumnLists(check_steps)]


def _column(hint: Any) -> CoreSchema:
    if hint is int:
        return core_schema.int_schema(ge=0)
    # NDArray[T] is ndarray[..., dtype[T]] before numpy 2.5, and an alias with the argument T since.
    inner = get_args(hint)[-1]
    kind = np.dtype(*(get_args(inner) or (inner,)))
    items: CoreSchema
    if kind.kind == "f":
        items = core_schema.nullable_schema(core_schema.float_schema(allow_inf_nan=False))
    elif kind.kind == "i":
        items = core_schema.int_schema(ge=-(2**63), lt=2**63)
    else:
        items = core_schema.str_schema()

    def to_array(values: list[Any]) -> Any:
        return np.array(values, kind)

    def to_list(values: Any) -> Any:
        if kind.kind != "f":
            return values.tolist()
        # The serializer writes NaN as null; it would do so with infinity, too, but no time is infinite.
        return np.round(values.astype(np.float64), DECIMALS).tolist()

    return core_schema.no_info_after_validator_function(
        to_array,
        core_schema.list_schema(items),
        serialization=core_schema.plain_serializer_function_ser_schema(to_list),
    )


def _same_lengths(columns: Any, measure: str, others: set[str]) -> None:
    wanted = len(getattr(columns, measure))
    for each in fields(columns):
        if each.name not in others and len(getattr(columns, each.name)) != wanted:
            raise ValueError(f"{each.name} has {len(getattr(columns, each.name))} values, {measure} has {wanted}")
