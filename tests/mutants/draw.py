"""Draws mutants: a sample of the changes that cosmic-ray's operators would make, at most one for each place."""

from __future__ import annotations

import ast
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

PACKAGES = ("scheduler_svc/core", "executor_svc/batch", "executor_svc/sampling")

_LOGGERS = {"_log", "log", "logger"}
_TYPING_DECORATORS = {"abstractmethod", "final", "overload", "override", "runtime_checkable"}
_SAME_MEANING = ("_Is_Eq", "_Eq_Is", "_IsNot_NotEq", "_NotEq_IsNot")
"""Changes that nothing can see where `None`, enums or small numbers are compared: most of their places here."""

Position = tuple[int, int]
"""Line (from 1) and column (from 0)."""
Span = tuple[Position, Position]


@dataclass(frozen=True)
class Mutant:
    """One change of one module."""

    number: int
    module: str
    """Path from the tree's root."""
    line: int
    """Where the change begins, from 1."""
    operator: str
    occurrence: int
    """Cosmic-ray's count of the places of this operator in this module, from 0."""
    statement: tuple[int, int]
    """First and last line of the statement that is changed; of a compound one its head alone."""
    scope: tuple[int, int]
    """First and last line of the function, class or module around it; of a changed head, what it heads."""
    first: int
    """The first line that is replaced."""
    old: tuple[str, ...]
    """The lines that are replaced, without line ends."""
    new: tuple[str, ...]
    """The lines in their place: the mutated text."""

    @property
    def package(self) -> str:
        return next(package for package in PACKAGES if self.module.startswith(f"{package}/"))

    def applied_to(self, text: str) -> str:
        """The module's text with the change; raises ValueError if it is not the text the mutant was drawn from."""
        lines = text.split("\n")
        begin, end = self.first - 1, self.first - 1 + len(self.old)
        if tuple(lines[begin:end]) != self.old:
            raise ValueError(f"{self.module}:{self.first} is not what mutant {self.number} was drawn from")
        return "\n".join([*lines[:begin], *self.new, *lines[end:]])


def read_mutants(path: Path) -> list[Mutant]:
    """The mutants of a JSON lines file."""
    pairs = ("statement", "scope", "old", "new")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [Mutant(**{**row, **{name: tuple(row[name]) for name in pairs}}) for row in rows]


def write_mutants(mutants: list[Mutant], path: Path) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(asdict(mutant)) + "\n" for mutant in mutants), encoding="utf-8")


def draw_mutants(tree: Path, seed: int, number: int) -> list[Mutant]:
    """That many mutants, no two of them at one place, in the order of their places."""
    rng = Random(seed)
    places = _places(tree)
    order = sorted(places)
    rng.shuffle(order)
    drawn: list[tuple[str, Span, str, int, str]] = []
    for module, span in order:
        operator, occurrence = rng.choice(places[module, span])
        text = mutated_text(tree / module, operator, occurrence)
        if text is not None:
            drawn.append((module, span, operator, occurrence, text))
        if len(drawn) == number:
            break
    else:
        raise ValueError(f"the packages have {len(drawn)} places to change, not {number}")
    drawn.sort()
    return [described(tree, index, *change) for index, change in enumerate(drawn)]


def _places(tree: Path) -> dict[tuple[str, Span], list[tuple[str, int]]]:
    """What cosmic-ray would do at each place of the packages: operators with their occurrences."""
    from cosmic_ray.ast import ast_nodes, get_ast_from_path
    from cosmic_ray.plugins import get_operator, operator_names

    operators = {name: get_operator(name) for name in operator_names()}
    places: dict[tuple[str, Span], list[tuple[str, int]]] = defaultdict(list)
    for module in _modules(tree):
        nodes = list(ast_nodes(get_ast_from_path(tree / module)))
        left_out = _Spans((tree / module).read_text(encoding="utf-8"))
        for name, operator in operators.items():
            if operator.arguments() or name.endswith(_SAME_MEANING):
                continue
            changes = operator()
            spans = [span for node in nodes for span in changes.mutation_positions(node)]
            for occurrence, (start, end) in enumerate(spans):
                span = (tuple(start), tuple(end))
                if not left_out.contains(span):
                    places[module, span].append((name, occurrence))
    return places


