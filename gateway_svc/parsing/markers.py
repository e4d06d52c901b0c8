"""The markers of formats: their meanings, and their tokens in a model's vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

from cadenza.info import ModelInfo
from cadenza_common.call_formats.syntax import ThoughtSyntax, ToolSyntax
from gateway_svc.parsing.parts import Marker, Role


def tool_markers(info: ModelInfo, syntax: ToolSyntax) -> tuple[Marker, ...]:
    """Those of a format of calls, of a model."""
    return tuple(_found(info, role, text, syntax.wrappers) for role, text in tool_roles(syntax))


def thought_markers(info: ModelInfo, syntax: ThoughtSyntax) -> tuple[Marker, ...]:
    """Those of a format of thoughts, of a model."""
    return tuple(_found(info, role, text, syntax.wrappers) for role, text in _thought_roles(syntax))


def _found(info: ModelInfo, role: Role, text: str, nothing: tuple[str, ...]) -> Marker:
    token = next((each for each in info.added_tokens if each.text == text), None)
    is_nothing = text in nothing
    if token is None:
        return Marker(role, text, is_nothing=is_nothing)
    return Marker(role, text, token.id, token.special, is_nothing)


def tool_roles(syntax: ToolSyntax) -> Iterator[tuple[Role, str]]:
    """The markers of a format of calls, and what they mean."""
    closing = {text for way in syntax.ways for text in way.markers[1:] if (way.call[1] + way.section[1]).endswith(text)}
    for text in syntax.markers:
        is_first = any(way.markers[0] == text or way.call[0].startswith(text) for way in syntax.ways)
        yield Role.CALL if is_first else Role.CALL_END if text in closing else Role.ARGUMENTS, text
    for text in syntax.wrappers:
        yield Role.WRAPPER, text


def _thought_roles(syntax: ThoughtSyntax) -> Iterator[tuple[Role, str]]:
    yield from ((Role.THOUGHT, syntax.open), (Role.THOUGHT_END, syntax.close))
    known = {syntax.open, syntax.close}
    yield from ((Role.WRAPPER, text) for text in syntax.wrappers if text not in known)
    yield from ((Role.ARGUMENTS, text) for text in syntax.parts if text not in {*known, *syntax.wrappers})


def is_composed(marker: Marker, markers: tuple[Marker, ...]) -> bool:
    """Whether a marker consists of others."""
    return marker.token_id is None and any(each.text in marker.text for each in markers if each.text != marker.text)


def pieces_and_composed(markers: tuple[Marker, ...]) -> tuple[list[Marker], list[Marker]]:
    """The markers that an output is split at, and those that consist of them."""
    composed = [marker for marker in markers if is_composed(marker, markers)]
    return [marker for marker in markers if marker not in composed], composed
