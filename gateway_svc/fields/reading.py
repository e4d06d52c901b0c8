"""A body's fields by the table of its API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cadenza_common.spelling import suggestion
from gateway_svc.fields.field import MAX_NAME, OF_INTEGERS, Field, Use, as_integers, check_kind, shown
from gateway_svc.fields.tables import REQUIRED
from gateway_svc.http.errors import ApiError, bad_request


def read_fields(table: Mapping[str, Field], body: Mapping[str, Any]) -> dict[str, Any]:
    """The honoured fields of a request that are given; null is as if absent, whatever the name.

    Raises ApiError for unknown and refused fields, and for values of a wrong type.
    """
    values: dict[str, Any] = {}
    for name, value in body.items():
        field = table.get(name)
        if field is None and value is None:
            continue
        if field is None:
            raise _unknown_field(table, name)
        if value is None:
            continue
        if field.use is Use.REFUSED:
            if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in field.neutral):
                raise bad_request(f"{name} is not supported: {field.ours}", name)
            continue
        check_kind(name, field.kind, value)
        if field.use is Use.HONOURED:
            values[name] = as_integers(value) if field.kind in OF_INTEGERS else value
    return values


def _unknown_field(table: Mapping[str, Field], name: str) -> ApiError:
    """The error of a field that is in no table, with the path that such a body is for, or the name that is meant."""
    path = next((path for path, needed in REQUIRED.items() if name == needed[0]), None)
    if path is not None:
        return bad_request(f"{shown(name)}: there is no such field; it is for {path}", name)
    known = [each.name for each in table.values() if each.use is not Use.REFUSED]
    hint = suggestion(name[:MAX_NAME], known)
    return bad_request(f"{shown(name)}: there is no such field{hint}", name[:MAX_NAME])