def _modules(tree: Path) -> list[str]:
    paths = [path for package in PACKAGES for path in (tree / package).rglob("*.py")]
    return sorted(str(path.relative_to(tree)) for path in paths)


class _Spans:
    """Where a change means nothing: annotations, what is for type checkers alone, guards of dataclasses, log calls."""

    def __init__(self, text: str) -> None:
        self._lines = text.split("\n")
        self._spans = [_span(node) for found in ast.walk(ast.parse(text)) for node in self._left_out(found)]

    def contains(self, span: Span) -> bool:
        (line, column), _ = span
        if self._lines[line - 1][column : column + 2] == "*,":  # of a parameter list; cosmic-ray takes it for a product
            return True
        return any(start <= span[0] < end for start, end in self._spans)

    @staticmethod
    def _left_out(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation:
            yield node.annotation
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns:
            yield node.returns
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from (each for each in node.decorator_list if _name(each) in _TYPING_DECORATORS)
        if isinstance(node, ast.Call) and _name(node.func) == "dataclass":  # frozen, slots: guards, no behaviour
            yield from (keyword.value for keyword in node.keywords)
        if isinstance(node, ast.If) and _name(node.test) == "TYPE_CHECKING":
            yield node
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _name(node.func.value) in _LOGGERS:
            yield node
        if isinstance(node, ast.Module):  # aliases of types: X = int | None
            aliases = (each for each in node.body if isinstance(each, ast.Assign))
            yield from (each for each in aliases if _is_union(each.value))


def _is_union(value: ast.expr) -> bool:
    return isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitOr)


def _span(node: ast.expr | ast.stmt) -> Span:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _name(node: ast.expr) -> str:
    """The last part of a name: `typing.override` is `override`."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def mutated_text(path: Path, operator: str, occurrence: int) -> str | None:
    """The module's text after the change; None if it is no Python, or the same program."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    text = path.read_text(encoding="utf-8")
    mutated: str | None = mutate_code(text, get_operator(operator)(), occurrence)
    if mutated is None:
        return None
    try:
        program = ast.parse(mutated)
    except SyntaxError:
        return None
    return mutated if ast.dump(program) != ast.dump(ast.parse(text)) else None


def described(tree: Path, number: int, module: str, span: Span, operator: str, occurrence: int, text: str) -> Mutant:
    """The mutant that makes this text of the module."""
    original = (tree / module).read_text(encoding="utf-8")
    old, new = original.split("\n"), text.split("\n")
    head = next(i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
    most = min(len(old), len(new)) - head
    tail = next((i for i in range(most) if old[-1 - i] != new[-1 - i]), most)
    statement, scope = _lines_around(ast.parse(original), span[0][0])
    return Mutant(
        number=number,
        module=module,
        line=span[0][0],
        operator=operator.removeprefix("core/"),
        occurrence=occurrence,
        statement=statement,
        scope=scope,
        first=head + 1,
        old=tuple(old[head : len(old) - tail]),
        new=tuple(new[head : len(new) - tail]),
    )


def _lines_around(module: ast.Module, line: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The lines of the innermost statement at the line, and those of what is around it."""
    kinds = (ast.stmt, ast.ExceptHandler)
    around = [node for node in ast.walk(module) if isinstance(node, kinds) and _begin(node) <= line <= _end(node)]
    statement = max(around, key=_begin)
    body = [_begin(node) for node in getattr(statement, "body", [])]
    last = max(_begin(statement), min(body) - 1) if body else _end(statement)
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    scope = max((node for node in around if isinstance(node, definitions)), key=_begin, default=None)
    whole = (1, max(_end(node) for node in module.body))
    return (_begin(statement), last), (_begin(scope), _end(scope)) if scope else whole


def _begin(node: ast.stmt | ast.ExceptHandler) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])


def _end(node: ast.stmt | ast.ExceptHandler) -> int:
    return node.end_lineno or node.lineno
