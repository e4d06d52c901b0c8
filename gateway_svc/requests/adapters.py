"""Bodies of /v1/load_lora_adapter and /v1/unload_lora_adapter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway_svc.fields.field import read_fields
from gateway_svc.fields.sampling import require, utf8
from gateway_svc.fields.tables import LOAD_ADAPTER, UNLOAD_ADAPTER


def read_load(body: Mapping[str, Any]) -> tuple[str, str]:
    """The name that an adapter is to have, and its folder; raises ApiError."""
    values = read_fields(LOAD_ADAPTER, body)
    name = utf8(require(values, "lora_name"), "lora_name")
    return name, utf8(require(values, "lora_path"), "lora_path")


def read_unload(body: Mapping[str, Any]) -> str:
    """The name of the adapter that is to go; raises ApiError."""
    return utf8(require(read_fields(UNLOAD_ADAPTER, body), "lora_name"), "lora_name")
