"""What runs in `make test`, and what in `make test-long` alone."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings


def short_and_long(values: Iterable[Any], short: Iterable[Any]) -> list[Any]:
    """Return the values for `pytest.mark.parametrize`, those that are not in `short` marked long.

    Tuples are values of several arguments. Each of `short` must be among the values, or AssertionError is raised.
    """
    values, left = list(values), list(short)
    found = []
    for value in values:
        arguments = value if isinstance(value, tuple) else (value,)
        is_short = value in left
        if is_short:
            left.remove(value)
        found.append(pytest.param(*arguments, marks=() if is_short else pytest.mark.long))
    assert not left, f"no such values: {left}"
    return found


LEAST_EXAMPLES = 10


def draw_fewer(items: Iterable[pytest.Item], *, all_of_them: bool) -> None:
    """Mark each test of hypothesis `examples`, and let it draw a third of its examples, but ten at least.

    The examples are the same in every run. all_of_them: it draws all, as in `make test-long`.
    """
    seen = set()
    for item in items:
        function = getattr(item, "obj", None)
        if not getattr(function, "is_hypothesis_test", False):
            continue
        item.add_marker("examples")
        own: settings | None = getattr(function, "_hypothesis_internal_use_settings", None)  # none: a state machine
        if own is not None and not all_of_them and function not in seen:
            seen.add(function)
            fewer = min(own.max_examples, max(LEAST_EXAMPLES, own.max_examples // 3))
            function._hypothesis_internal_use_settings = settings(own, max_examples=fewer)


def sample(items: Iterable[pytest.Item]) -> None:
    """Mark long all but n cases of each function marked `sampled(n)`: those whose names have the smallest hashes.

    So the cases are the same on each machine, and any of a product's parameters may be among them.
    """
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("long"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_function in cases.values():
        of_function.sort(key=lambda item: hashlib.sha256(item.name.encode()).digest())
        mark = of_function[0].get_closest_marker("sampled")
        assert mark is not None
        for item in of_function[mark.args[0] :]:
            item.add_marker("long")
