"""Runs a model over step tensors that stay on a GPU: decodes by graphs of fixed sizes, the rest launch by launch."""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.cuda_graphs import CudaGraphs, DirectReplayer, Replayer, fitting, graph_sizes
from executor_svc.device import Device
from executor_svc.gpu_slots import DeviceSlots
from executor_svc.kernels.gpu.attention_plan import GpuAttentionPlan
from executor_svc.kernels.gpu.slots import StepSizes
from executor_svc.kv_cache import KVCache
from executor_svc.loader import LoadedModel
from executor_svc.plan import Limits
from executor_svc.recorded_model import RecordedModel
from executor_svc.slots import Scheduled


class GpuRunner:
    """A model and its cache, for one stream and one thread; everything is enqueued and nothing waited for."""

    def __init__(
        self, loaded: LoadedModel, device: Device, kv_cache: KVCache, limits: Limits, slots: DeviceSlots
    ) -> None:
        """Record the model over the tensors of `slots`, and capture its graphs where the device has such."""
        self._model = loaded.model
        self._slots = slots
        self._most_logits = limits.max_num_seqs
        self._most = slots.buffers.most
        inputs = slots.inputs(self._most)
        self._recorded = RecordedModel(
            loaded.model, device.kernels, kv_cache, limits, inputs.token_ids, inputs.positions, inputs.logits_rows
        )
        self._plans = [plan for plan in self._recorded.plans if isinstance(plan, GpuAttentionPlan)]
        for plan in self._plans:
            plan.read_from(slots.buffers)
        sizes = [min(size, limits.max_num_seqs) for size in graph_sizes(limits.max_num_seqs)]
        make: type[CudaGraphs | DirectReplayer] = CudaGraphs if device.torch_device.type == "cuda" else DirectReplayer
        self._replayer: Replayer = make(sizes, self._decode)

    def sizes_of(self, scheduled: Scheduled) -> StepSizes:
        """Return what a step is padded to: of decodes alone, to the next size that has a graph."""
        counts = scheduled.num_tokens
        num_seqs, num_logits, num_rows = len(counts), int(scheduled.samples.sum()), len(scheduled.sampling_slots)
        if num_seqs == num_logits == num_rows == int(counts.sum()):
            size = fitting(self._replayer.sizes, num_seqs)
            if size is not None:
                return StepSizes.decode(size)
        return StepSizes(int(counts.sum()), num_seqs, num_logits, num_rows)

    @torch.inference_mode()
    def forward(self, scheduled: Scheduled, sizes: StepSizes, max_seq_len: int) -> tuple[Tensor, Tensor]:
        """Enqueue a step: its inputs, keys and values, hidden states, logits.

        max_seq_len: of its longest sequence, this step's tokens included. Returns its logits [L, vocab] float32, and
        the likeliest token of each [L] int64, -1 where it can not be sampled.
        """
        one_each = self._slots.stage(scheduled, sizes)
        if sizes == StepSizes.decode(sizes.num_seqs) and sizes.num_seqs in self._replayer.sizes:
            self._replayer.replay(sizes.num_seqs)
        else:
            self._slots.launch_build(sizes, one_each)
            inputs = self._slots.inputs(sizes)
            self._model.fill_ropes(inputs.positions, inputs.rope_lens, self._recorded.ropes)
            for plan in self._plans:
                plan.become(sizes.num_seqs, sizes.num_tokens, int(scheduled.num_tokens.max()), max_seq_len)
            self._recorded.run(sizes.num_tokens, sizes.num_logits)
        return self._recorded.sampled_logits[: sizes.num_logits], self._recorded.best[: sizes.num_logits]

    @torch.inference_mode()
    def logits(self, rows: Tensor) -> Tensor:
        """Return the logits [R, vocab_size] fp32 of these rows [R] int64 of the last step's hidden states."""
        num_rows = rows.shape[0]
        if num_rows > self._most_logits:
            return torch.cat([self.logits(part).clone() for part in rows.split(self._most_logits)])
        self._recorded.asked[:num_rows].copy_(rows, non_blocking=True)
        self._recorded.run_logits(num_rows)
        return self._recorded.asked_logits[:num_rows]

    @torch.inference_mode()
    def _decode(self, size: int) -> None:
        """Enqueue a step of one token for each of so many sequences, some of which may be empty."""
        sizes = StepSizes.decode(size)
        self._slots.launch_build(sizes, one_each=True)
        inputs = self._slots.inputs(sizes)
        self._model.fill_ropes(inputs.positions, inputs.rope_lens, self._recorded.ropes)
        for plan in self._plans:
            plan.become(size, size, 1, self._slots.limits.max_model_len)
        self._recorded.run(size, size)
