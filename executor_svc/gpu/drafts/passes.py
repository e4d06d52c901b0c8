"""The passes of a draft model that make the drafts of a step, before the step's tensors are built."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from executor_svc.gpu.device_slots import DeviceSlots, is_decode
from executor_svc.gpu.drafts.drafting import Layout
from executor_svc.gpu.drafts.model import GpuDraftModel
from executor_svc.gpu.graphs import Replayer
from executor_svc.gpu.kernels.slots.draft_passes import FIRST_TOKENS
from executor_svc.gpu.kernels.slots.slots import StepSizes
from executor_svc.gpu.runner import GpuRunner
from executor_svc.gpu.sampling.sampler import GpuSampler, SamplingMetadata


class DraftPasses:
    """Makes the drafts of steps: as one graph for decodes with usual parameters, else launch by launch.

    A pass samples with the target's parameters and its noise at each position, as `worker.draft_sampling` does, and as
    if the drafts before were known: they count for penalties, bad words and `min_tokens`.
    """

    def __init__(self, model: GpuDraftModel, runner: GpuRunner, slots: DeviceSlots, sampler: GpuSampler) -> None:
        """Capture the graphs: of greedy passes, and of draws with limits of likelihood, as `SamplingRounds` does."""
        self._model, self._slots, self._sampler = model, slots, sampler
        self._lacks = False
        """Whether the last step's passes have left tokens that the next step's first pass computes."""
        self._sizes = frozenset(runner.drafted)
        self._greedy, self._drawn = (
            runner.replayer(runner.drafted, partial(self._run_alone, metadata))
            for metadata in (SamplingMetadata.greedy(), SamplingMetadata.of_draws())
        )

    @torch.inference_mode()
    def precede(self, layout: Layout, metadata: SamplingMetadata, max_seq_len: int) -> None:
        """Enqueue the drafts of the step that was staged last, before its tensors are built.

        metadata: of its sampling slots. max_seq_len: of its longest sequence, with drafts.
        """
        sizes, num_seqs = layout.sizes, len(layout.scheduled.slots)
        if not sizes.num_drafts:
            if self._lacks and num_seqs * FIRST_TOKENS <= self._slots.buffers.most.num_tokens:
                self._first(sizes, num_seqs, 0, max_seq_len)
            self._lacks = False
            return
        self._lacks = is_decode(layout.scheduled)
        usual = not (metadata.edited or metadata.floored or metadata.counted)
        if usual and sizes in self._sizes:
            replayer: Replayer = self._drawn if metadata.drawn else self._greedy
            replayer.replay(sizes)
        else:
            self._run(sizes, num_seqs, min(layout.most_drafts, sizes.num_drafts), max_seq_len, metadata)

    @torch.inference_mode()
    def _run_alone(self, metadata: SamplingMetadata, sizes: StepSizes) -> None:
        self._run(sizes, sizes.num_seqs, sizes.num_drafts, self._slots.limits.max_model_len, metadata)

    def _run(
        self, sizes: StepSizes, num_seqs: int, num_passes: int, max_seq_len: int, metadata: SamplingMetadata
    ) -> None:
        one_each = StepSizes.decode(num_seqs)
        inputs = self._slots.inputs(one_each)
        logits, best = self._first(sizes, num_seqs, num_seqs, max_seq_len)
        for index in range(1, num_passes + 1):
            self._sampler.choose(logits, best, inputs, metadata, guessed=True)
            tokens, errors = self._sampler.rows(inputs)
            if metadata.counted:
                self._sampler.slots.count_guessed(inputs, tokens)
            self._slots.launch_next_pass(num_seqs, index, tokens, errors)
            if index < num_passes:
                logits, best = self._model.run(one_each, 1, max_seq_len)
        if metadata.counted:
            self._sampler.slots.recount(self._slots.staged_slots(num_seqs), max_seq_len)

    def _first(self, sizes: StepSizes, num_seqs: int, num_logits: int, max_seq_len: int) -> tuple[Tensor, Tensor]:
        """Enqueue the first pass, whose keys and values are all that it gives without logits."""
        self._slots.launch_first_pass(sizes, num_seqs)
        return self._model.run(
            StepSizes(num_seqs * FIRST_TOKENS, num_seqs, num_logits, num_logits), FIRST_TOKENS, max_seq_len
        )
