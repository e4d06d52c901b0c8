"""Logprobs as OpenAI's APIs have them: one shape for completions, one for chat and responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cadenza.outputs import Logprob, LogprobRow

_NO_CHARACTER = "\ufffd"
"""What stands in texts for bytes that are no UTF-8."""
_MIN_LOGPROB = -9999.0
"""In place of minus infinity, which JSON does not have; vLLM's number."""


@dataclass(frozen=True, slots=True)
class TokenNames:
    """How a token is named."""

    as_ids: bool = False
    """As token_id:7, whatever its text."""

    def of(self, token_id: int, logprob: Logprob) -> str:
        """Its text, or its id where it has none."""
        text = logprob.decoded_token
        return f"token_id:{token_id}" if self.as_ids or text is None else text


def finite(logprob: float) -> float:
    """A logprob as JSON can have it."""
    return max(logprob, _MIN_LOGPROB)


@dataclass(slots=True)
class CompletionLogprobs:
    """The columns of completions, whose offsets go on from one part to the next."""

    names: TokenNames
    num_top: int
    offset: int = 0
    """Where the next token begins in the text, in characters."""

    def columns(self, rows: Sequence[LogprobRow | None], token_ids: Sequence[int], texts: Sequence[str] = ()) -> Any:
        """tokens, token_logprobs, top_logprobs, text_offset of some tokens; the first of a prompt has no row.

        texts: of the tokens, for those without a row.
        """
        tokens, logprobs, top, offsets = [], [], [], []
        for index, (token_id, row) in enumerate(zip(token_ids, rows, strict=True)):
            if row is None:
                token = texts[index] if texts and not self.names.as_ids else f"token_id:{token_id}"
                width, logprob, best = len(texts[index]) if texts else 0, None, None
            else:
                chosen = row[token_id]
                token, logprob = self.names.of(token_id, chosen), finite(chosen.logprob)
                width = len(chosen.decoded_token or "")
                # The chosen token's stands first, and beside the num_top best ones, as in vLLM.
                best = {self.names.of(each, entry): finite(entry.logprob) for each, entry in row.items()}
            tokens.append(token)
            logprobs.append(logprob)
            top.append(best if self.num_top or best is None else None)
            offsets.append(self.offset)
            self.offset += width
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": top if self.num_top else None,
            "text_offset": offsets,
        }


def chat_logprobs(
    rows: Sequence[LogprobRow], token_ids: Sequence[int], num_top: int, names: TokenNames
) -> list[dict[str, Any]]:
    """One entry for each token, with its num_top best ones."""
    entries = []
    for token_id, row in zip(token_ids, rows, strict=True):
        best = sorted(row.items(), key=lambda item: item[1].rank or 0)[:num_top]
        entry = _entry(token_id, row[token_id], names)
        entry["top_logprobs"] = [_entry(each, logprob, names) for each, logprob in best]
        entries.append(entry)
    return entries


def prompt_logprobs(rows: Sequence[LogprobRow | None] | None) -> list[dict[str, Any] | None] | None:
    """vLLM's prompt_logprobs: by token id; the first token has none."""
    if rows is None:
        return None
    return [None if row is None else {str(each): _ranked(logprob) for each, logprob in row.items()} for row in rows]


def _ranked(logprob: Logprob) -> dict[str, Any]:
    return {"logprob": finite(logprob.logprob), "rank": logprob.rank, "decoded_token": logprob.decoded_token}


def _entry(token_id: int, logprob: Logprob, names: TokenNames) -> dict[str, Any]:
    token = names.of(token_id, logprob)
    return {"token": token, "logprob": finite(logprob.logprob), "bytes": _bytes(logprob.decoded_token)}


def _bytes(text: str | None) -> list[int] | None:
    """The UTF-8 of a token's text; None for one that has no text of its own, as a part of a character has none."""
    return None if text is None or _NO_CHARACTER in text else list(text.encode())
