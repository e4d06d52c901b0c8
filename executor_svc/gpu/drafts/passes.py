"""The passes of a draft model that make the drafts of a step, before the step's tensors are built.

The draft model is on the GPU of its target: it keeps up with the target's steps, and drafts in passes before a step.
Its keys and values are further layers of the target's blocks. It runs over the tensors of each step as its target does,
so that every block has both. Of decodes with drafts it does not: its own passes compute the same tokens, see
`kernels.slots.draft_passes`. Gaps, of a token here or there, make a draft a little worse and no token wrong: one is
left where a sequence ends with all its drafts accepted, and where it pauses then.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from executor_svc.device.interface import Device
from executor_svc.device.kv_cache import KVCache
from executor_svc.gpu.drafts.drafting import Layout
from executor_svc.gpu.graphs import Replayer
from executor_svc.gpu.kernels.attention.plan import GpuAttentionPlan
from executor_svc.gpu.kernels.slots.draft_passes import FIRST_TOKENS
from executor_svc.gpu.kernels.slots.slots import StepSizes
from executor_svc.gpu.runner import GpuRunner
from executor_svc.gpu.sampling.sampler import GpuSampler, SamplingMetadata
from executor_svc.gpu.slots.device_slots import DeviceSlots, is_decode
from executor_svc.models.decoder import Decoder
from executor_svc.models.recorded import RecordedModel
from executor_svc.plan.limits import Limits


class DraftPasses:
    """Makes the drafts of steps: as one graph for decodes with usual parameters, else launch by launch.

    A pass samples with the target's parameters and its noise at each position, as `sampling.sample_step` does, and as
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


class GpuDraftModel:
    """A draft model over the step tensors of its target's slots; calls enqueue work and do not wait."""

    def __init__(self, model: Decoder, device: Device, kv_cache: KVCache, limits: Limits, slots: DeviceSlots) -> None:
        """Record the model over its own layers of the cache, which are cleared: what a gap holds is a number."""
        self._model, self._slots = model, slots
        for layer in kv_cache.draft_layers:
            layer.view(torch.uint8).zero_()
        inputs = slots.inputs(slots.buffers.most)
        self._recorded = RecordedModel(
            model, device.kernels, kv_cache, limits, inputs.token_ids, inputs.positions, inputs.logits_rows,
            is_draft=True, name="draft ",
        )  # fmt: skip
        self._plans = [plan for plan in self._recorded.plans if isinstance(plan, GpuAttentionPlan)]
        for plan in self._plans:
            plan.read_from(slots.buffers)

    def run(self, sizes: StepSizes, max_query_len: int, max_seq_len: int) -> tuple[Tensor, Tensor]:
        """Enqueue keys, values and hidden states of what is in the step tensors, and its logits if sizes has some.

        Returns the logits [L, vocab] float32 and the most likely token [L] of each row, -1 for one that cannot be
        sampled.
        """
        inputs = self._slots.inputs(sizes)
        self._model.fill_ropes(inputs.positions, inputs.rope_lens, self._recorded.ropes)
        for plan in self._plans:
            plan.set_sizes(sizes.num_seqs, sizes.num_tokens, max_query_len, max_seq_len)
        self._recorded.run(sizes.num_tokens, sizes.num_logits)
        return self._recorded.sampled_logits[: sizes.num_logits], self._recorded.best[: sizes.num_logits]
