"""Runs a model over step tensors that stay on a GPU: by graphs of fixed sizes, by repeated launches, or by new ones."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from executor_svc.batch.scheduled import Scheduled
from executor_svc.device.interface import Device
from executor_svc.device.kernels import Kernels
from executor_svc.device.kv_cache import KVCache
from executor_svc.gpu.graphs import (
    CudaGraphs,
    DirectReplayer,
    Replayer,
    adapted_decode_sizes,
    decode_sizes,
    draft_sizes,
    mixed_sizes,
    next_power,
    repeated_sizes,
    row_sizes,
    smallest_fitting,
)
from executor_svc.gpu.kernels.attention.config import DRAFTS_ROWS
from executor_svc.gpu.kernels.attention.plan import GpuAttentionPlan
from executor_svc.gpu.kernels.slots.slots import StepSizes
from executor_svc.gpu.kernels.states.plan import GpuStatePlan
from executor_svc.gpu.launches.repeated import RepeatedParts
from executor_svc.gpu.launches.watching import are_watched
from executor_svc.gpu.skinny.decodes import ProbedDecodes
from executor_svc.gpu.skinny.dependent_probe import probe_dependent
from executor_svc.gpu.skinny.probe import compare_fused, probe_choices
from executor_svc.gpu.skinny.recording import EitherKernels
from executor_svc.gpu.slots.device_slots import DeviceSlots, is_decode
from executor_svc.gpu.slots.slot_adapters import StepAdapters
from executor_svc.models.loading import LoadedModel
from executor_svc.models.recorded import RecordedModel
from executor_svc.plan.limits import Limits


@dataclass(frozen=True, slots=True)
class _Fixed:
    """Steps of fixed sizes: replayed whole, or their hidden states from existing inputs."""

    decodes: list[StepSizes]
    whole: frozenset[StepSizes]
    """Decodes, and decodes with drafts."""
    replayer: Replayer

    def decode_sizes_of(self, num_seqs: int) -> StepSizes:
        """Return the sizes of a decode of so many sequences: the next ones with a graph, or its own."""
        place = bisect_left(self.decodes, num_seqs, key=lambda each: each.num_seqs)
        return self.decodes[place] if place < len(self.decodes) else StepSizes.decode(num_seqs)


_KEPT_RESULTS = 256
"""Numbers of rows of logits whose views are kept: to make them takes 4 us."""
_SHORT = 1024
"""Sequences of up to so many tokens are launched alike in steps with prompts: all KV heads at once."""


class Ran(NamedTuple):
    """How a step was run, for a head that follows it."""

    sizes: StepSizes
    """Padded; those of hidden states alone have no logits."""
    replayed: bool
    """Whether its hidden states were those of fixed sizes."""
    max_query_len: int
    max_seq_len: int
    """Upper bounds, as its launches have them if it was not replayed."""


class GpuRunner:
    """A model and its cache, for one stream and one thread; calls enqueue work and do not wait.

    With adapters the model is recorded twice, and steps of fixed sizes have graphs of their own.
    """

    _adapted: StepAdapters | None = None
    """Of the step that runs."""

    def __init__(
        self,
        loaded: LoadedModel,
        device: Device,
        kv_cache: KVCache,
        limits: Limits,
        slots: DeviceSlots,
        captures: bool = True,
        follower: Callable[[StepSizes, int, int], object] | None = None,
        state_layers: Sequence[int] = (),
    ) -> None:
        """Record the model over the tensors of `slots`; captures: with CUDA graphs for steps of fixed sizes.

        follower: enqueues the same steps for a draft model, as `GpuDraftModel.run` does, except decodes with drafts.
        state_layers: a head reads the states of these layers, as `Decoder.forward_with_states` takes them.
        """
        self._follower = follower
        self._has_group = loaded.ranks is not None
        self._model = loaded.model
        self._slots = slots
        self._max_logits = limits.max_num_seqs
        self._most = slots.buffers.most
        inputs = slots.inputs(self._most)
        self._recorded = RecordedModel(
            loaded.model, device.kernels, kv_cache, limits, inputs.token_ids, inputs.positions, inputs.logits_rows,
            adapters=loaded.adapters, state_layers=state_layers,
        )  # fmt: skip
        self.states = self._recorded.states
        """[max_tokens, len(state_layers) * hidden], of the step that ran last; None without state_layers."""
        self.ran: Ran | None = None
        """How the last step was run; None before the first, and without state_layers."""
        self._plans = [plan for plan in self._recorded.plans if isinstance(plan, GpuAttentionPlan)]
        self._recurrent, self._pool = self._read_steps(), kv_cache.pool
        self._probe(device.kernels, kv_cache.layers)
        self._step_adapters = None if loaded.adapters is None else StepAdapters(slots, self._recorded)
        decodes, adapted, self._mixed = [], [], []
        self.drafted: list[StepSizes] = []
        """Sizes of decodes with drafts that have a graph."""
        if captures:
            most = min(limits.max_num_seqs, self._most.num_tokens)
            decodes, adapted = decode_sizes(most), adapted_decode_sizes(most)
            self.drafted = draft_sizes(most, limits.max_drafts)
            num_read = loaded.geometry.num_parameters - loaded.num_unread
            self._mixed = mixed_sizes(self._most.num_tokens, self._most.num_seqs, num_read)
        self.replayed = list(dict.fromkeys((*decodes, *adapted, *self.drafted, *self._mixed)))
        """All sizes of steps, or of their hidden states, that have a graph."""
        self.repeated: RepeatedParts | None = None
        """Of steps that no graph holds; None: their launches are new each time."""
        self._padded, self._rows = self._mixed, list[int]()
        self._hidden = frozenset(self._mixed)
        """Replayed sizes of the computation of hidden states from existing inputs."""
        self.decodes = sorted({*decodes, *adapted}, key=lambda sizes: sizes.num_seqs)
        """Sizes of decodes without drafts that have a graph."""
        self._graphs = captures and device.torch_device.type == "cuda"
        self._without = self._with = self._current = self._fixed(decodes, adapted=False)
        if self._step_adapters is not None:
            self._with = self._fixed(adapted, adapted=True)
        self.use_adapters(False)
        if captures and not self._has_group and are_watched(device.torch_device):
            self._repeat_others()

    def _read_steps(self) -> GpuStatePlan | None:
        """Let the plans read steps from the tensors of the slots; returns that of recurrent layers, if any."""
        slots, recurrent = self._slots, self._recorded.state_plan
        for plan in self._plans:
            plan.read_from(slots.buffers)
        if not isinstance(recurrent, GpuStatePlan):
            return None
        recurrent.read_from(slots.buffers, slots.state, slots.states.tables, slots.states.saves)
        return recurrent

    def _probe(self, kernels: Kernels, kv_layers: Sequence[Tensor]) -> None:
        """Let decodes be computed by fused layers where this GPU is faster so; before any graph is captured.

        First what fused layers launch is decided, so that what is measured and compared is what will run.
        """
        if not isinstance(kernels, EitherKernels):
            return
        longest = self._slots.limits.max_model_len
        decodes = ProbedDecodes(
            self._recorded.hidden,
            lambda count: self._slots.inputs(StepSizes.decode(count)),
            lambda count: self._run_hidden(StepSizes.decode(count), 1, longest, drafted=True),
            kv_layers,
            min(self._max_logits, self._most.num_tokens),
            longest,
        )
        probe_dependent(kernels, decodes)
        probe_choices(kernels, decodes)
        compare_fused(kernels, decodes)

    def use_adapters(self, used: bool) -> None:
        """Say whether the next step has adapters: those of its slots' places."""
        self._current = self._with if used else self._without
        self._recorded.use_adapters(used)
        self._adapted = self._step_adapters if used else None

    def results(self, sizes: StepSizes) -> tuple[Tensor, Tensor]:
        """Return the logits [L, vocab] float32 of a step of these sizes, and the most likely token of each row.

        The tokens are [L] int64, -1 for a row that cannot be sampled; both are the same memory each time.
        """
        return self._results_of(sizes.num_logits)

    @cached_property
    def _results_of(self) -> Callable[[int], tuple[Tensor, Tensor]]:
        """Returns the logits and most likely tokens of so many rows."""
        recorded = self._recorded
        return lru_cache(_KEPT_RESULTS)(lambda count: (recorded.sampled_logits[:count], recorded.best[:count]))

    def replayer(self, sizes: Sequence[StepSizes], step: Callable[[StepSizes], None]) -> Replayer:
        """Return what enqueues a step, or a part of it, of one of these sizes: with CUDA graphs if there are any."""
        if not (self._graphs and sizes):
            return DirectReplayer(sizes, step)
        return CudaGraphs(sizes, step, has_group=True) if self._has_group else CudaGraphs(sizes, step)

    def sizes_of(self, scheduled: Scheduled) -> StepSizes:
        """Return the padded sizes of a step: the next sizes with a graph, or its own.

        Of decodes with drafts its own: graphs of `drafted` may have other places for drafts.
        """
        if scheduled.is_one_each and not len(scheduled.candidates):
            return self._current.decode_sizes_of(len(scheduled.slots))
        counts = scheduled.num_tokens
        num_tokens, num_seqs, num_rows = int(counts.sum()), len(counts), len(scheduled.sampling_slots)
        num_drafts = 0 if scheduled.num_drafts is None else int(scheduled.num_drafts.max())
        sizes = StepSizes(num_tokens, num_seqs, len(scheduled.logits_slots), num_rows, num_drafts)
        if sizes == StepSizes.decode(num_seqs):
            return self._current.decode_sizes_of(num_seqs)
        if num_tokens == num_seqs:
            return sizes
        repeats = self._repeats
        found = smallest_fitting(self._padded if repeats else self._mixed, StepSizes(num_tokens, num_seqs, 0, 0))
        if found is None:
            return sizes
        num_logits = sizes.num_logits
        if repeats and not num_drafts:
            num_logits, num_rows = self._padded_rows(num_logits), self._padded_rows(num_rows)
        return replace(found, num_logits=num_logits, num_rows=num_rows, num_drafts=num_drafts)

    @property
    def _repeats(self) -> bool:
        return self.repeated is not None and self.repeated.usable

    def _padded_rows(self, num_rows: int) -> int:
        place = bisect_left(self._rows, num_rows)
        return self._rows[place] if num_rows and place < len(self._rows) else num_rows

    @torch.inference_mode()
    def forward(
        self,
        scheduled: Scheduled,
        sizes: StepSizes,
        max_seq_len: int,
        most_drafts: int = 0,
        make_drafts: Callable[[], None] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Enqueue a step: drafts, inputs, keys and values, hidden states, logits; returns its `results`.

        scheduled: with places for drafts, of which a slot has most_drafts at most. max_seq_len: of its longest
        sequence, with this step's tokens. make_drafts: enqueues the drafts of the step, once it is staged.
        """
        one_each = self._slots.stage(scheduled, sizes, most_drafts)
        if make_drafts is not None:
            make_drafts()
        hidden, replayed, lengths = sizes, True, (1 + sizes.num_drafts, max_seq_len)
        if sizes in self._current.whole:
            self._current.replayer.replay(sizes)
        else:
            self._slots.launch_build(sizes, one_each)
            hidden = StepSizes(sizes.num_tokens, sizes.num_seqs, 0, 0)
            # Graphs of hidden states capture attention with the tiles of prompts; decodes have other tiles.
            replayed = hidden in self._hidden and not one_each
            if replayed:
                self._current.replayer.replay(hidden)
            else:
                lengths = self._lengths(hidden, int(scheduled.num_tokens.max()), max_seq_len)
                drafted = sizes.num_drafts > 0 and is_decode(scheduled)
                part = "hidden", self._adapted is not None, hidden, lengths, drafted
                self.run_part(part, partial(self._run_hidden, hidden, *lengths, drafted))
            self.run_part(("logits", self._adapted is not None, sizes.num_logits), partial(self._run_logits, sizes))
        if self.states is not None:
            self.ran = Ran(hidden, replayed, *lengths)
        return self.results(sizes)

    def run_part(self, part: Hashable, enqueue: Callable[[], object]) -> None:
        """Enqueue a part of a step that no graph holds; what it launches must depend on `part` alone."""
        if self.repeated is None:
            enqueue()
        else:
            self.repeated.run(part, enqueue)

    def _lengths(self, sizes: StepSizes, max_query_len: int, max_seq_len: int) -> tuple[int, int]:
        """Return upper bounds of a step's lengths: few different ones if launches are repeated."""
        if not self._repeats:
            return max_query_len, max_seq_len
        if max_query_len > DRAFTS_ROWS:  # no tile for few tokens holds them
            return sizes.num_tokens, self.longest(max(max_seq_len, _SHORT))
        return next_power(max_query_len, sizes.num_tokens), self.longest(max_seq_len)

    def longest(self, max_seq_len: int) -> int:
        """Return an upper bound of sequences of at most max_seq_len tokens, as launches have it."""
        return next_power(max_seq_len, self._slots.limits.max_model_len) if self._repeats else max_seq_len

    @torch.inference_mode()
    def _repeat_others(self) -> None:
        """Let steps without graphs repeat their launches; try it in one of them whose sequences are padding."""
        self.repeated = RepeatedParts()
        most, limits = self._most, self._slots.limits
        longest = self._mixed[-1].num_tokens if self._mixed else 0
        others = repeated_sizes(most.num_tokens, most.num_seqs, longest)
        self._padded, self._rows = [*self._mixed, *others], row_sizes(min(limits.max_num_seqs, most.num_tokens))
        for sizes in others[:1]:
            inputs = self._slots.inputs(sizes)
            inputs.token_ids.copy_(torch.arange(sizes.num_tokens) % limits.vocab_size)
            hidden = partial(self._run_hidden, sizes, sizes.num_tokens, limits.max_model_len)
            self.repeated.probe(hidden, self._recorded.hidden[: sizes.num_tokens])

    @torch.inference_mode()
    def logits(self, rows: Tensor) -> Tensor:
        """Return the logits [R, vocab_size] fp32 of these rows [R] int64 of the last step's hidden states."""
        num_rows = rows.shape[0]
        if num_rows > self._max_logits:
            return torch.cat([self.logits(part).clone() for part in rows.split(self._max_logits)])
        self._recorded.requested[:num_rows].copy_(rows, non_blocking=True)
        if self._adapted is not None:
            self._adapted.sort_requested(self._recorded.requested[:num_rows])
        self._recorded.run_logits(num_rows)
        return self._recorded.requested_logits[:num_rows]

    def _fixed(self, decodes: list[StepSizes], adapted: bool) -> _Fixed:
        whole = [*decodes, *self.drafted]
        return _Fixed(
            decodes, frozenset(whole), self.replayer([*whole, *self._mixed], partial(self._run_fixed, adapted))
        )

    @torch.inference_mode()
    def _run_fixed(self, adapted: bool, sizes: StepSizes) -> None:
        """Enqueue a step that has a graph: a whole decode step, or only the hidden states of another step."""
        self._recorded.use_adapters(adapted)
        self._adapted = self._step_adapters if adapted else None
        longest = self._slots.limits.max_model_len
        if not sizes.num_logits:
            self._run_hidden(sizes, sizes.num_tokens, longest)
            return
        self._slots.launch_build(sizes, one_each=not sizes.num_drafts)
        self._run_hidden(sizes, 1 + sizes.num_drafts, longest, sizes.num_drafts > 0)
        self._run_logits(sizes)

    def _run_hidden(self, sizes: StepSizes, max_query_len: int, max_seq_len: int, drafted: bool = False) -> None:
        """Enqueue keys, values and hidden states of the step in the input tensors; drafted: a decode with drafts."""
        inputs = self._slots.inputs(sizes)
        if self._adapted is not None:
            self._adapted.sort_tokens(sizes)
        self._model.fill_ropes(inputs.positions, inputs.rope_lens, self._recorded.ropes)
        for plan in self._plans:
            plan.set_sizes(sizes.num_seqs, sizes.num_tokens, max_query_len, max_seq_len)
        if self._recurrent is not None:
            self._recurrent.begin(sizes.num_seqs, sizes.num_tokens, self._pool)
        self._recorded.run(sizes.num_tokens, 0)
        if self._recurrent is not None:
            self._recurrent.end(self._pool)
        if self._follower is not None and not drafted:
            self._follower(StepSizes(sizes.num_tokens, sizes.num_seqs, 0, 0), max_query_len, max_seq_len)

    def _run_logits(self, sizes: StepSizes) -> None:
        """Enqueue the logits of the step whose hidden states are enqueued."""
        if self._adapted is not None:
            self._adapted.sort_logits(sizes)
        self._recorded.run(0, sizes.num_logits)
