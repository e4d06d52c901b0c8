"""The same mutants in a tree whose product has got other names, comments and line breaks."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.mutants.draw import Mutant, Span, described, mutated_text

_Place = tuple[str, int]
"""The function around a position, and which of its positions this is."""


def carry_mutants(mutants: list[Mutant], old: Path, new: Path) -> tuple[list[Mutant], list[Mutant]]:
    """The mutants as they are in the new tree, and those that have no place there: both trees hold the modules."""
    carried, lost = [], []
    for mutant in mutants:
        found = _carried(mutant, old, new) if (new / mutant.module).exists() else None
        if found is None:
            lost.append(mutant)
        else:
            carried.append(found)
    return carried, lost


def _carried(mutant: Mutant, old: Path, new: Path) -> Mutant | None:
    operator = f"core/{mutant.operator}"
    before, after = _positions(old / mutant.module, operator), _positions(new / mutant.module, operator)
    occurrence = mutant.occurrence
    if len(before) != len(after):
        place = _places(old / mutant.module, before)[occurrence]
        places = _places(new / mutant.module, after)
        if places.count(place) != 1 or _count(places, place[0]) != _count(
            _places(old / mutant.module, before), place[0]
        ):
            return None
        occurrence = places.index(place)
    text = mutated_text(new / mutant.module, operator, occurrence)
    if text is None:
        return None
    return described(new, mutant.number, mutant.module, after[occurrence], operator, occurrence, text)


def _positions(path: Path, operator: str) -> list[Span]:
    """Where the operator can change the module, as cosmic-ray counts."""
    from cosmic_ray.ast import ast_nodes, get_ast_from_path
    from cosmic_ray.plugins import get_operator

    changes = get_operator(operator)()
    spans = [span for node in ast_nodes(get_ast_from_path(path)) for span in changes.mutation_positions(node)]
    return [(tuple(start), tuple(end)) for start, end in spans]


def _places(path: Path, positions: list[Span]) -> list[_Place]:
    functions = [
        (node.lineno, node.end_lineno or node.lineno, node.name)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    places: list[_Place] = []
    for (line, _), _ in positions:
        around = max((each for each in functions if each[0] <= line <= each[1]), default=(0, 0, ""))
        places.append((around[2], _count(places, around[2])))
    return places


def _count(places: list[_Place], function: str) -> int:
    return sum(name == function for name, _ in places)
