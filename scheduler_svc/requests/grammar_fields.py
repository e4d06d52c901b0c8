"""The constraint of a request: its checks that need no compiler, and its form for executors."""

from __future__ import annotations

from dataclasses import dataclass

from cadenza_common.grammar.spec import GrammarSpec
from scheduler_svc.core.errors import PreconditionError, RequestRejectedError
from scheduler_svc.requests.field_rules import CheckContext, token_ids

NO_GRAMMARS = (
    "the executor follows no grammars: it needs llguidance, a tokenizer in tokenizer.json or in a GGUF file, an EOS "
    "token, and so far no ranks on GPUs"
)
_WITH_WHITESPACE = ("json_schema", "json_object")


@dataclass(frozen=True, slots=True)
class GrammarFields:
    """A constraint as received."""

    spec: GrammarSpec
    wire: bytes
    """The same, as its message."""


def check_grammar(path: str, value: GrammarFields | None, context: CheckContext) -> None:
    """Check the form and the sizes of a constraint."""
    if value is None:
        return
    if not context.model.grammar_engine:
        raise PreconditionError(path, NO_GRAMMARS)
    spec = value.spec
    if spec.kind is None:
        raise RequestRejectedError(
            path, "must have one of json_schema, regex, grammar, choices, json_object (true), structural_tag"
        )
    if spec.kind == "choices":
        _check_choices(f"{path}.choices.values", spec.choices)
    elif spec.kind != "json_object" and not spec.text:
        raise RequestRejectedError(f"{path}.{spec.kind}", "must not be empty")
    _check_options(path, spec)
    token_ids(f"{path}.start_after_token_ids", spec.start_after_token_ids, context)


def _check_choices(path: str, choices: tuple[str, ...]) -> None:
    if not choices:
        raise RequestRejectedError(path, "must have at least one entry")
    for index, choice in enumerate(choices):
        if not choice:
            raise RequestRejectedError(f"{path}[{index}]", "must not be empty")


def _check_options(path: str, spec: GrammarSpec) -> None:
    """Check that options of JSON come with JSON."""
    for name in ("disable_any_whitespace", "whitespace_pattern"):
        if getattr(spec, name) and spec.kind not in _WITH_WHITESPACE:
            raise RequestRejectedError(f"{path}.{name}", f"needs json_schema or json_object, not {spec.kind}")
    if spec.disable_any_whitespace and spec.whitespace_pattern:
        raise RequestRejectedError(f"{path}.whitespace_pattern", "excludes disable_any_whitespace")
    if spec.disable_additional_properties and spec.kind != "json_schema":
        raise RequestRejectedError(f"{path}.disable_additional_properties", f"needs json_schema, not {spec.kind}")
