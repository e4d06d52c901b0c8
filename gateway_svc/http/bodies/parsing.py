"""A body as a JSON object."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from gateway_svc.http.errors import bad_request

T = TypeVar("T")
_MAX_SHOWN = 16


def read_object(read: Callable[[Mapping[str, Any]], T], raw: bytes | bytearray) -> T:
    """What `read` makes of a body; raises ApiError, also for one that is no JSON object."""
    value = _parse(raw)
    if not isinstance(value, dict):
        raise bad_request("the body must be a JSON object")
    return read(value)


def _parse(raw: bytes | bytearray) -> Any:
    try:
        return json.loads(raw, parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise bad_request("the body is no UTF-8") from None
    except RecursionError:
        raise bad_request("the body is nested too deeply") from None
    except json.JSONDecodeError as error:
        if not error.doc.strip():
            raise bad_request("the body is empty: it must be a JSON object") from None
        found = error.doc[error.pos : error.pos + _MAX_SHOWN]
        place = ascii(found) if found else "its end"
        raise bad_request(f"the body is no JSON: {error}, at {place}") from None
    except ValueError as error:  # as an integer of over 4,300 digits
        raise bad_request(f"the body is no JSON: {error}"[:300]) from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
