"""Prompts: the tokens or words of a request, which follow from the seed and its index in the workload."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from cadenza_loadtest.requests import Ints, LoadTestError, RequestShape
from cadenza_loadtest.seeds import stream
from cadenza_loadtest.workloads.records import BLOCK_TOKENS

_FIRST_ID, _END_ID = 300, 8000
"""Above special tokens and single bytes, within the smallest usual vocabularies; benchmarks/common uses the same."""
_FEWEST = 64
"""Minimum number of different ids; with fewer, prompts would share tokens by chance."""
_REQUESTS, _PREFIXES, _BLOCKS = 0, 1, 2
"""Disjoint parts of the random stream."""
VOCABULARY = tuple(
    """
    about above across act add after again age air all almost alone along also always among and animal answer any
    appear are area arm art ask away baby back bad bank base bed been before began best better between big bird
    black blue board boat body book both box boy bring brother build but buy call came can car care carry case cat
    catch cause cent center change chance check child city class clean clear close cloud coast cold color come
    common cook cool corn could count country course cover cross cry cut dance dark day dead deal deep did does dog
    done door down draw dream dress drink drive drop dry during each ear early earth east eat edge egg eight end
    enough even ever every eye face fact fall family far farm fast father fear feel feet field fight fill final
    find fine fire first fish five floor flow fly follow food foot force form found four free fresh friend from
    front full fun game garden gave get girl give glass gold gone good got grass great green ground group grow had
    hair half hand happy hard has have head hear heart heat help her here high hill him his hold home hope horse
    hot hour house how ice idea inch iron island job join just keep key kind king knew know lake land large last
    late laugh law lay lead learn leave left less let letter level lie life light like line list little live long
    look lost lot love low machine made main make man many map mark may mean meet men metal mile milk mind minute
    miss money month moon more morning most mother mountain move much music must name near need never new next
    night nine north nose note now number ocean off often oil old once one only open order other our out over own
    page paint paper part party pass past path pay people phone piece place plain plan plane plant play point poor
    port post power press quick quiet race rain reach read ready real red rest rich ride right ring river road rock
    roll room round rule run safe said sail salt same sand saw say school sea seat second see seed seem sell send
    set seven shape she ship short should show side sign simple since sing sister sit six size skin sleep slow
    small snow soft soil some song soon sound south space speak spring stand star start state stay step stone stood
    stop store story street strong study such sugar summer sun sure table tail take talk tall teach tell ten test
    than that the their them then there these they thing think this those three time tiny tire told too took top
    town trade train travel tree trip true try turn two under until use very voice wait walk wall want war warm was
    watch water wave way wear week well went were west what wheel when where which while white who whole why wide
    wife wild will wind winter wish with woman wood word work world would write year yes you young your
    """.split()
)


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
