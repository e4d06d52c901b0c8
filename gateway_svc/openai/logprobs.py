"""Logprobs as OpenAI's APIs have them: one shape for completions, one for chat and responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cadenza.outputs import Logprob, LogprobRow

_NO_CHARACTER = "\ufffd"
"""What stands in texts for bytes that are no UTF-8."""
_WITHIN_CHARACTER = bytes(range(0x80, 0xC0))
"""Bytes of UTF-8 that are not the first of a character."""
_WITHIN = frozenset(bytes((byte,)) for byte in _WITHIN_CHARACTER)
_NORMALIZED_BYTES = 32
"""Of a prompt's text that may stand between tokens because they are those of a normalized one."""
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

    def apart(self, row: LogprobRow) -> dict[str, float]:
        """The logprobs of a row by the names of its tokens.

        Parts of characters have one text: each but the first is named by its bytes, bytes:\\xe2, as OpenAI has it.
        """
        found: dict[str, float] = {}
        for token_id, logprob in row.items():
            name = self.of(token_id, logprob)
            if name in found:
                raw = logprob.token_bytes
                name = f"token_id:{token_id}" if raw is None else "bytes:" + "".join(map("\\x{:02x}".format, raw))
            found[name] = finite(logprob.logprob)
        return found


def finite(logprob: float) -> float:
    """A logprob as JSON can have it."""
    return max(logprob, _MIN_LOGPROB)


@dataclass(slots=True)
class CompletionLogprobs:
    """The columns of completions."""

    names: TokenNames
    num_top: int

    def columns(
        self,
        rows: Sequence[LogprobRow | None],
        token_ids: Sequence[int],
        offsets: Sequence[int],
        texts: Sequence[str] = (),
    ) -> Any:
        """tokens, token_logprobs, top_logprobs, text_offset of some tokens; the first of a prompt has no row.

        offsets: where each token begins in the text, in characters. texts: of the tokens, for those without a row.
        """
        tokens, logprobs, top = [], [], []
        for index, (token_id, row) in enumerate(zip(token_ids, rows, strict=True)):
            if row is None:
                token = texts[index] if texts and not self.names.as_ids else f"token_id:{token_id}"
                logprob, best = None, None
            else:
                chosen = row[token_id]
                token, logprob = self.names.of(token_id, chosen), finite(chosen.logprob)
                # The chosen token's stands first, and beside the num_top best ones, as in vLLM.
                best = self.names.apart(row)
            tokens.append(token)
            logprobs.append(logprob)
            top.append(best if self.num_top or best is None else None)
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": top if self.num_top else None,
            "text_offset": list(offsets),
        }


def prompt_offsets(text: str, pieces: Sequence[bytes]) -> list[int]:
    """Where the tokens of a prompt begin in its text, in characters; pieces: their bytes.

    Tokens are found from the end on, so that those at the beginning that are in no text, as BOS is, have no width. A
    part of a character begins with the character.
    """
    raw, starts = text.encode(), list[int]()
    end = len(raw)
    for piece in reversed(pieces):
        if piece and raw.endswith(piece, 0, end):
            end -= len(piece)
        elif piece[1:] and piece[:1] == b" " and raw.endswith(piece[1:], 0, end):
            end -= len(piece) - 1  # sentencepiece puts a space before a text
        elif piece:  # a normalized text has other bytes than its tokens: go on where the next of them stands
            found = raw.rfind(piece, max(0, end - len(piece) - _NORMALIZED_BYTES), end)
            end = found if found >= 0 else end
        starts.append(end)
    offsets, before, num_chars = list[int](), 0, 0
    for start in reversed(starts):
        num_chars += len(raw[before:start].translate(None, _WITHIN_CHARACTER))
        before = start
        offsets.append(num_chars - (raw[start : start + 1] in _WITHIN))
    return offsets


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
    raw = bytes_of(logprob)
    return {"token": token, "logprob": finite(logprob.logprob), "bytes": None if raw is None else list(raw)}


def bytes_of(logprob: Logprob) -> bytes | None:
    """The bytes of a token, of its text or of a part of a character; None: they are not known."""
    text = logprob.decoded_token
    if logprob.token_bytes is not None or text is None or _NO_CHARACTER in text:
        return logprob.token_bytes
    return text.encode()


def num_characters(raw: bytes) -> int:
    """How many characters of a text a token has a part of; what is no UTF-8 stands there as characters, too."""
    whole = raw.lstrip(_WITHIN_CHARACTER)
    return len(whole.decode(errors="replace")) + (len(whole) < len(raw))
