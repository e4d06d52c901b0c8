"""A head on the GPU of its target: rows over the target's states behind each step, and drafting passes before it.

Behind a step's commit the head computes a row for each of the step's tokens, from the states that the target has left
in memory and the tokens that are known by then: nothing waits for the host. Its keys and values are further layers of
the target's blocks, at the places of the step's own. The result of the row before a sequence's last token is kept by
slot; the first draft is sampled from it, and each further one from a row over the result before it.

Every step is followed, so a block has the head's keys and values wherever it has the target's. Two single rows may be
others than they should be: before the end of a prefix hit, and at a fork, which shares its source's row. They make a
draft a little worse, and no token wrong.
"""

from __future__ import annotations

from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from cadenza_common.plan.plan import StepPlan
from executor_svc.batch.scheduled import Scheduled
from executor_svc.device.interface import Device
from executor_svc.device.kv_cache import KVCache
from executor_svc.gpu.drafts.drafting import Layout
from executor_svc.gpu.kernels.attention.plan import GpuAttentionPlan
from executor_svc.gpu.kernels.rows import take_rows
from executor_svc.gpu.kernels.sampling.draft_vocabulary import spread, to_target
from executor_svc.gpu.kernels.slots.head_rows import keep_results, read_next_tokens
from executor_svc.gpu.kernels.slots.slots import StepSizes
from executor_svc.gpu.runner import GpuRunner, Ran
from executor_svc.gpu.slots.device_slots import DeviceSlots
from executor_svc.models.heads.head import DraftHead
from executor_svc.plan.arrays import BoolArray, ints
from executor_svc.plan.limits import Limits


