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
from executor_svc.device.kv_cache import KVCache
from executor_svc.gpu.device_slots import DeviceSlots
from executor_svc.gpu.kernels.attention.plan import GpuAttentionPlan
from executor_svc.gpu.kernels.slots.slots import StepSizes
from executor_svc.models.decoder import Decoder
from executor_svc.models.recorded import RecordedModel
from executor_svc.plan.limits import Limits


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
            layers=kv_cache.draft_layers, name="draft ",
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
