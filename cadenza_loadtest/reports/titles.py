"""What a report calls its results: titles, sections and points in a reader's words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from cadenza_loadtest.reports.summary import swept_text
from cadenza_loadtest.results.comparison import distinct_labels
from cadenza_loadtest.results.results import LoadTestFile

_UNITS = {"request_rate": ("at", "request/s", "requests/s"), "concurrency": ("with", "user", "users"),
          "executors": ("on", "executor", "executors")}  # fmt: skip
"""Preposition, singular and plural of the settings that a title counts."""
_MOST_LISTED = 6
"""Most values that a title lists; of more, it states the range."""
Swept = Mapping[str, float | str]


def page_title(files: Sequence[LoadTestFile]) -> str:
    """A title such as "Load test of cadenza-demo at 4 requests/s, 23 November 2026"."""
    if not files:
        return "Load test"
    if len(files) == 1:
        (file,) = files
        label = _own_label(file)
        title = f"{_subject(file)}{_load(file)}, {_date(file)}"
        return f"{label}: {title[0].lower()}{title[1:]}" if label else title
    names = section_names(files)
    return f"Comparison of {_listed(names)}, {_date(max(files, key=lambda file: file.created))}"


def section_names(files: Sequence[LoadTestFile]) -> list[str]:
    """A distinct name for each file: the label that its user gave, or else the model."""
    return distinct_labels([_own_label(file) or _model(file) for file in files])


def section_line(file: LoadTestFile) -> str:
    """How and when the results were obtained, as a sentence."""
    at = f"{file.created.day} {file.created:%B %Y, %H:%M} UTC"
    if file.source == "simulate":
        return f"Simulated in virtual time on {at}."
    target = (file.server or {}).get("target")
    return f"Measured on {at}" + (f", at {target}." if target else ".")


def point_name(swept: Swept) -> str:
    """The swept values in words, such as "4 requests/s, input-len 128"; empty if nothing was swept."""
    return ", ".join(
        _counted([value], name) if name in _UNITS else swept_text({name: value}) for name, value in swept.items()
    )


def _own_label(file: LoadTestFile) -> str:
    """The label that the user gave; empty if it is the default: an address, a URL or a model."""
    server, reached = file.server or {}, file.reached
    known = {"", str(server.get("model")), str(server.get("target")), str(file.settings.get("url"))}
    if reached is not None:
        known |= {str(reached.model), str(reached.target)}
    return "" if file.label in known else file.label


def _model(file: LoadTestFile) -> str:
    """The model's name, without its folder or organisation; else the label."""
    model = str((file.server or {}).get("model") or (file.reached and file.reached.model) or file.label)
    return model.rstrip("/").rpartition("/")[2] or "a server"


def _subject(file: LoadTestFile) -> str:
    model = _model(file)
    of = "" if model == _own_label(file) else f" of {model}"
    if file.max_rate is not None or file.settings.get("find_max_rate"):
        return ("Simulated search" if file.source == "simulate" else "Search") + f" for the highest request rate{of}"
    return ("Simulated load test" if file.source == "simulate" else "Load test") + of


def _load(file: LoadTestFile) -> str:
    """The load, such as " at 4 requests/s", with a space before it; empty if it is not known."""
    swept: dict[str, list[float | str]] = {}
    for point in file.points:
        for name, value in point.swept.items():
            if value not in swept.setdefault(name, []):
                swept[name].append(value)
    searched = file.max_rate is not None or bool(file.settings.get("find_max_rate"))
    if searched:
        swept.pop("request_rate", None)
    parts = [f"{_UNITS[name][0]} {_counted(values, name)}" for name, values in swept.items() if name in _UNITS]
    if not searched and not {"request_rate", "concurrency"} & swept.keys():
        parts.append(_fixed_load(file.settings))
    others = [name.replace("_", "-") for name in swept if name not in _UNITS]
    if others:
        parts.append(f"by {_listed(others)}")
    return "".join(f" {part}" for part in parts if part)


def _fixed_load(settings: Mapping[str, Any]) -> str:
    if settings.get("concurrency"):
        return f"with {_counted([settings['concurrency']], 'concurrency')}"
    if settings.get("arrivals") == "trace":
        return "at the times of a trace"
    rate = settings.get("request_rate")
    if rate is None:
        return ""
    return "with all requests at once" if math.isinf(float(rate)) else f"at {_counted([rate], 'request_rate')}"


def _counted(values: Sequence[float | str], name: str) -> str:
    """Values with their unit, such as "2, 4 and 8 requests/s"."""
    numbers = sorted(float(value) for value in values)
    shown = [f"{number:g}" for number in numbers]
    if len(shown) > _MOST_LISTED:
        return f"{shown[0]} to {shown[-1]} {_UNITS[name][2]}"
    return f"{_listed(shown)} {_UNITS[name][1 if numbers == [1.0] else 2]}"


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _date(file: LoadTestFile) -> str:
    return f"{file.created.day} {file.created:%B %Y}"
