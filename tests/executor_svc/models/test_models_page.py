"""docs/models.md lists what the product reads and refuses."""

from __future__ import annotations

import json
import re

import pytest

from executor_svc.models.base import ModelConfigError
from executor_svc.models.config.rope_fields import ROPE_TYPES
from executor_svc.models.gguf.config_content import _ARCHITECTURES
from executor_svc.models.registry import ARCHITECTURES
from tests.checkpoints import FAMILIES, MIXTURES, NEWER, RECURRENT
from tests.executor_svc.models.model_configs import NAMES, SIZES, WRAPPED
from tests.helpers.paths import ROOT

MODELS_PAGE = ROOT / "docs" / "models.md"


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the table under a heading of docs/models.md, without its head."""
    section = MODELS_PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


HOW = ("native", "through transformers", "refused")


def test_page_lists_the_architectures() -> None:
    found = {how: [row for row in rows("Architectures") if row[2] == how] for how in HOW}
    assert rows("Architectures") == [row for how in HOW for row in found[how]]
    assert [row[0].strip("`") for row in found["native"]] == sorted(ARCHITECTURES)
    assert not {row[0].strip("`") for how in HOW[1:] for row in found[how]} & set(ARCHITECTURES)
    assert {row[3] for row in rows("Architectures")} == {"own", "by transformers", "no"}
    files = {row[4].strip("`") for row in found["native"]} - {"no"}
    assert {name.strip("`") for each in files for name in each.split(", ")} == set(_ARCHITECTURES)
    assert set(NAMES) == {*FAMILIES, *NEWER, *WRAPPED, *MIXTURES, *RECURRENT, "mimo"}, (
        "transformers has no code for MiMo: tests make its checkpoints from Qwen2's"
    )
    assert set(NAMES.values()) == set(ARCHITECTURES)


def test_page_lists_the_rope_types() -> None:
    assert [row[0].strip("`") for row in rows("Rotary embeddings")] == list(ROPE_TYPES)


@pytest.mark.parametrize(("architecture", "field", "message"), rows("Refused"))
def test_page_lists_what_is_refused(architecture: str, field: str, message: str) -> None:
    name, value = field.strip("`").split(": ", 1)
    with pytest.raises(ModelConfigError, match=re.escape(message.strip("`"))):
        ARCHITECTURES[architecture.strip("`")]({**SIZES, name: json.loads(value)})
