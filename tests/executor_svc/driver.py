"""Drives a ModelRunner by hand: sequences, their blocks, and batches of any mixture. For tests only."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from executor_svc.batch.forward_batch import ForwardBatch
from executor_svc.batch.slot_states import check_folded
from executor_svc.batch.step_states import StepStates
from executor_svc.config import ExecutorConfig
from executor_svc.cpu.runner import ModelRunner
from executor_svc.device.adapters import NO_PLACE
from executor_svc.device.interface import Device
from executor_svc.device.kv_cache import KVCache
from executor_svc.models.adapters.places import AdapterSizes
from executor_svc.models.loading import LoadedModel, load_model
from executor_svc.plan.description import limits_of
from executor_svc.startup.executors import make_device

# One thread: beside other processes, two that wait for each other are slower than one. What threads change has tests of
# its own.
NUM_THREADS = 1


def flat_batch(
    chunks: Sequence[tuple[int, int]],
    tables: Sequence[Sequence[int]],
    block_size: int,
    token_ids: Sequence[int],
    prompts: Sequence[int] | None = None,
) -> ForwardBatch:
    """Return the batch of chunks (context length, tokens) with these block tables and prompts; logits of all tokens."""
    starts = [0]
    positions: list[int] = []
    slots: list[int] = []
    rope_lens: list[int] = []
    for (context, count), table, prompt in zip(chunks, tables, prompts or [0] * len(chunks), strict=True):
        starts.append(starts[-1] + count)
        rope_lens.extend(max(prompt, position + 1) for position in range(context, context + count))
        for position in range(context, context + count):
            positions.append(position)
            slots.append(table[position // block_size] * block_size + position % block_size)
    width = max(len(table) for table in tables)
    return ForwardBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor([context + count for context, count in chunks], dtype=torch.int32),
        block_tables=torch.tensor([[*table, *[0] * (width - len(table))] for table in tables], dtype=torch.int32),
        logits_rows=torch.arange(starts[-1]),
        rope_lens=torch.tensor(rope_lens, dtype=torch.int64),
    )


@dataclass
class Tokens:
    """Tokens, how many of them are in the cache, and the blocks that hold them."""

    tokens: list[int]
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    num_prompt: int = 0
    """Tokens of the prompt: rotary embeddings that depend on the length know it from the first chunk on."""
    place: int = NO_PLACE
    """Of its adapter."""
    state: list[int] = field(default_factory=list)
    """The pages of its recurrent state."""


def spoil(cache: KVCache) -> None:
    """Let all that lies on the device be NaN, in any dtype: whoever reads what was not written is found out."""
    cache.pool.fill_(0xFF)


class Driver:
    """A loaded model with a cache whose free blocks come in random order and are full of NaN."""

    def __init__(
        self, loaded: LoadedModel, device: Device, config: ExecutorConfig, seed: int = 0, gives_back: bool = False
    ) -> None:
        """gives_back: what lies before a window is spoilt after each step; then nothing can be shared."""
        self.loaded = loaded
        self.block_size = config.block_size
        self.cache: KVCache = device.new_kv_cache(loaded.geometry, config)
        self.forget()
        limits = limits_of(config, loaded.geometry, self.cache)
        self.runner = ModelRunner(loaded.model, device, self.cache, limits, adapters=loaded.adapters)
        num_tables, num_states = limits.num_tables, limits.max_num_seqs if limits.pages_per_state else 0
        own = (self.cache.num_device_blocks - num_states * limits.pages_per_state) // num_tables * num_tables
        self._free = list(range(own // num_tables))
        self._free_host = list(range(self.cache.num_host_blocks // num_tables))
        self._users: Counter[int] = Counter()
        random.Random(seed).shuffle(self._free)
        pages = list(range(self.cache.num_device_blocks))
        if num_tables > 1 or num_states:
            random.Random(seed).shuffle(pages)
        per_state = limits.pages_per_state
        self._state_pages = [pages[own + index * per_state :][:per_state] for index in range(num_states)]
        self._tail = limits.state_tail
        self._pages = torch.tensor(pages[:own]).view(-1, num_tables)
        self._host_pages = torch.arange(self.cache.num_host_blocks).view(-1, num_tables)
        self._windows = [group.window for group in limits.groups for _ in range(group.pages_per_block)]
        self._gives_back = gives_back

    def forget(self) -> None:
        """Let all that is cached be NaN."""
        spoil(self.cache)

    def release(self, sequence: Tokens) -> None:
        """Give a sequence's blocks back, to be reused last in first out; their content stays as garbage."""
        self._users.subtract(sequence.blocks)
        self._free.extend(block for block in sequence.blocks if not self._users[block])
        if sequence.state:
            self._state_pages.append(sequence.state)
        sequence.blocks, sequence.state, sequence.num_computed = [], [], 0

    def share(self, source: Tokens, target: Tokens) -> None:
        """Let a sequence that has nothing begin with what both begin with: whole blocks, all but its last token.

        What a prefix hit does, and for the rest of the common tokens what a fork does: a copy of the block they are in.
        """
        assert not target.blocks
        assert not self._state_pages, "a state is that of one position"
        pairs = zip(source.tokens[: source.num_computed], target.tokens[:-1], strict=False)
        common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        whole = common // self.block_size
        target.blocks = source.blocks[:whole]
        self._users.update(target.blocks)
        if common % self.block_size:
            target.blocks.append(self._take())
            self.cache.copy(self._pages[source.blocks[whole]], self._pages[target.blocks[whole]])
        target.num_computed = common

    def swap(self, sequence: Tokens) -> None:
        """Move a sequence's blocks to the host, let others overwrite them, and bring it back to other blocks."""
        kept, count = sequence.num_computed, len(sequence.blocks)
        assert not sequence.state, "states are not swapped here"
        host, old = self._free_host[:count], sequence.blocks
        self.cache.swap_out(self._pages[old].flatten(), self._host_pages[host].flatten())
        self.release(sequence)
        for layer in self.cache.layers:
            layer[self._pages[[block for block in old if not self._users[block]]].flatten()] = float("nan")
        random.Random(count).shuffle(self._free)
        sequence.blocks = [self._take() for _ in range(count)]
        self.cache.swap_in(self._host_pages[host].flatten(), self._pages[sequence.blocks].flatten())
        sequence.num_computed = kept

    def _give_back(self, sequence: Tokens) -> None:
        for window, pages in zip(self._windows, self._pages.t(), strict=True):
            first = max(0, sequence.num_computed - window + 1) // self.block_size if window else 0
            self.cache.pool[pages[sequence.blocks[:first]]] = 0xFF

    def _take(self) -> int:
        block = self._free.pop()
        self._users[block] += 1
        return block

    def step(self, work: Sequence[tuple[Tokens, int]], logits: str = "all") -> list[Tensor]:
        """Compute the next tokens of some sequences in one batch; return each one's logits [tokens or 1, vocabulary].

        `logits`: all, or last for those of each sequence's last token only, or asked for all, requested after the step.
        """
        chunks, tables, ids = [], [], []
        for sequence, count in work:
            end = sequence.num_computed + count
            assert count > 0
            assert end <= len(sequence.tokens)
            while len(sequence.blocks) * self.block_size < end:
                sequence.blocks.append(self._take())
            chunks.append((sequence.num_computed, count))
            tables.append(sequence.blocks)
            ids.extend(sequence.tokens[sequence.num_computed : end])
        prompts = [sequence.num_prompt for sequence, _ in work]
        by_table = [
            flat_batch(chunks, [pages[table].tolist() for table in tables], self.block_size, ids, prompts)
            for pages in self._pages.t()
        ]
        batch = by_table[0]
        if len(by_table) > 1:
            batch = replace(
                batch,
                slot_mapping=torch.stack([each.slot_mapping for each in by_table]),
                block_tables=torch.stack([each.block_tables for each in by_table], 1),
            )
        places = np.repeat([sequence.place for sequence, _ in work], [count for _, count in work])
        batch = replace(batch, adapter_places=places)
        if self._state_pages or work[0][0].state:
            batch = replace(batch, states=self._states([sequence for sequence, _ in work], chunks))
        if logits == "last":
            batch = replace(batch, logits_rows=batch.query_start_loc[1:].long() - 1)
        rows = batch.logits_rows.clone() if logits == "asked" else batch.logits_rows
        out = self.runner.logits(self.runner.forward(batch), rows).clone()
        for sequence, count in work:
            sequence.num_computed += count
            if self._gives_back:
                self._give_back(sequence)
        sizes = [1 if logits == "last" else count for _, count in work]
        return list(torch.split(out, sizes))

    def _states(self, sequences: Sequence[Tokens], chunks: Sequence[tuple[int, int]]) -> StepStates:
        for sequence in sequences:
            sequence.state = sequence.state or self._state_pages.pop()
        tables = np.array([sequence.state for sequence in sequences], np.int32)
        context, counts = np.array(chunks).T
        assert self.cache.state_headers is not None
        folded = self.cache.state_headers.read(tables, context)
        check_folded(np.arange(len(chunks)), folded, context, self._tail)
        none = torch.zeros(0, dtype=torch.int32)
        return StepStates(
            tables=torch.from_numpy(tables),
            context_lens=torch.tensor(context, dtype=torch.int32),
            folded=torch.tensor(folded, dtype=torch.int32),
            ends=torch.tensor(context + np.maximum(0, counts - self._tail), dtype=torch.int32),
            save_starts=torch.zeros(len(chunks) + 1, dtype=torch.int32),
            save_positions=none,
            save_tables=none.view(0, tables.shape[1]),
            saved_slots=np.zeros(0, np.int64),
        )


class Model:
    """A checkpoint loaded once, from which drivers of any block size are made."""

    def __init__(self, folder: Path, adapter_sizes: AdapterSizes | None = None, **options: Any) -> None:
        self.options = {
            "model": str(folder), "device": "cpu", "num_gpu_blocks": 128, "num_threads": NUM_THREADS,
            "max_num_batched_tokens": 2048, **options,
        }  # fmt: skip
        self.device = make_device(ExecutorConfig(**self.options))
        self.loaded = load_model(ExecutorConfig(**self.options), self.device, adapter_sizes)
        self._alone: Driver | None = None

    def driver(self, seed: int = 0, gives_back: bool = False, **options: Any) -> Driver:
        """Return a driver with a cache of its own."""
        return Driver(self.loaded, self.device, ExecutorConfig(**{**self.options, **options}), seed, gives_back)

    def whole(self, tokens: list[int]) -> Tensor:
        """Return the logits [tokens, vocabulary] of tokens computed alone, in one chunk."""
        self._alone = self._alone or self.driver()
        sequence = Tokens(tokens)
        (logits,) = self._alone.step([(sequence, len(tokens))])
        self._alone.release(sequence)
        self._alone.forget()
        return logits
