"""JSON schemas that packages ship, and which of them are honoured."""

from __future__ import annotations

import importlib.metadata
import json
import re
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PYTHON_PACKAGES = ("check-jsonschema", "kubernetes-validate", "jsonschema-specifications")
NPM_PACKAGES = ("json-schema-test-suite", "@json-schema-org/tests", "json-schema-test-suite-data")
_KEYS = {"$schema", "type", "properties", "anyOf", "oneOf", "allOf", "$ref", "definitions", "$defs"}
_QUOTED = re.compile(r"\"[^\"]*\"|'[^']*'|`[^`]*`|\d+|#/\S+|https?://\S+|\{.*")


@dataclass(frozen=True, slots=True)
class Schema:
    """A schema, and where it is from."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Source:
    """The schemas of one package or folder."""

    name: str
    version: str
    """Empty for a folder."""
    num_files: int
    schemas: list[Schema]


@dataclass(frozen=True, slots=True)
class Shares:
    """Which schemas of one source are honoured, and why the others are refused."""

    honoured: list[Schema]
    reasons: dict[str, int]
    compile_ms: list[float]
    """Of each schema that is honoured."""


def found_sources(packages: Sequence[str], folders: Sequence[str]) -> Iterator[Source]:
    """The packages that are there, in this environment and in these, and folders.

    packages: site-packages of other environments, and node_modules: the schemas need not be installed where Cadenza is.
    """
    for place in [sysconfig.get_paths()["purelib"], *packages]:
        for name in PYTHON_PACKAGES:
            for found in importlib.metadata.distributions(name=name, path=[place]):
                files = [Path(str(found.locate_file(file))) for file in found.files or () if file.suffix == ".json"]
                yield _source(name, found.version, files)
        for name in NPM_PACKAGES:
            manifest = Path(place) / name / "package.json"
            if manifest.is_file():
                version = str(json.loads(manifest.read_text(encoding="utf-8"))["version"])
                yield _source(name, version, sorted(manifest.parent.rglob("*.json")))
    for folder in folders:
        yield _source(Path(folder).name, "", sorted(Path(folder).rglob("*.json")))


def shares_of(schemas: Sequence[Schema], table: Any) -> Shares:
    """Compile each schema, as the door of the scheduler does."""
    from cadenza_common.grammar.compiling import MAX_CHARS, GrammarError, new_matcher
    from cadenza_common.grammar.spec import GrammarSpec

    reasons: Counter[str] = Counter()
    honoured, taken = list[Schema](), list[float]()
    for schema in schemas:
        if len(schema.text) > MAX_CHARS:
            reasons[f"over {MAX_CHARS} characters"] += 1
            continue
        began = time.perf_counter()
        try:
            matcher = new_matcher(GrammarSpec("json_schema", schema.text), table)
            matcher.compute_bitmask()
            if matcher.is_error():
                raise GrammarError(matcher.get_error())
        except GrammarError as error:
            reasons[kind_of(str(error))] += 1
        else:
            taken.append((time.perf_counter() - began) * 1e3)
            honoured.append(schema)
    return Shares(honoured, dict(reasons.most_common()), taken)


def kind_of(message: str) -> str:
    """A refusal without its particulars, so that those of one kind count together."""
    return _QUOTED.sub("…", message)[:80]


def evenly(schemas: Sequence[Schema], most: int) -> list[Schema]:
    """So many of them, from all parts."""
    return [schemas[index * len(schemas) // most] for index in range(most)] if most < len(schemas) else list(schemas)


def _source(name: str, version: str, files: Sequence[Path]) -> Source:
    found = [schema for file in files for schema in _schemas_in(file)]
    return Source(name, version, len(files), found)


def _schemas_in(file: Path) -> Iterator[Schema]:
    """The schema that a file is, or those of a file of JSON-Schema-Test-Suite's tests."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    if isinstance(content, dict) and not _KEYS.isdisjoint(content):
        yield Schema(file.name, _compact(content))
    elif isinstance(content, list):
        for index, group in enumerate(content):
            if isinstance(group, dict) and "tests" in group and isinstance(group.get("schema"), dict):
                yield Schema(f"{file.name}[{index}]", _compact(group["schema"]))


def _compact(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False)
