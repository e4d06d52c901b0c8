"""Small steps of a model at the start, for comparing its operations: a prompt, a long and a short decode, drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from executor_svc.config import ExecutorConfig
from executor_svc.device.adapters import NO_PLACE
from executor_svc.device.interface import Device
from executor_svc.device.kv_cache import DraftLayers
from executor_svc.gpu.checks.adapters import CheckedAdapters
from executor_svc.gpu.checks.recorded_head import RecordedHead
from executor_svc.models.base import CausalLM
from executor_svc.models.decoder import Decoder
from executor_svc.models.heads.head import DraftHead
from executor_svc.models.loading import LoadedModel
from executor_svc.models.recorded import RecordedModel
from executor_svc.plan.description import limits_of
from executor_svc.plan.limits import Limits

LONG, SHORT = 300, 21
"""Tokens of the two sequences: of several segments of split decodes, and of few keys. Together they are more rows than
any tile has."""
_DRAFTS = 3
_WITHOUT = 7
"""Of so many rows with adapters one has none."""
_MOST = 10
"""Tokens of a sequence after its prompt."""


class CheckedTokens(NamedTuple):
    """Tokens of a sequence that a step computes."""

    sequence: int
    context: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ModelSteps:
    """A model that is recorded for small steps, over a cache of two sequences of its own."""

    model: CausalLM | DraftHead
    recorded: RecordedModel | RecordedHead
    limits: Limits
    lengths: tuple[int, int]
    """Of the prompts."""

    @classmethod
    def of(
        cls,
        loaded: LoadedModel,
        device: Device,
        config: ExecutorConfig,
        draft: DraftLayers | None,
        draft_model: Decoder | DraftHead | None = None,
        long: int = LONG,
    ) -> ModelSteps:
        """Record; draft_model: this one, or this head, over the draft layers.

        long: tokens of the longer prompt, or fewer for a model of shorter sequences.
        """
        longest = max(2, min(long, loaded.geometry.max_model_len - _MOST))
        lengths = longest, min(SHORT, longest)
        blocks = sum(-(-(length + _MOST) // config.block_size) for length in lengths)
        sizes = {
            "num_gpu_blocks": blocks, "num_cpu_blocks": 0, "max_num_seqs": 2 * (1 + _DRAFTS),
            "max_num_batched_tokens": sum(lengths),
        }  # fmt: skip
        config = config.model_copy(update=sizes)
        pools = device.new_kv_cache(loaded.own_geometry, config, 0, draft)
        pools.pool.zero_()
        limits = limits_of(config, loaded.geometry, pools)
        where = device.torch_device
        tokens, rows = limits.max_num_batched_tokens, limits.max_num_seqs
        inputs = (torch.zeros(size, dtype=torch.int64, device=where) for size in (tokens, tokens, rows))
        if draft_model is not None and not isinstance(draft_model, Decoder):
            width = len(draft_model.state_layers) * loaded.geometry.hidden_size
            return cls(draft_model, RecordedHead(draft_model, device, pools, limits, width, *inputs), limits, lengths)
        model = loaded.model if draft_model is None else draft_model
        adapters = loaded.adapters if draft_model is None else None
        recorded = RecordedModel(
            model, device.kernels, pools, limits, *inputs, is_draft=draft_model is not None, adapters=adapters
        )
        return cls(model, recorded, limits, lengths)

    @property
    def has_adapters(self) -> bool:
        """Whether there is a recording with adapters, beside that without."""
        return isinstance(self.recorded, RecordedModel) and self.recorded.adapter_tables is not None

    def steps(self) -> list[tuple[str, list[CheckedTokens]]]:
        """Return the steps in their order, each with a name."""
        long, short = self.lengths
        return [
            ("a prompt", [CheckedTokens(0, 0, long), CheckedTokens(1, 0, short)]),
            ("a long decode", [CheckedTokens(0, long, 1)]),
            ("a short decode", [CheckedTokens(1, short, 1)]),
            ("drafts", [CheckedTokens(0, long + 1, 1 + _DRAFTS), CheckedTokens(1, short + 1, 1 + _DRAFTS)]),
        ]

    def fill(self, chunks: Sequence[CheckedTokens], adapters: CheckedAdapters | None = None) -> dict[str, int] | None:
        """Set the inputs of a step; returns the number of rows of its operations by name.

        adapters: those that rows have; returns None for a step without a row that has one.
        """
        recorded, limits = self.recorded, self.limits
        positions = torch.cat([torch.arange(each.context, each.context + each.num_tokens) for each in chunks])
        owners = torch.tensor([each.sequence for each in chunks]).repeat_interleave(
            torch.tensor([each.num_tokens for each in chunks])
        )
        starts = torch.tensor([0, *(each.num_tokens for each in chunks)]).cumsum(0).to(torch.int32)
        lens = torch.tensor([each.context + each.num_tokens for each in chunks], dtype=torch.int32)
        tables = torch.stack([self._pages(each.sequence) for each in chunks])
        pages = self._pages_of(owners)
        at = pages[torch.arange(len(owners)), :, positions // limits.block_size]
        slots = at * limits.block_size + (positions % limits.block_size)[:, None]
        sampled = (
            (starts[1:] - 1).long() if len(chunks) < 2 or chunks[0].context == 0 else torch.arange(int(starts[-1]))
        )
        tokens = (positions * 7 + owners * 3 + 5) % limits.vocab_size
        for into, given in (
            (recorded.token_ids, tokens), (recorded.positions, positions), (recorded.sampled, sampled),
        ):  # fmt: skip
            into[: len(given)].copy_(given)
        lens_of_tokens, where = (
            torch.maximum(torch.tensor(self.lengths)[owners], positions + 1),
            recorded.positions.device,
        )
        self.model.fill_ropes(positions.to(where), lens_of_tokens.to(where), recorded.ropes)
        for plan in recorded.plans:
            mapping = slots.T.contiguous() if limits.num_tables > 1 else slots[:, 0].contiguous()
            plan.fill(mapping, starts, lens, tables.to(torch.int32))
        if recorded.state_plan is not None:
            self._fill_states(chunks, starts)
        if isinstance(recorded, RecordedHead):
            recorded.fill_states(len(owners))
        if adapters is not None and not self._fill_adapters(adapters, owners, positions, sampled):
            return None
        return self._counts(len(owners), len(sampled))

    def _fill_adapters(self, adapters: CheckedAdapters, owners: Tensor, positions: Tensor, sampled: Tensor) -> bool:
        """Give rows the adapters of their sequences, and some of them none; return whether a row has one."""
        assert isinstance(self.recorded, RecordedModel)
        without = owners >= adapters.num_places
        if len(owners.unique()) > 1:
            without |= positions % _WITHOUT == _WITHOUT - 1
        places = torch.where(without, NO_PLACE, owners).numpy()
        of_sampled = places[sampled.numpy()]
        tables = self.recorded.adapter_tables
        assert tables is not None
        adapters.rows = {id(tables.tokens): places, id(tables.sampled): of_sampled}
        return self.recorded.set_adapters(places, of_sampled) and tables.sampled.num_tiles > 0

    def run(self, counts: Mapping[str, int] | None) -> None:
        """Run the step whose inputs are set, with the rows that `fill` has returned."""
        assert counts is not None
        assert isinstance(self.recorded, RecordedModel)
        self.recorded.run(counts["rows"], counts["sampled"])

    def _pages(self, sequence: int) -> Tensor:
        """Return a sequence's pages [tables, blocks], its blocks after those of the sequences before it."""
        limits = self.limits
        blocks = [-(-(length + _MOST) // limits.block_size) for length in self.lengths]
        own = torch.arange(max(blocks)).clamp(max=blocks[sequence] - 1) + sum(blocks[:sequence])
        return own * limits.num_tables + torch.arange(limits.num_tables)[:, None]

    def _pages_of(self, owners: Tensor) -> Tensor:
        return torch.stack([self._pages(0), self._pages(1)])[owners]

    def _fill_states(self, chunks: Sequence[CheckedTokens], starts: Tensor) -> None:
        limits, plan = self.limits, self.recorded.state_plan
        assert plan is not None
        size, end = limits.pages_per_state, limits.num_device_blocks
        tables = [list(range(end - (1 + each.sequence) * size, end - each.sequence * size)) for each in chunks]
        context = torch.tensor([each.context for each in chunks], dtype=torch.int32)
        whole = torch.tensor(tables, dtype=torch.int32)
        none = torch.zeros(len(chunks) + 1, dtype=torch.int32)
        plan.fill(starts, context, (context - limits.state_tail).clamp(min=0), whole, none, none[:0], whole[:0])

    def _counts(self, num_tokens: int, num_sampled: int) -> dict[str, int]:
        recorded = self.recorded
        tiles = {plan.name: plan.num_tiles for plan in recorded.plans}
        if recorded.state_plan is not None:
            tiles[recorded.state_plan.name] = recorded.state_plan.num_tiles
        return {"rows": num_tokens, "sampled": num_sampled, **tiles}
