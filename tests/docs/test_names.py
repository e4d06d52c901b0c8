"""One name, one class: a reader who meets a name in two rooms need not ask which one it is."""

from __future__ import annotations

import ast
from collections import defaultdict

import pytest

from tests.helpers.paths import PACKAGES, ROOT


def classes() -> dict[str, list[str]]:
    """Where the product's classes stand, by name; generated stubs are left out."""
    found = defaultdict(list)
    for package, folder in PACKAGES.items():
        for path in (folder / package).rglob("*.py"):
            if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                    if isinstance(node, ast.ClassDef):
                        found[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return found


@pytest.mark.slow
def test_no_two_classes_of_the_product_have_one_name() -> None:
    found = classes()
    assert len(found) > 1000
    assert {name: places for name, places in found.items() if len(places) > 1} == {}
