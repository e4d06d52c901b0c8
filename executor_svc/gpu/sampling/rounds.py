"""The choices of a step: sampled and committed in rounds of a token for each slot, one more than there are drafts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from executor_svc.batch.step_result import RowCandidates
from executor_svc.gpu.graphs import Replayer
from executor_svc.gpu.kernels.slots.slots import StepSizes
from executor_svc.gpu.runner import GpuRunner
from executor_svc.gpu.sampling.sampler import GpuSampler, SamplingMetadata, StepLogprobs
from executor_svc.gpu.sampling.state import SlotSamplingState
from executor_svc.gpu.slots.device_slots import DeviceSlots
from executor_svc.gpu.step_ranks import GpuStepRanks

HostChoice = Callable[[], RowCandidates | None]
"""Chooses tokens on the host; returns the candidates of those that report some."""


class SamplingRounds:
    """Enqueues the rounds of a step, from its logits to the commits.

    Of decodes as one graph, for usual parameters; others by repeated launches, if the host does not choose.
    """

    def __init__(
        self,
        runner: GpuRunner,
        slots: DeviceSlots,
        sampling: SlotSamplingState,
        sampler: GpuSampler,
        ranks: GpuStepRanks,
    ) -> None:
        """Capture the graphs: of greedy rounds, of draws with limits of likelihood, and of all but logprobs.

        Each does for any slots whose parameters ask for less; the last is for steps without drafts.

        ranks: the others take the tokens of the one that samples.
        """
        self._runner, self._slots, self._sampling, self._sampler = runner, slots, sampling, sampler
        self._ranks = ranks
        # No slot takes a token while rounds are captured.
        slots.buffers.by_row.fill_(-1)
        sizes = [*runner.decodes, *runner.drafted]
        self._sizes = frozenset(sizes)
        self._greedy = runner.replayer(sizes, partial(self._run_alone, SamplingMetadata.greedy()))
        drawn, edited = ([], []) if sampling.draws_on_host else (sizes, runner.decodes)
        self._drawn = runner.replayer(drawn, partial(self._run_alone, SamplingMetadata.of_draws()))
        self._edited = runner.replayer(edited, partial(self._run_alone, SamplingMetadata.of_edits()))

    def enqueue(
        self, sizes: StepSizes, metadata: SamplingMetadata, logprobs: StepLogprobs | None, on_host: HostChoice | None
    ) -> RowCandidates | None:
        """Enqueue the rounds of the step that ran last.

        logprobs: buffers for those that are requested. on_host: called when the first round has chosen, to overwrite
        tokens; returns candidates, and so does this.
        """
        if on_host is not None or (logprobs is not None and not logprobs.is_kept):
            return self._run(sizes, metadata, logprobs, on_host)
        if logprobs is None and (replayer := self._graph_of(sizes, metadata)) is not None:
            replayer.replay(sizes)
            return None
        rows = sizes.num_seqs, sizes.num_logits, sizes.num_rows, sizes.num_drafts
        part = "rounds", rows, metadata.kinds, 0 if logprobs is None else logprobs.most
        self._runner.run_part(part, partial(self._run, sizes, metadata, logprobs, None))
        return None

    def _graph_of(self, sizes: StepSizes, metadata: SamplingMetadata) -> Replayer | None:
        if sizes not in self._sizes:
            return None
        if metadata.edited or metadata.floored or metadata.counted:
            return None if sizes.num_drafts else self._edited
        if not metadata.drawn:
            return self._greedy
        # Without drafts, draws that nothing limits take less time launched as they are.
        return self._drawn if sizes.num_drafts or metadata.filtered else None

    @torch.inference_mode()
    def _run_alone(self, metadata: SamplingMetadata, sizes: StepSizes) -> None:
        self._run(sizes, metadata, None, None)

    def _run(
        self, sizes: StepSizes, metadata: SamplingMetadata, logprobs: StepLogprobs | None, on_host: HostChoice | None
    ) -> RowCandidates | None:
        inputs, (logits, best) = self._slots.inputs(sizes), self._runner.results(sizes)
        candidates = None
        for round in range(1 + sizes.num_drafts):
            if self._ranks.samples:
                self._sampler.choose(logits, best, inputs, metadata)
            if round == 0 and on_host is not None:
                candidates = on_host()
            self._ranks.share_first(*self._sampler.rows(inputs))
            if logprobs is not None:
                self._sampler.compute_logprobs(logits, inputs, metadata, logprobs.of_round(round))
            self._slots.launch_commit(sizes, *self._sampler.rows(inputs), round)
            if metadata.counted:
                self._sampling.count_taken(inputs)
        return candidates
