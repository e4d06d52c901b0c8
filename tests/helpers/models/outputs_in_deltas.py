"""Outputs of a model with markers, and the deltas in which they may come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cadenza.outputs import CompletionOutput, FinishReason
from gateway_svc.parsing.output import Message, OutputParser, Reading
from gateway_svc.parsing.parts import CallArguments, CallBegin, Content, Part, Thought

PLAIN_ID = 7


@dataclass(frozen=True)
class Token:
    """One token of an output: its text, and its id where it is a marker."""

    text: str
    token_id: int = PLAIN_ID
    is_hidden: bool = False
    """Whether the text is left out."""

    @property
    def shown(self) -> str:
        return "" if self.is_hidden else self.text


def whole(tokens: Sequence[Token], finish: FinishReason = "stop") -> CompletionOutput:
    """All of an output at once."""
    return deltas(tokens, [len(tokens)], [0], finish)[0]


def deltas(
    tokens: Sequence[Token], sizes: Sequence[int], lags: Sequence[int], finish: FinishReason = "stop"
) -> list[CompletionOutput]:
    """The output in deltas: numbers of tokens, and of characters that are held back after each."""
    text = "".join(token.shown for token in tokens)
    found: list[CompletionOutput] = []
    num_tokens = num_chars = num_due = 0
    steps = [*zip(sizes, [*lags, *([0] * len(sizes))], strict=False), (len(tokens), 0)]
    for size, lag in steps:
        new = tokens[num_tokens : num_tokens + size]
        num_tokens += len(new)
        ends = []
        for token in new:
            num_due += len(token.shown)
            ends.append(num_due)
        is_last = num_tokens == len(tokens)
        end = num_due if is_last else max(num_chars, num_due - lag)
        delta = CompletionOutput(0, text[num_chars:end], [token.token_id for token in new], text_ends=ends)
        num_chars = end
        if is_last:
            delta.finish_reason = finish
        found.append(delta)
        if is_last:
            break
    return found


def joined(parts: Sequence[Part]) -> list[Part]:
    """The parts, those that go on joined."""
    found: list[Part] = []
    for part in parts:
        match (found[-1] if found else None), part:
            case Content(before), Content(text):
                found[-1] = Content(before + text)
            case Thought(before), Thought(text):
                found[-1] = Thought(before + text)
            case CallArguments(index, before), CallArguments(same, text) if index == same:
                found[-1] = CallArguments(index, before + text)
            case _:
                found.append(part)
    return found


def parse(reading: Reading, outputs: Sequence[CompletionOutput]) -> list[Part]:
    """The parts of an output that comes in deltas; checks what every stream must keep to."""
    parser, parts = OutputParser(reading, []), list[Part]()
    for output in outputs:
        parts += parser.feed(output)
    num_calls = 0
    for part in parts:
        if isinstance(part, CallBegin):
            assert part.index == num_calls
            num_calls += 1
        elif isinstance(part, CallArguments):
            assert part.index == num_calls - 1
            assert part.text
        else:
            assert part.text
    assert parser.has_calls == bool(num_calls)
    return joined(parts)


def message_of(parts: Sequence[Part]) -> Message:
    """What the parts come to."""
    message = Message()
    message.add(parts)
    return message
