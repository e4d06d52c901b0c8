"""The --help text of a service's options: grouped under headings, each with its value, meaning and default."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from cadenza_common.settings.names import flag

GROUPS = (
    "Basics",
    "Model",
    "Memory",
    "Batching",
    "Speculation",
    "Adapters",
    "Ranks",
    "Ray",
    "Scheduling",
    "HTTP",
    "Several models",
    "Security",
    "Logging",
    "Simulation",
)
"""Headings of --help and of docs/options.md, in this order."""
COMMON = (
    "http",
    "executors",
    "device",
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "gpu_memory_utilization",
    "log_requests",
)
"""Options that `cadenza up --help` shows first, beside its own: model, host, port and config."""
_OTHER = "Scheduling"


def about(group: str, unit: str = "", values: str = "") -> dict[str, Any]:
    """A field's json_schema_extra: what help and docs/options.md need besides its description.

    `unit`: what a number counts; `values`: the allowed values of a validator, if the field's type does not name them.
    """
    return {"group": group, "unit": unit, "values": values}


def group_of(field: FieldInfo) -> str:
    """The heading of an option."""
    return _extra(field, "group") or _OTHER


def unit_of(field: FieldInfo) -> str:
    """What a number counts; empty for other options."""
    return _extra(field, "unit")


def values_of(field: FieldInfo) -> str:
    """Choices or range, as text; empty if any text is allowed."""
    if field.annotation is bool:
        return "on, off"
    signs = {"ge": "{} or more", "gt": "over {}", "le": "at most {}", "lt": "under {}"}
    limits = [
        text.format(getattr(limit, sign))
        for limit in field.metadata
        for sign, text in signs.items()
        if getattr(limit, sign, None) is not None
    ]
    return _extra(field, "values") or ", ".join(choices_of(field.annotation) or limits)


def choices_of(annotation: Any) -> list[str]:
    """The values of a closed set; empty for other types."""
    return [str(value) for value in get_args(annotation)] if get_origin(annotation) is Literal else []


def value_name(annotation: Any) -> str:
    """The placeholder of the value in help: the choices or the type; empty for flags."""
    kinds = [kind for kind in (get_args(annotation) or (annotation,)) if kind is not type(None)]
    names = {bool: "", int: "INTEGER", float: "NUMBER"}
    return "|".join(choices_of(annotation)) or names.get(kinds[0], "TEXT")


def default_text(field: FieldInfo) -> str:
    """The default as text; empty if the description states what happens without a value."""
    if field.is_required():
        return "required"
    default = field.get_default()
    if default is None:
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    return ", ".join(default) if isinstance(default, list) else str(default)


def described(field: FieldInfo) -> str:
    """Description, values that the type does not name, and default in one text."""
    default, values = default_text(field), _extra(field, "values")
    values_text = f" Values: {values}." if values else ""
    end = "" if not default else " [required]" if field.is_required() else f" [default: {default}]"
    return f"{field.description}{values_text}{end}"


def help_text(usage: str, purpose: str, fields: Mapping[str, FieldInfo], end: str, columns: int) -> str:
    """The whole text of --help, at most `columns` wide."""
    width = max(50, min(columns, 100))
    sections: dict[str, list[str]] = {group: [] for group in GROUPS}
    for name, field in fields.items():
        value = value_name(field.annotation)
        shown = f"{flag(name)} {value}" if value else f"{flag(name)}, {flag('no-' + name)}"
        meaning = textwrap.indent(textwrap.fill(described(field), width - 8, break_on_hyphens=False), " " * 8)
        sections.setdefault(group_of(field), []).append(f"  {shown}\n{meaning}")
    blocks = [f"usage: {usage}", purpose]
    blocks += ["\n".join([f"{group}:", *entries]) for group, entries in sections.items() if entries]
    return "\n\n".join([*blocks, textwrap.fill(end, width, break_on_hyphens=False)])


def _extra(field: FieldInfo, name: str) -> str:
    extra = field.json_schema_extra
    return str(extra.get(name, "")) if isinstance(extra, dict) else ""
