"""A draft model on the GPU of its target: it keeps up with the target's steps, and drafts in passes before a step.

Its keys and values are further layers of the target's blocks. It runs over the tensors of each step as its target does,
so that every block has both. Of decodes with drafts it does not: its own passes compute the same tokens, see
`kernels.slots.draft_passes`. Gaps, of a token here or there, make a draft a little worse and no token wrong: one is
left where a sequence ends with all its drafts accepted, and where it pauses then.
"""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.device.interface import Device
from executor_svc.device.kernels import Kernels
from executor_svc.device.kv_cache import KVCache
from executor_svc.gpu.drafts.drafting import Layout
from executor_svc.gpu.kernels.attention.plan import GpuAttentionPlan
from executor_svc.gpu.kernels.slots.draft_passes import FIRST_TOKENS
from executor_svc.gpu.kernels.slots.slots import StepSizes
from executor_svc.gpu.skinny.decodes import ProbedDecodes
from executor_svc.gpu.skinny.probe import compare_fused
from executor_svc.gpu.skinny.recording import EitherKernels
from executor_svc.gpu.slots.device_slots import DeviceSlots, is_decode
from executor_svc.models.decoder import Decoder
from executor_svc.models.recorded import RecordedModel
from executor_svc.plan.limits import Limits


class GpuDraftModel:
    """A draft model over the step tensors of its target's slots; calls enqueue work and do not wait.

    Implements `drafts.passes.PassModel`.
    """

    is_head = False
    tokens_of_pass = FIRST_TOKENS
    """The most tokens that a pass computes of a sequence."""

    def __init__(self, model: Decoder, device: Device, kv_cache: KVCache, limits: Limits, slots: DeviceSlots) -> None:
        """Record the model over its own layers of the cache, which are cleared: what a gap holds is a number."""
        self._model, self._slots = model, slots
        self._lacks = False
        """Whether the last step's passes have left tokens that the next step's first pass computes."""
        inputs = slots.inputs(slots.buffers.most)
        self._recorded = RecordedModel(
            model, device.kernels, kv_cache, limits, inputs.token_ids, inputs.positions, inputs.logits_rows,
            is_draft=True, name="draft ",
        )  # fmt: skip
        self._plans = [plan for plan in self._recorded.plans if isinstance(plan, GpuAttentionPlan)]
        for plan in self._plans:
            plan.read_from(slots.buffers)
        self._layers = kv_cache.draft_layers
        self._clear()

    def _clear(self) -> None:
        for layer in self._layers:
            layer.view(torch.uint8).zero_()

    @torch.inference_mode()
    def compare(self, kernels: Kernels) -> None:
        """Compare the fused layers of its decodes, if it has some; once its target has decided how they are launched.

        Raises KernelError.
        """
        if isinstance(kernels, EitherKernels):
            limits, slots = self._slots.limits, self._slots
            compare_fused(kernels, ProbedDecodes(
                self._recorded.hidden, lambda count: slots.inputs(StepSizes.decode(count)), self._run_decode,
                self._layers, min(limits.max_num_seqs, slots.buffers.most.num_tokens), limits.max_model_len,
            ))  # fmt: skip
            self._clear()

    def _run_decode(self, num_seqs: int) -> None:
        self.run(StepSizes(num_seqs, num_seqs, 0, 0), 1, self._slots.limits.max_model_len)

    def run(self, sizes: StepSizes, max_query_len: int, max_seq_len: int) -> tuple[Tensor, Tensor]:
        """Enqueue keys, values and hidden states of what is in the step tensors, and its logits if sizes has some.

        Returns the logits and most likely tokens as of `PassModel`.
        """
        inputs = self._slots.inputs(sizes)
        self._model.fill_ropes(inputs.positions, inputs.rope_lens, self._recorded.ropes)
        for plan in self._plans:
            plan.set_sizes(sizes.num_seqs, sizes.num_tokens, max_query_len, max_seq_len)
        self._recorded.run(sizes.num_tokens, sizes.num_logits)
        return self._recorded.sampled_logits[: sizes.num_logits], self._recorded.best[: sizes.num_logits]

    def prepare(self, layout: Layout, max_seq_len: int) -> None:
        """As in `PassModel`: before a step without drafts, compute what the last drafts have left."""
        if layout.sizes.num_drafts:
            self._lacks = is_decode(layout.scheduled)
            return
        num_seqs = len(layout.scheduled.slots)
        if self._lacks and num_seqs * FIRST_TOKENS <= self._slots.buffers.most.num_tokens:
            self._first(layout.sizes, num_seqs, 0, max_seq_len)
        self._lacks = False

    def first(self, sizes: StepSizes, num_seqs: int, max_seq_len: int, *, drawn: bool) -> tuple[Tensor, Tensor]:
        """As in `PassModel`."""
        return self._first(sizes, num_seqs, num_seqs, max_seq_len)

    def next(self, num_seqs: int, max_seq_len: int, *, drawn: bool) -> tuple[Tensor, Tensor]:
        """As in `PassModel`."""
        return self.run(StepSizes.decode(num_seqs), 1, max_seq_len)

    def _first(self, sizes: StepSizes, num_seqs: int, num_logits: int, max_seq_len: int) -> tuple[Tensor, Tensor]:
        """Enqueue the first pass, whose keys and values are all that it gives without logits."""
        self._slots.launch_first_pass(sizes, num_seqs, head=False)
        return self.run(StepSizes(num_seqs * FIRST_TOKENS, num_seqs, num_logits, num_logits), FIRST_TOKENS, max_seq_len)
