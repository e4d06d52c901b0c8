"""The device's state by batch slot, as `batch.slots` on the host, and the buffers of a step's tensors.

The whole state is one tensor of words, so that one kernel can write any part of it. Rows of the small matrices are
padded to multiples of 16 words: every view starts at an address that allows 16-byte accesses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

MAX_WORDS = 2**31 - 1
"""Maximum words of the state: places in it are int32."""

# Rows of the matrix of numbers by slot.
NUM_TOKENS = tl.constexpr(0)
NUM_PROMPT_TOKENS = tl.constexpr(1)
NUM_COMPUTED_TOKENS = tl.constexpr(2)
STOPPED = tl.constexpr(3)
PROMPT_FAILED = tl.constexpr(4)
STATE_FAILED = tl.constexpr(-(2**30))
"""As PROMPT_FAILED: it stays below 0 with all prompt rows that may be added."""
MIN_TOKENS = tl.constexpr(5)
MAX_DRAFTS = tl.constexpr(6)
MAX_LEN = tl.constexpr(7)
NUM_DRAFTS = tl.constexpr(8)
DRAFTS_END = tl.constexpr(9)
NUM_GUESSED = tl.constexpr(10)
ADAPTER_PLACE = tl.constexpr(11)
NUM_NUMBERS = 12

# Rows of the matrices of a step: by token, by sequence, by sampling row.
TOKEN_IDS = tl.constexpr(0)
POSITIONS = tl.constexpr(1)
ROPE_LENS = tl.constexpr(2)
SLOT_MAPPING = tl.constexpr(3)  # of the first block table; those of others follow
QUERY_START_LOC = tl.constexpr(0)
SEQ_LENS = tl.constexpr(1)
SEQ_SLOTS = tl.constexpr(2)
ROWS = tl.constexpr(0)
SOURCES = tl.constexpr(1)
SAMPLE_POSITIONS = tl.constexpr(2)
ROW_SLOTS = tl.constexpr(3)
ROW_WAITS = tl.constexpr(4)


@dataclass(frozen=True, slots=True)
class SlotState:
    """State of n slots; every tensor is a view of `words`. Padded sizes are rounded up to 16 words."""

    words: Tensor
    """[at most MAX_WORDS] int32."""
    numbers: Tensor
    """[NUM_NUMBERS, n padded] int32: the [n] tensors below, in the order of the constants above."""
    token_ids: Tensor
    """[n, max_model_len + 1] int32, contiguous."""
    tables: Tensor
    """[n, num_tables, max_blocks_per_seq] int32, rows padded."""
    stop_bits: Tensor
    """[n, ceil(vocab / 32)] int32: bit i % 32 of word i / 32 says that token i is a stop id."""
    extra: Tensor
    """[extra_words] int32, for other state by slot."""

    @classmethod
    def empty(
        cls,
        num_slots: int,
        vocab: int,
        max_model_len: int,
        max_blocks_per_seq: int,
        device: torch.device,
        extra_words: int = 0,
        num_tables: int = 1,
    ) -> SlotState:
        """Return slots without tokens. Raises ValueError if the state would exceed MAX_WORDS words."""
        table, bits = padded(max_blocks_per_seq), -(-vocab // 32)
        shapes = (
            (NUM_NUMBERS, padded(num_slots)),
            (num_slots, max_model_len + 1),
            (num_slots, num_tables, table),
            (num_slots, bits),
            (extra_words,),
        )
        sizes = [padded(math.prod(shape)) for shape in shapes]
        if sum(sizes) > MAX_WORDS:
            raise ValueError(
                f"num_slots {num_slots}, max_model_len {max_model_len}: {sum(sizes)} words of state, over {MAX_WORDS}"
            )
        words = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        regions = zip(words.split(sizes), shapes, strict=True)
        numbers, token_ids, tables, stop_bits, extra = (
            region[: math.prod(shape)].view(shape) for region, shape in regions
        )
        return cls(words, numbers, token_ids, tables[..., :max_blocks_per_seq], stop_bits, extra)

    @property
    def num_slots(self) -> int:
        return self.token_ids.shape[0]

    @property
    def block_tables(self) -> Tensor:
        """[n, max_blocks_per_seq] int32: the first table of each slot."""
        return self.tables[:, 0]

    @property
    def num_tokens(self) -> Tensor:
        """[n] int32: known tokens."""
        return self._number(NUM_TOKENS)

    @property
    def num_prompt_tokens(self) -> Tensor:
        """[n] int32."""
        return self._number(NUM_PROMPT_TOKENS)

    @property
    def num_computed_tokens(self) -> Tensor:
        """[n] int32."""
        return self._number(NUM_COMPUTED_TOKENS)

    @property
    def stopped(self) -> Tensor:
        """[n] int32, 0 or 1."""
        return self._number(STOPPED)

    @property
    def prompt_failed(self) -> Tensor:
        """[n] int32: not 0 if prompt logits were not finite, so the slot fails when it samples; below 0 if its
        recurrent state stood elsewhere than its context says."""
        return self._number(PROMPT_FAILED)

    @property
    def min_tokens(self) -> Tensor:
        """[n] int32: minimum output tokens, before which no stop id stops the sequence."""
        return self._number(MIN_TOKENS)

    @property
    def max_drafts(self) -> Tensor:
        """[n] int32: the most drafts in one step."""
        return self._number(MAX_DRAFTS)

    @property
    def max_len(self) -> Tensor:
        """[n] int32: the number of tokens at which the sequence stops."""
        return self._number(MAX_LEN)

    @property
    def num_drafts(self) -> Tensor:
        """[n] int32: drafts behind the known tokens, in steps with drafts; in others without meaning."""
        return self._number(NUM_DRAFTS)

    @property
    def drafts_end(self) -> Tensor:
        """[n] int32: no draft is at this place of its sequence or behind it; without meaning if max_drafts is 0."""
        return self._number(DRAFTS_END)

    @property
    def num_guessed(self) -> Tensor:
        """[n] int32: known tokens and drafts, while a draft model makes further drafts; else without meaning."""
        return self._number(NUM_GUESSED)

    @property
    def adapter_places(self) -> Tensor:
        """[n] int32: the place of the slot's adapter, -1 for none; in steps without adapters without meaning."""
        return self._number(ADAPTER_PLACE)

    def _number(self, row: tl.constexpr) -> Tensor:
        return self.numbers[row.value, : self.num_slots]


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Padded sizes of a step; a CUDA graph is captured for one such value."""

    num_tokens: int
    """T."""
    num_seqs: int
    """S."""
    num_logits: int
    """L, rows of logits."""
    num_rows: int
    """R, slots that sample; more than L if there are forks, less if there are drafts."""
    num_drafts: int = 0
    """k, places for drafts behind a sequence's token; they and their rows of logits count in T and L."""

    @classmethod
    def decode(cls, num_seqs: int, num_drafts: int = 0) -> StepSizes:
        """Return the sizes of a step with one token, places for drafts and one sampling row per sequence."""
        num_tokens = num_seqs * (1 + num_drafts)
        return cls(num_tokens, num_seqs, num_tokens, num_seqs, num_drafts)

    @property
    def num_words(self) -> int:
        """The words of such a step: those that `step_inputs` reads, and with drafts the most of a slot."""
        return 2 * self.num_seqs + 1 + self.num_logits + 4 * self.num_rows + (self.num_drafts > 0)

    @property
    def num_results(self) -> int:
        """The words of such a step's results, as in `StepBuffers`."""
        return (3 * (1 + self.num_drafts) + (self.num_drafts > 0)) * self.num_rows

    def within(self, most: StepSizes) -> bool:
        """Return whether no size is larger than that of `most`."""
        return (
            self.num_tokens <= most.num_tokens
            and self.num_seqs <= most.num_seqs
            and self.num_logits <= most.num_logits
            and self.num_rows <= most.num_rows
            and self.num_drafts <= most.num_drafts
        )


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """The memory of step tensors, at the same addresses for every step; columns padded as in SlotState."""

    most: StepSizes
    by_token: Tensor
    """[3 + num_tables, T] int64."""
    by_seq: Tensor
    """[3, S + 1] int32."""
    by_row: Tensor
    """[5, R] int32."""
    logits_rows: Tensor
    """[L] int64."""
    tables: Tensor
    """[S, num_tables, max_blocks_per_seq] int32."""
    results: Tensor
    """[num_results] int32: results of R rows for the host: token ids, then errors, then positions; with drafts so for
    each of 1 + k rounds, then the number of drafts of each row."""
    taken: Tensor
    """[R] int64: new known tokens, -1 for rows without one."""
    words: Tensor
    """[num_words] int32: the words of a step with drafts, as `draft_layout` writes them."""

    @classmethod
    def empty(cls, most: StepSizes, max_blocks_per_seq: int, device: torch.device, num_tables: int = 1) -> StepBuffers:
        """Return buffers for steps of at most these sizes."""

        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros((*shape[:-1], padded(shape[-1])), dtype=dtype, device=device)

        return cls(
            most,
            zeros(torch.int64, SLOT_MAPPING.value + num_tables, most.num_tokens),
            zeros(torch.int32, 3, most.num_seqs + 1),
            zeros(torch.int32, 5, most.num_rows),
            zeros(torch.int64, most.num_logits),
            # Zeros, later the contents of earlier steps: entries after the end of a sequence are valid, but without
            # meaning.
            zeros(torch.int32, most.num_seqs, num_tables, max_blocks_per_seq)[..., :max_blocks_per_seq],
            zeros(torch.int32, most.num_results),
            zeros(torch.int64, most.num_rows),
            zeros(torch.int32, most.num_words),
        )

    @property
    def slot_mappings(self) -> Tensor:
        """[num_tables, T] int64: the last rows of by_token."""
        return self.by_token[SLOT_MAPPING.value :]

    @property
    def block_tables(self) -> Tensor:
        """[S, max_blocks_per_seq] int32: the first table of each sequence."""
        return self.tables[:, 0]

    @property
    def seq_slots(self) -> Tensor:
        """[S] int32: the slot of each sequence; -1 for padding."""
        return self.by_seq[SEQ_SLOTS.value, : self.most.num_seqs]

    def inputs(self, sizes: StepSizes) -> StepInputs:
        """Return views for a step of these sizes."""
        tokens, seqs = self.by_token[:, : sizes.num_tokens], self.by_seq[:, : sizes.num_seqs]
        rows, one = self.by_row[:, : sizes.num_rows], self.tables.shape[1] == 1
        return StepInputs(
            sizes=sizes,
            token_ids=tokens[TOKEN_IDS.value],
            positions=tokens[POSITIONS.value],
            slot_mapping=tokens[SLOT_MAPPING.value] if one else tokens[SLOT_MAPPING.value :],
            rope_lens=tokens[ROPE_LENS.value],
            query_start_loc=self.by_seq[QUERY_START_LOC.value, : sizes.num_seqs + 1],
            seq_lens=seqs[SEQ_LENS.value],
            block_tables=(self.block_tables if one else self.tables)[: sizes.num_seqs],
            logits_rows=self.logits_rows[: sizes.num_logits],
            rows=rows[ROWS.value],
            sources=rows[SOURCES.value],
            sample_positions=rows[SAMPLE_POSITIONS.value],
            row_slots=rows[ROW_SLOTS.value],
            taken=self.taken[: sizes.num_rows],
        )


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The tensors of a step: `forward_batch.ForwardBatch`, padded, and what sampling needs.

    A stopped slot is padding: its KV is not written, and its context length is 0.
    """

    sizes: StepSizes
    token_ids: Tensor
    """[T] int64; 0 for padding."""
    positions: Tensor
    """[T] int64; 0 for padding."""
    slot_mapping: Tensor
    """[T] int64, with several block tables [num_tables, T]; -1 for padding."""
    rope_lens: Tensor
    """[T] int64; 1 for padding."""
    query_start_loc: Tensor
    """[S + 1] int32. Stopped slots keep their tokens; each padded sequence owns one padded token while any are left."""
    seq_lens: Tensor
    """[S] int32; 0 for padding."""
    block_tables: Tensor
    """[S, max_blocks_per_seq] int32, with several [S, num_tables, max_blocks_per_seq]; after the end of a sequence,
    before a window and for padding: valid blocks without meaning."""
    logits_rows: Tensor
    """[L] int64; 0 for padding."""
    rows: Tensor
    """[R] int32: sampling slot; -1 for padding."""
    sources: Tensor
    """[R] int32: logits row of each sampling slot; 0 for padding."""
    sample_positions: Tensor
    """[R] int32: position of the sampled token; 0 for padding."""
    row_slots: Tensor
    """[R] int32: as `rows`, but also of slots that had stopped before the step, and after the commit as before it."""
    taken: Tensor
    """[R] int64, after the commit: the new token of each row's slot; -1: none."""


def padded(size: int) -> int:
    """Return a size rounded up to a multiple of 16."""
    return -(-size // 16) * 16
