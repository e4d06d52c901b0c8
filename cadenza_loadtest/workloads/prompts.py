"""Prompts: the tokens or words of a request, which follow from the seed and its index in the workload."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from cadenza_loadtest.requests import Ints, LoadTestError, RequestShape
from cadenza_loadtest.seeds import stream
from cadenza_loadtest.workloads.records import BLOCK_TOKENS
from cadenza_loadtest.workloads.vocabulary import VOCABULARY

_FIRST_ID, _END_ID = 300, 8000
"""Above special tokens and single bytes, within the smallest usual vocabularies; benchmarks/common uses the same."""
_FEWEST = 64
"""Minimum number of different ids; with fewer, prompts would share tokens by chance."""
_REQUESTS, _PREFIXES, _BLOCKS = 0, 1, 2
"""Disjoint parts of the random stream."""


def id_range(vocab_size: int | None) -> tuple[int, int]:
    """First and end of the ids for prompts in a vocabulary of this size (None: unknown).

    300 to 8,000 if the vocabulary has as many; in a smaller vocabulary its upper half, because special ids are mostly
    among the first.
    """
    if vocab_size is None:
        return _FIRST_ID, _END_ID
    if vocab_size < 1:
        raise LoadTestError(f"a vocabulary has at least one token, not {vocab_size}")
    if vocab_size < _FIRST_ID + _FEWEST:
        return vocab_size // 2, vocab_size
    return _FIRST_ID, min(_END_ID, vocab_size)


class Prompts:
    """Makes prompts, which depend on the seed and the shape alone. Not thread-safe."""

    def __init__(
        self, seed: int, vocab_size: int | None = None, first_id: int | None = None, end_id: int | None = None
    ) -> None:
        """Random ids are from `first_id` up to, not including, `end_id`; by default from id_range(vocab_size).

        Raises LoadTestError for an empty range or one outside the vocabulary.
        """
        first, end = id_range(vocab_size)
        self._first = first if first_id is None else first_id
        self._end = end if end_id is None else end_id
        self._vocab_size = vocab_size
        if not 0 <= self._first < self._end <= (vocab_size or self._end):
            raise LoadTestError(f"prompt ids from {self._first} to {self._end} are not in a vocabulary of {vocab_size}")
        # A counter-based generator (Philox, Salmon et al., SC 2011, https://doi.org/10.1145/2063384.2063405) is set to
        # any request's position by its state; a new generator for each request would take longer than drawing its
        # tokens.
        key = stream(seed, "prompts").integers(0, 2**64, 2, np.uint64, endpoint=False)
        self._philox = np.random.Philox(counter=0, key=key)
        self._rng = np.random.Generator(self._philox)
        self._start = self._philox.state
        self._vocabulary = np.array(VOCABULARY)
        self._prefix_ids: dict[int, list[int]] = {}
        self._prefix_words: dict[int, list[str]] = {}

    def token_ids(self, shape: RequestShape, history: Sequence[int] = ()) -> list[int]:
        """The prompt's token ids: `history` (of a session's earlier turns), then the shape's own.

        The shape's own ids come from its file, or are random: the shared prefix, then others. Raises LoadTestError if
        the shape has a text, or ids outside the vocabulary.
        """
        if shape.prompt_text:
            raise LoadTestError(f"request {shape.index}: its prompt is a text, but token ids are needed")
        if shape.prompt_token_ids:
            own = list(shape.prompt_token_ids)
            if self._vocab_size is not None and max(own) >= self._vocab_size:
                raise LoadTestError(
                    f"request {shape.index}: prompt: token id {max(own)} is not in the vocabulary, whose last is "
                    f"{self._vocab_size - 1}"
                )
        elif shape.prompt_blocks:
            parts = (self._ids(_BLOCKS, block, BLOCK_TOKENS) for block in shape.prompt_blocks)
            own = list(itertools.chain.from_iterable(parts))[: shape.num_prompt_tokens]
        elif shape.prefix < 0:
            own = self._ids(_REQUESTS, shape.index, shape.num_prompt_tokens)
        else:
            prefix = self._prefix(shape.prefix, shape.num_prefix_tokens)
            own = prefix + self._ids(_REQUESTS, shape.index, shape.num_prompt_tokens - len(prefix))
        return [*history, *own] if history else own

    def text(self, shape: RequestShape, history_text: str = "") -> str:
        """The prompt as text, for servers that accept no ids: a common short English word for each token.

        Most tokenizers encode each word as one token, so the length is about right. Raises LoadTestError if the shape
        has token ids from a file.
        """
        if shape.prompt_token_ids:
            raise LoadTestError(f"request {shape.index}: its prompt is token ids, but a text is needed")
        own = shape.prompt_text
        if not own and shape.prompt_blocks:
            blocks = (self._text(_BLOCKS, block, BLOCK_TOKENS) for block in shape.prompt_blocks)
            own = " ".join(list(itertools.chain.from_iterable(blocks))[: shape.num_prompt_tokens])
        if not own:
            words = self._prefix_text(shape.prefix, shape.num_prefix_tokens) if shape.prefix >= 0 else []
            own = " ".join([*words, *self._text(_REQUESTS, shape.index, shape.num_prompt_tokens - len(words))])
        return f"{history_text} {own}" if history_text else own

    def _prefix(self, prefix: int, length: int) -> list[int]:
        known = self._prefix_ids.get(prefix)
        if known is None or len(known) < length:
            known = self._prefix_ids[prefix] = self._ids(_PREFIXES, prefix, length)
        return known[:length]

    def _prefix_text(self, prefix: int, length: int) -> list[str]:
        known = self._prefix_words.get(prefix)
        if known is None or len(known) < length:
            known = self._prefix_words[prefix] = self._text(_PREFIXES, prefix, length)
        return known[:length]

    def _ids(self, part: int, index: int, count: int) -> list[int]:
        ids: list[int] = self._draw(part, index, self._first, self._end, count).tolist()
        return ids

    def _text(self, part: int, index: int, count: int) -> list[str]:
        words: list[str] = self._vocabulary[self._draw(part, index, 0, len(self._vocabulary), count)].tolist()
        return words

    def _draw(self, part: int, index: int, first: int, end: int, count: int) -> Ints:
        """[count] integers; a longer draw at the same position begins with the shorter one."""
        self._start["state"]["counter"][2:] = index, part
        self._philox.state = self._start
        return self._rng.integers(first, end, count)
