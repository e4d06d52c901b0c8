"""A model's operations, recorded once over fixed tensors: a step fills the tensors and runs the programs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from executor_svc.device.adapters import AdapterRows
from executor_svc.device.kernels import Kernels, Program
from executor_svc.device.kv_cache import KVCache
from executor_svc.device.states import StateKernels, StatePlan
from executor_svc.models.adapters.places import ModelAdapters
from executor_svc.models.base import CausalLM
from executor_svc.models.decoder import Decoder
from executor_svc.plan.arrays import IntArray
from executor_svc.plan.limits import Limits


@dataclass(frozen=True, slots=True)
class _RecordedStep:
    """A recorded step and its results, and the recorded logits of requested rows."""

    hidden: Tensor
    states: Tensor | None
    sampled_logits: Tensor
    best: Tensor
    forward: Program
    requested_logits: Tensor
    logits: Program


@dataclass(frozen=True, slots=True)
class AdapterTables:
    """The rows with adapters: of a step's tokens, of its sampled rows, and of requested rows."""

    tokens: AdapterRows
    sampled: AdapterRows
    requested: AdapterRows


class RecordedModel:
    """Tensors for the largest step, on the model's device, and the programs over them.

    With adapters each program has a twin that adds them. Both write the same results, so that a step without adapters
    runs what it would run in a model that has none.
    """

    def __init__(
        self,
        model: CausalLM,
        kernels: Kernels,
        kv_cache: KVCache,
        limits: Limits,
        token_ids: Tensor,
        positions: Tensor,
        sampled: Tensor,
        *,
        is_draft: bool = False,
        state_layers: Sequence[int] = (),
        name: str = "",
        adapters: ModelAdapters | None = None,
    ) -> None:
        """Record steps over token_ids and positions [max_tokens], and logits of the rows `sampled`; all int64.

        is_draft: the model has the cache's draft layers, not the target's. state_layers: a head reads the
        states of these layers, as `Decoder.forward_with_states` takes them. name: names a model that runs beside
        another on the same kernels: recordings with the same names of rows overwrite each other's results.
        adapters: those that the model was built with.
        """
        self._rows, self._sampled, self._requested = (f"{name}{rows}" for rows in ("rows", "sampled", "requested"))
        self._model, self._kernels, self._adapters = model, kernels, adapters
        self._layers = kv_cache.draft_layers if is_draft else kv_cache.layers
        self._layer_tables = kv_cache.draft_tables if is_draft else kv_cache.tables
        self._state_layers = state_layers
        self._memories = () if is_draft else kv_cache.states
        most, max_seqs = limits.max_num_batched_tokens, limits.max_num_seqs
        self.kv_cache = kv_cache  # kept alive: the programs hold its addresses
        self.token_ids, self.positions = token_ids, positions
        self.sampled, self.requested = sampled, torch.zeros_like(sampled)
        """Rows of hidden states: those whose logits the step computes, and those requested after it."""
        self.ropes = model.new_ropes(self.positions)
        self.plans = [
            kernels.new_attention_plan(shape, limits.max_model_len, most, max_seqs, limits.num_tables)
            for shape in model.attention_shapes
        ]
        self.state_plan: StatePlan | None = None
        """Of the recurrent layers; None: the model has none."""
        if self._memories:
            assert isinstance(kernels, StateKernels), "this device has no recurrent layers"
            self.state_plan = kernels.new_state_plan(limits.pages_per_state, limits.state_tail, most, max_seqs)
        self._base = self._current = self._record(None)
        self.hidden, self.sampled_logits = self._base.hidden, self._base.sampled_logits
        self.best, self.requested_logits = self._base.best, self._base.requested_logits
        self.states = self._base.states
        """[max_tokens, len(state_layers) * hidden]; None without state_layers."""
        self._adapted, self._tables = self._base, None
        if adapters is not None:
            self._tables = AdapterTables(*(adapters.new_rows(size) for size in (most, len(sampled), len(sampled))))
            self._adapted = self._record(self._tables)
            assert self._adapted.hidden.data_ptr() == self.hidden.data_ptr()
            assert self._adapted.sampled_logits.data_ptr() == self.sampled_logits.data_ptr()

    def set_adapters(self, places: IntArray | None, sampled_places: IntArray | None) -> bool:
        """Set the adapter place of each of the next step's tokens and sampled rows; NO_PLACE or None: none.

        Returns whether a row has one: then the step and `run_logits` after it run the programs with adapters.
        """
        self._current = self._base
        if self._tables is None or places is None:
            return False
        self._tables.tokens.fill(places)
        if not self._tables.tokens.num_tiles:
            return False
        assert sampled_places is not None
        self._tables.sampled.fill(sampled_places)
        self._current = self._adapted
        return True

    @property
    def adapter_tables(self) -> AdapterTables | None:
        """The tables of the programs with adapters; None: there are none."""
        return self._tables

    def use_adapters(self, used: bool) -> None:
        """Choose the programs with adapters, or those without, for tables that the caller fills on the device."""
        assert self._tables is not None or not used
        self._current = self._adapted if used else self._base

    def run(self, num_tokens: int, num_sampled: int) -> None:
        """Compute hidden states of num_tokens tokens, then logits and best tokens of num_sampled rows.

        0 skips a part.
        """
        tiles = {plan.name: plan.num_tiles for plan in self.plans}
        if self.state_plan is not None:
            tiles[self.state_plan.name] = self.state_plan.num_tiles
        if self._tables is not None:
            tiles |= {rows.name: rows.num_tiles for rows in (self._tables.tokens, self._tables.sampled)}
        self._current.forward.run(**{self._rows: num_tokens, self._sampled: num_sampled}, **tiles)

    def run_logits(self, num_requested: int, places: IntArray | None = None) -> None:
        """Compute the logits of the first num_requested rows of `requested`.

        places: their adapter places, which count where the last `set_adapters` found adapters; after `use_adapters`
        None.
        """
        tiles = {}
        if self._tables is not None:
            rows = self._tables.requested
            if self._current is self._adapted and places is not None:
                rows.fill(places)
            tiles[rows.name] = rows.num_tiles
        self._current.logits.run(**{self._requested: num_requested}, **tiles)

    def _record(self, tables: AdapterTables | None) -> _RecordedStep:
        kernels, model = self._kernels, self._model
        with kernels.recording() as recording:
            recording.rows = self._rows
            with self._with(None if tables is None else tables.tokens):
                hidden, states = self._record_forward()
            recording.rows = self._sampled
            with self._with(None if tables is None else tables.sampled):
                sampled_logits = model.logits(kernels.take_rows(hidden, self.sampled))
            best = kernels.argmax(sampled_logits)
            forward = recording.program()
        with kernels.recording() as recording:
            recording.rows = self._requested
            with self._with(None if tables is None else tables.requested):
                requested_logits = model.logits(kernels.take_rows(hidden, self.requested))
            logits = recording.program()
        return _RecordedStep(hidden, states, sampled_logits, best, forward, requested_logits, logits)

    def _record_forward(self) -> tuple[Tensor, Tensor | None]:
        model, ropes, layers, tables = self._model, self.ropes, self._layers, self._layer_tables
        recurrent = self._memories, self.state_plan
        if self._state_layers:
            assert isinstance(model, Decoder)
            read = self._state_layers
            return model.forward_with_states(self.token_ids, ropes, layers, self.plans, read, tables, *recurrent)
        return model.forward(self.token_ids, ropes, layers, self.plans, tables, *recurrent), None

    def _with(self, rows: AdapterRows | None) -> AbstractContextManager[None]:
        if rows is None:
            return nullcontext()
        assert self._adapters is not None
        return self._adapters.on(rows)
