"""Runs a target and a head on its hidden states, both recorded, as a step would. For tests only."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from executor_svc.batch.forward_batch import ForwardBatch
from executor_svc.config import ExecutorConfig
from executor_svc.models.decoder import Decoder
from executor_svc.models.heads.draft import LoadedDraft
from executor_svc.models.heads.eagle3 import Eagle3Head
from executor_svc.models.heads.eagle3_loading import load_eagle3
from executor_svc.models.heads.head import DraftHead
from executor_svc.plan.arrays import IntArray
from tests.executor_svc.driver import Model, flat_batch, spoil

MAX_TOKENS = 96
MAX_SEQS = 8


class Text:
    """A text, how much of it is computed, and the blocks that hold it."""

    def __init__(self, tokens: list[int], blocks: list[int]) -> None:
        """tokens: the last one is the token after what is computed."""
        self.tokens, self.blocks, self.num_computed = tokens, blocks, 0


def load_head(folder: Path, target: Model, **options: Any) -> LoadedDraft[Eagle3Head]:
    return load_eagle3(str(folder), ExecutorConfig(**{**target.options, **options}), target.device, target.loaded)


class HeadDriver:
    """A target, a head, and a cache full of NaN whose blocks hold the layers of both."""

    def __init__(self, target: Model, draft: LoadedDraft[DraftHead]) -> None:
        model = target.loaded.model
        assert isinstance(model, Decoder)
        config = ExecutorConfig(**target.options)
        kernels, head = target.device.kernels, draft.model
        self.target, self.head, self.block_size = model, head, config.block_size
        self.cache = target.device.new_kv_cache(target.loaded.geometry, config, draft=draft.layers)
        spoil(self.cache)
        where = target.device.torch_device
        self._ids, self._next, self._positions, self._draft_ids, self._draft_positions = (
            torch.zeros(size, dtype=torch.int64, device=where) for size in (*[MAX_TOKENS] * 3, MAX_SEQS, MAX_SEQS)
        )
        self._ropes, self._head_ropes = model.new_ropes(self._positions), head.new_ropes(self._positions)
        self._draft_ropes = head.new_ropes(self._draft_positions)
        length = target.loaded.geometry.max_model_len
        self._plans, self._head_plans = (
            [kernels.new_attention_plan(shape, length, MAX_TOKENS, MAX_SEQS) for shape in shapes]
            for shapes in (model.attention_shapes, head.attention_shapes)
        )
        self._draft_plans = [
            kernels.new_attention_plan(shape, length, MAX_SEQS, MAX_SEQS) for shape in head.attention_shapes
        ]
        self._given = torch.zeros(MAX_SEQS, head.hidden_size, dtype=target.device.dtype, device=where)
        layers = self.cache.draft_layers
        with kernels.recording() as recording:
            self.hidden, self.states = model.forward_with_states(
                self._ids, self._ropes, self.cache.layers, self._plans, head.state_layers
            )
            # combine may write into the states, which tests read
            width = self.states.shape[1]
            self.kept = kernels.new_rows("kept", MAX_TOKENS, width, self.states.dtype)
            kernels.copy_columns(self.states, 0, self.kept, 0, width)
            self.result = head.forward(
                self._next, head.combine(self.states), self._head_ropes, layers, self._head_plans
            )
            self._logits = head.logits(self.result)
            self._step = recording.program()
        with kernels.recording() as recording:
            recording.rows = "drafts"
            hidden = head.forward(self._draft_ids, self._given, self._draft_ropes, layers, self._draft_plans)
            self._draft_logits = head.logits(hidden)
            self._draft_step = recording.program()

    def step(self, work: Sequence[tuple[Text, int]]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Compute the next tokens of texts in one batch: states, results and logits of each, all [tokens, …]."""
        batch = self._batch([(text, text.num_computed, count) for text, count in work])
        count = len(batch.token_ids)
        self._ids[:count], self._positions[:count] = batch.token_ids, batch.positions
        following = [text.tokens[text.num_computed + 1 : text.num_computed + size + 1] for text, size in work]
        self._next[:count] = torch.tensor([token for tokens in following for token in tokens])
        self.target.fill_ropes(batch.positions, batch.rope_lens, self._ropes)
        self.head.fill_ropes(batch.positions, batch.rope_lens, self._head_ropes)
        plans = [*self._plans, *self._head_plans]
        for plan in plans:
            plan.fill(batch.slot_mapping, batch.query_start_loc, batch.seq_lens, batch.block_tables)
        self._step.run(rows=count, **{plan.name: plan.num_tiles for plan in plans})
        for text, size in work:
            text.num_computed += size
        sizes = [size for _, size in work]
        found = [torch.split(rows[:count].cpu().clone(), sizes) for rows in (self.kept, self.result, self._logits)]
        return list(zip(*found, strict=True))

    def draft(self, work: Sequence[tuple[Text, int, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Compute the head's row at position num_computed of texts, a token and the hidden state before it given.

        Returns each one's hidden state [hidden] and logits [draft vocabulary]. Nothing is counted as computed.
        """
        count = len(work)
        batch = self._batch([(text, text.num_computed + ahead, 1) for text, ahead, _ in work], draft=True)
        self._draft_ids[:count] = torch.tensor([text.tokens[text.num_computed + ahead + 1] for text, ahead, _ in work])
        self._draft_positions[:count] = batch.positions
        self._given[:count] = torch.stack([hidden for _, _, hidden in work]).to(self._given.device)
        self.head.fill_ropes(batch.positions, batch.rope_lens, self._draft_ropes)
        for plan in self._draft_plans:
            plan.fill(batch.slot_mapping, batch.query_start_loc, batch.seq_lens, batch.block_tables)
        self._draft_step.run(drafts=count, **{plan.name: plan.num_tiles for plan in self._draft_plans})
        return list(zip(self._given[:count].cpu().clone(), self._draft_logits[:count].cpu().clone(), strict=True))

    def _batch(self, work: Sequence[tuple[Text, int, int]], draft: bool = False) -> ForwardBatch:
        ids = [0] * len(work) if draft else [t for text, at, size in work for t in text.tokens[at : at + size]]
        chunks = [(at, size) for _, at, size in work]
        return flat_batch(chunks, [text.blocks for text, _, _ in work], self.block_size, ids)


def random_tokens(seed: int, count: int, vocab_size: int = 131) -> list[int]:
    found: IntArray = torch.randint(0, vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).numpy()
    return [int(token) for token in found]


def check_rows(driver: HeadDriver, data: st.DataObject, seed: int) -> None:
    """Bit by bit: texts in any chunks, beside any others, and drafts beside others, against each text alone."""
    blocks = list(range(driver.cache.num_device_blocks))
    random.Random(seed).shuffle(blocks)
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=2, max_size=4))
    tokens = [random_tokens(seed + index, length + 2) for index, length in enumerate(lengths)]
    alone = []
    for each, length in zip(tokens, lengths, strict=True):
        spoil(driver.cache)
        text = Text(each, blocks[:3])
        whole = driver.step([(text, length)])[0]
        alone.append((*whole, *driver.draft([(text, 0, whole[1][-1])])[0]))
    spoil(driver.cache)
    texts = [Text(each, blocks[3 * index : 3 * index + 3]) for index, each in enumerate(tokens)]
    parts: list[list[tuple[Tensor, ...]]] = [[] for _ in texts]
    while any(text.num_computed < length for text, length in zip(texts, lengths, strict=True)):
        work: list[tuple[Text, int]] = []
        which: list[int] = []
        room = 96
        for index in data.draw(st.permutations(range(len(texts)))):
            left = min(lengths[index] - texts[index].num_computed, room)
            size = data.draw(st.integers(0, left)) if left and which else min(left, data.draw(st.integers(1, 40)))
            if size:
                work.append((texts[index], size))
                which.append(index)
                room -= size
        for index, found in zip(which, driver.step(work), strict=True):
            parts[index].append(found)
    joined = [tuple(torch.cat(each) for each in zip(*found, strict=True)) for found in parts]
    drafted = driver.draft([(text, 0, found[1][-1]) for text, found in zip(texts, joined, strict=True)])
    for rows, draft, expected in zip(joined, drafted, alone, strict=True):
        for ours, theirs in zip((*rows, *draft), expected, strict=True):
            assert torch.equal(ours, theirs)
