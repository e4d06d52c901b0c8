"""The passes that make the drafts of a step, before the step's tensors are built: of a draft model, or of a head."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from executor_svc.gpu.drafts.drafting import Layout
from executor_svc.gpu.graphs import Replayer
from executor_svc.gpu.kernels.slots.slots import StepSizes
from executor_svc.gpu.runner import GpuRunner
from executor_svc.gpu.sampling.sampler import GpuSampler, SamplingMetadata
from executor_svc.gpu.slots.device_slots import DeviceSlots


class PassModel(Protocol):
    """What computes the logits of drafts: `draft_model.GpuDraftModel` or `head.GpuHead`. Calls do not wait.

    Logits are [L, vocab] float32 by the target's ids, and the most likely token [L] of each row, -1 for one that cannot
    be sampled.
    """

    is_head: bool
    """As of `kernels.slots.draft_passes`."""

    def prepare(self, layout: Layout, max_seq_len: int) -> None:
        """Enqueue what the step that was staged last needs beside its drafts; called before these are made."""
        ...

    def first(self, sizes: StepSizes, num_seqs: int, max_seq_len: int, *, drawn: bool) -> tuple[Tensor, Tensor]:
        """Enqueue the first pass over num_seqs sequences of a step of these sizes; drawn: whether logits are read."""
        ...

    def next(self, num_seqs: int, max_seq_len: int, *, drawn: bool) -> tuple[Tensor, Tensor]:
        """Enqueue the pass whose tensors were built last."""
        ...


class DraftPasses:
    """Makes the drafts of steps: as one graph for decodes with usual parameters, else by repeated launches.

    A pass samples with the target's parameters and its noise at each position, as `sampling.sample_step` does, and as
    if the drafts before were known: they count for penalties, bad words and `min_tokens`.
    """

    def __init__(self, model: PassModel, runner: GpuRunner, slots: DeviceSlots, sampler: GpuSampler) -> None:
        """Capture the graphs: of greedy passes, and of draws with limits of likelihood, as `SamplingRounds` does."""
        self._model, self._slots, self._sampler, self._runner = model, slots, sampler, runner
        self._sizes = frozenset(runner.drafted)
        self._greedy = runner.replayer(runner.drafted, partial(self._run_alone, SamplingMetadata.greedy()))
        drawn = [] if sampler.slots.draws_on_host else runner.drafted
        self._drawn = runner.replayer(drawn, partial(self._run_alone, SamplingMetadata.of_draws()))

    @torch.inference_mode()
    def precede(self, layout: Layout, metadata: SamplingMetadata, max_seq_len: int) -> None:
        """Enqueue the drafts of the step that was staged last, before its tensors are built.

        metadata: of its sampling slots. max_seq_len: of its longest sequence, with drafts.
        """
        sizes, num_seqs = layout.sizes, len(layout.scheduled.slots)
        self._model.prepare(layout, max_seq_len)
        if not sizes.num_drafts:
            return
        usual = not (metadata.edited or metadata.floored or metadata.counted)
        if usual and sizes in self._sizes:
            replayer: Replayer = self._drawn if metadata.drawn else self._greedy
            replayer.replay(sizes)
        else:
            longest = self._runner.longest(max_seq_len)
            passes = sizes, num_seqs, min(layout.most_drafts, sizes.num_drafts), longest
            self._runner.run_part(("passes", passes, metadata.kinds), partial(self._run, *passes, metadata))

    @torch.inference_mode()
    def _run_alone(self, metadata: SamplingMetadata, sizes: StepSizes) -> None:
        self._run(sizes, sizes.num_seqs, sizes.num_drafts, self._slots.limits.max_model_len, metadata)

    def _run(
        self, sizes: StepSizes, num_seqs: int, num_passes: int, max_seq_len: int, metadata: SamplingMetadata
    ) -> None:
        inputs = self._slots.inputs(StepSizes.decode(num_seqs))
        drawn = metadata.edited or metadata.drawn
        logits, best = self._model.first(sizes, num_seqs, max_seq_len, drawn=drawn)
        for index in range(1, num_passes + 1):
            self._sampler.choose(logits, best, inputs, metadata, guessed=True)
            tokens, errors = self._sampler.rows(inputs)
            if metadata.counted:
                self._sampler.slots.count_guessed(inputs, tokens)
            self._slots.launch_next_pass(num_seqs, index, tokens, errors, head=self._model.is_head)
            if index < num_passes:
                logits, best = self._model.next(num_seqs, max_seq_len, drawn=drawn)
        if metadata.counted:
            self._sampler.slots.recount(self._slots.staged_slots(num_seqs), max_seq_len)