class GpuHead:
    """A head over the step tensors of its target's slots; calls enqueue work and do not wait.

    Implements `drafts.passes.PassModel`.
    """

    is_head = True
    tokens_of_pass = 1
    """The most tokens that a pass computes of a sequence."""

    def __init__(
        self, head: DraftHead, device: Device, kv_cache: KVCache, limits: Limits, slots: DeviceSlots, runner: GpuRunner
    ) -> None:
        """Record the head over its own layers of the cache, which are cleared: what a gap holds is a number.

        runner: of the target, with the states that the head reads.
        """
        self._head, self._slots, self._runner = head, slots, runner
        for layer in kv_cache.draft_layers:
            layer.view(torch.uint8).zero_()
        kernels, inputs = device.kernels, slots.inputs(slots.buffers.most)
        max_tokens, max_seqs = limits.max_num_batched_tokens, limits.max_num_seqs
        self._ropes = head.new_ropes(inputs.positions)
        self._plans = [
            cast(
                GpuAttentionPlan,
                kernels.new_attention_plan(shape, limits.max_model_len, max_tokens, max_seqs, limits.num_tables),
            )
            for shape in head.attention_shapes
        ]
        for plan in self._plans:
            plan.read_from(slots.buffers)
        states = runner.states
        assert states is not None
        with kernels.recording() as recording:
            recording.rows = "head states"
            self._hidden = head.combine(states)
            self._combine = recording.program()
        with kernels.recording() as recording:
            recording.rows = "head rows"
            layers, tables = kv_cache.draft_layers, kv_cache.draft_tables
            output = head.forward(inputs.token_ids, self._hidden, self._ropes, layers, self._plans, tables)
            assert output.data_ptr() == self._hidden.data_ptr(), "a row's result takes its place, for the next pass"
            self._forward = recording.program()
        with kernels.recording() as recording:
            recording.rows = "head logits"
            self._logits = head.logits(self._hidden[:max_seqs])
            self._best = kernels.argmax(self._logits)
            self._sample = recording.program()
        self._results = torch.zeros(limits.num_slots, head.hidden_size, dtype=states.dtype, device=states.device)
        self._target_ids, self._wide = head.target_ids, self._logits
        if self._target_ids is not None:
            self._wide = torch.full((len(self._logits), head.vocab_size), float("-inf"), device=states.device)
        self._new = np.ones(limits.num_slots, np.bool_)
        self._replayer = runner.replayer(runner.replayed, self._follow_alone)

    # ------------------------------------------------------------ behind a step

    @torch.inference_mode()
    def follow(self, ran: Ran) -> None:
        """Enqueue the head's rows of the step that ran last, whose tokens are committed."""
        if ran.replayed:
            self._replayer.replay(ran.sizes)
        else:
            ran_with = ran.sizes, ran.max_query_len, ran.max_seq_len
            self._runner.run_part(("head", ran_with), partial(self._follow, *ran_with))

    @torch.inference_mode()
    def _follow_alone(self, sizes: StepSizes) -> None:
        most = 1 + sizes.num_drafts if sizes.num_logits else sizes.num_tokens
        self._follow(sizes, most, self._slots.limits.max_model_len)

    def _follow(self, sizes: StepSizes, max_query_len: int, max_seq_len: int) -> None:
        slots, num_tokens = self._slots, sizes.num_tokens
        read_next_tokens(slots.state, slots.buffers, sizes)
        self._combine.run(**{"head states": num_tokens})
        self._run(num_tokens, sizes.num_seqs, max_query_len, max_seq_len)
        keep_results(self._hidden[:num_tokens], self._results, slots.state, slots.buffers, sizes)

    def _run(self, num_tokens: int, num_seqs: int, max_query_len: int, max_seq_len: int) -> None:
        """Enqueue the rows of what is in the step tensors: their hidden states are replaced by their results."""
        inputs = self._slots.inputs(StepSizes(num_tokens, num_seqs, 0, 0))
        self._head.fill_ropes(inputs.positions, inputs.rope_lens, self._ropes)
        for plan in self._plans:
            plan.set_sizes(num_seqs, num_tokens, max_query_len, max_seq_len)
        self._forward.run(**{"head rows": num_tokens})

    # ------------------------------------------------------------ passes

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile what only draws launch, so that no step waits for it."""
        self._logits_of(1, drawn=True)

    def prepare(self, layout: Layout, max_seq_len: int) -> None:
        """As in `PassModel`: a head leaves nothing."""

    def first(self, sizes: StepSizes, num_seqs: int, max_seq_len: int, *, drawn: bool) -> tuple[Tensor, Tensor]:
        """As in `PassModel`: from the results of the slots' last rows."""
        self._slots.launch_first_pass(sizes, num_seqs, head=True)
        take_rows(self._results, self._slots.buffers.logits_rows[:num_seqs], self._hidden[:num_seqs])
        return self._logits_of(num_seqs, drawn)

    def next(self, num_seqs: int, max_seq_len: int, *, drawn: bool) -> tuple[Tensor, Tensor]:
        """As in `PassModel`: from the results of the pass before."""
        self._run(num_seqs, num_seqs, 1, max_seq_len)
        return self._logits_of(num_seqs, drawn)

    def _logits_of(self, num_rows: int, drawn: bool) -> tuple[Tensor, Tensor]:
        self._sample.run(**{"head logits": num_rows})
        logits, wide, best = self._logits[:num_rows], self._wide[:num_rows], self._best[:num_rows]
        if self._target_ids is not None:
            to_target(best, self._target_ids)
            if drawn:
                spread(logits, self._target_ids, wide)
        return wide, best

    # ------------------------------------------------------------ slots without a result, on the host

    def clear(self) -> None:
        """Forget all sequences."""
        self._new.fill(True)

    def admit(self, plan: StepPlan) -> None:
        """Note a plan that the slots have applied: the results of its new sequences are not there yet."""
        self._new[[sequence.slot for sequence in plan.admitted]] = True
        self._new[ints(plan.fork_slots)] = True

    def launched(self, scheduled: Scheduled) -> None:
        """Note a step, which will be followed."""
        self._new[scheduled.slots] = False

    @property
    def without_result(self) -> BoolArray:
        """[num_slots]: slots that no step has computed since their admission, and which may have no drafts yet."""
        return self._new
