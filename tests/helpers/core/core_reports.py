"""What the core has reported of every request, and what it must report."""

from __future__ import annotations

from cadenza_common.plan.result import LogprobColumns
from scheduler_svc.core.outputs import StepOutputs
from scheduler_svc.core.sequences.beams import Hypothesis
from scheduler_svc.core.types import ExecutorSpec, FinishDetail, RequestKey, RequestSpec
from tests.helpers.core.core_checks import check_beams
from tests.helpers.core.core_histories import MAX_MODEL_LEN
from tests.helpers.core.deltas import deltas
from tests.helpers.core.known import known_sample
from tests.helpers.core.lane_rig import first_pages

ENDED_EARLY = (FinishDetail.ABORTED, FinishDetail.EXECUTOR_ERROR)
Sample = tuple[RequestKey, int]


class CoreReports:
    """Part of a state machine of the core: takes its outputs, and checks each sample that ends."""

    def clear_reports(self) -> None:
        """Forget the requests and outputs of a history before."""
        self.specs: dict[RequestKey, RequestSpec] = {}
        self.outputs: dict[Sample, list[int]] = {}
        self.finishes: dict[Sample, FinishDetail] = {}
        self.aborted: set[RequestKey] = set()
        self.prompt_logprobs: dict[RequestKey, list[LogprobColumns]] = {}
        self.hypotheses: dict[RequestKey, list[Hypothesis]] = {}
        self.poisons: dict[RequestKey, int] = {}  # requests that kill their executor, each at a position
        self.pools: list[ExecutorSpec] = []
        """Limits of all executors that there were."""

    def take(self, outputs: StepOutputs) -> None:
        for output in outputs.hypotheses:
            found = Hypothesis(output.token_ids, output.score, output.cumulative_logprob, output.finish)
            self.hypotheses.setdefault(output.group.key, []).append(found)
        for delta in deltas(outputs):
            sample = delta.key, delta.sample_index
            assert sample not in self.finishes, "outputs of a finished sample"
            self.outputs[sample] += delta.token_ids
            if delta.prompt_logprobs is not None:
                self.prompt_logprobs[delta.key].append(delta.prompt_logprobs)
            if delta.finish is not None:
                self.finishes[sample] = delta.finish.detail
        for sample in dict.fromkeys(
            (delta.key, delta.sample_index) for delta in deltas(outputs) if delta.finish is not None
        ):
            self.check_sample(*sample)

    def check_sample(self, key: RequestKey, index: int) -> None:
        """An ended sample has the tokens that it must have, and ends as it must."""
        spec, output, detail = self.specs[key], self.outputs[key, index], self.finishes[key, index]
        assert detail is not FinishDetail.EXECUTOR_ERROR or key in self.poisons, "an innocent request is ended"
        if spec.beams:
            if index == 0:
                self.check_beams(spec, detail)
            return
        tokens, known_detail = known_sample(spec, MAX_MODEL_LEN, index)
        assert output == tokens[: len(output)]
        if detail is FinishDetail.KV_CAPACITY:
            sizes = {_capacity(pool) for pool in self.pools}
            assert len(spec.prompt_token_ids) + len(output) - 1 in sizes
        elif detail not in ENDED_EARLY:
            assert (output, detail) == (tokens, known_detail)

    def check_beams(self, spec: RequestSpec, detail: FinishDetail) -> None:
        """All of a search's results come at once."""
        found = self.hypotheses.get(spec.key)
        if found is None:
            assert detail in (*ENDED_EARLY, FinishDetail.KV_CAPACITY)
        else:
            check_beams(spec, found, self.pools, was_aborted=spec.key in self.aborted)


def _capacity(pool: ExecutorSpec) -> int:
    """Number of tokens of one sequence that a pool holds."""
    num_blocks = 0
    while first_pages(pool, num_blocks * pool.block_size, 1) <= pool.num_blocks and num_blocks < MAX_MODEL_LEN:
        num_blocks += 1
    return num_blocks * pool.block_size
