"""JSON schemas that packages ship, and which of them are honoured."""

from __future__ import annotations

import importlib.util
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGES = ("check_jsonschema", "kubernetes_validate", "jsonschema_specifications")
"""Installed ones are measured: pip install check-jsonschema kubernetes-validate jsonschema-specifications."""
_QUOTED = re.compile(r"\"[^\"]*\"|'[^']*'|`[^`]*`|\d+|#/\S+|https?://\S+")


@dataclass(frozen=True, slots=True)
class Shares:
    """How many schemas of one source there are, are honoured, and why the others are refused."""

    num_schemas: int
    num_honoured: int
    reasons: dict[str, int]
    compile_ms: list[float]
    """Of each schema that is honoured."""


def found_schemas(folders: Sequence[str]) -> Iterator[tuple[str, list[Path]]]:
    """(name, files) of each package that is installed, and of each folder."""
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        for place in (spec.submodule_search_locations or []) if spec is not None else []:
            yield package, _schemas_in(Path(place))
    for folder in folders:
        yield Path(folder).name, _schemas_in(Path(folder))


def shares_of(files: Sequence[Path], table: Any) -> Shares:
    """Compile each file's schema."""
    import time

    from cadenza.grammar.compiling import MAX_CHARS, GrammarError, new_matcher
    from cadenza.grammar.spec import GrammarSpec

    reasons: Counter[str] = Counter()
    taken: list[float] = []
    for path in files:
        text = path.read_text(encoding="utf-8")
        if len(text) > MAX_CHARS:
            text = json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)
        if len(text) > MAX_CHARS:
            reasons[f"over {MAX_CHARS} characters"] += 1
            continue
        began = time.perf_counter()
        try:
            matcher = new_matcher(GrammarSpec("json_schema", text), table)
            matcher.compute_bitmask()
            if matcher.is_error():
                raise GrammarError(matcher.get_error())
        except GrammarError as error:
            reasons[_kind(str(error))] += 1
        else:
            taken.append((time.perf_counter() - began) * 1e3)
    return Shares(len(files), len(taken), dict(reasons.most_common()), taken)


def _schemas_in(folder: Path) -> list[Path]:
    """Files that hold a JSON object with a schema's keys."""
    return [path for path in sorted(folder.rglob("*.json")) if _is_schema(path)]


def _is_schema(path: Path) -> bool:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    keys = {"$schema", "type", "properties", "anyOf", "oneOf", "allOf", "$ref", "definitions", "$defs"}
    return isinstance(content, dict) and not keys.isdisjoint(content)


def _kind(message: str) -> str:
    """A refusal without its particulars, so that those of one kind count together."""
    return _QUOTED.sub("…", message)[:80]
