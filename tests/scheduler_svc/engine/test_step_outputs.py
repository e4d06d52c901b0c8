"""The engine applies the core's outputs to live requests: several samples, beams, cache hits, preemptions."""

from __future__ import annotations

import pytest

from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan.result import TokenLogprobs
from cadenza_common.plan.sampling import SequenceSampling
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.lanes.planned_step import PlannedStep
from scheduler_svc.core.outputs import BeamOutput, StepOutputs
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.core.types import BeamSpec, Finish, FinishDetail, RequestSpec
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.plan_loop.ports import BestOf, EngineRequest
from scheduler_svc.requests.detokenizer import StoppedText
from tests.helpers.models.toy_tokenizers import byte_level
from tests.helpers.scheduler.fake_clock import FakeClock

TOKENIZER = byte_level()
EOS = Finish(FinishDetail.EOS)
LONG = Finish(FinishDetail.MAX_TOKENS)


class Stage:
    """An engine with one request; the test takes the part of the core."""

    def __init__(self, *, best_of=None, text=False, **spec):
        self.engine = Engine(SchedulerConfig(), Scheduler(), FakeClock())
        spec = RequestSpec("r", (5, 6, 7), SequenceSampling(num_logprobs=0 if best_of else None), **spec)
        make_text = (lambda: StoppedText(TOKENIZER)) if text else None
        self.live = LiveRequest(EngineRequest(spec, make_text, best_of=best_of), arrival_ns=1)
        self.engine._live[spec.key] = self.live
        self.group = SequenceGroup(spec, 0, 0.0, 64)
        self.sequences = [Sequence(index, self.group, index) for index in range(spec.num_sequences)]
        self.notified = []
        self.live.subscribe(self.notified.append)

    def outputs(self, tokens=(), ends=(), hypotheses=(), logprob=None):
        """tokens: (sample, token id); ends: (sample, finish)."""
        sampled = [self.sequences[index] for index, _ in tokens]
        entries = {sequence: (TokenLogprobs(logprob, 1, (), ()),) for sequence in sampled if logprob is not None}
        finishes = {self.sequences[index]: finish for index, finish in ends}
        beams = [BeamOutput(self.group, *fields) for fields in hypotheses]
        self.engine.on_outputs(
            StepOutputs(sampled, [token for _, token in tokens], entries, finishes, hypotheses=beams)
        )

    def planned(self, step_id=1, **fields):
        self.engine.on_planned(PlannedStep(StepPlan(step_id, 0), 0.0, **fields))

    @property
    def ids(self):
        return [sample.token_ids for sample in self.live.samples]


def test_each_sample_gets_its_own_tokens_and_end() -> None:
    stage = Stage(num_samples=3)
    stage.outputs([(0, 10), (1, 11), (2, 12)])
    stage.outputs([(0, 20), (2, 22)], [(0, LONG), (1, EOS)])
    assert stage.ids == [[10, 20], [11], [12, 22]]
    assert [sample.finish for sample in stage.live.samples] == [LONG, EOS, None]
    assert not stage.live.ended
    stage.outputs([(2, 32)], [(2, LONG)])
    assert stage.live.ended
    assert stage.engine.find("", "r") is None
    assert len(stage.notified) == 3, "listeners are called once for all outputs of a step"


def test_tokens_alone_make_no_look_at_the_samples_of_their_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step has a token for each of hundreds of requests; only a sample's finish can end one."""
    stage, looks = Stage(num_samples=2), []
    finish_if_all_ended = LiveRequest.finish_if_all_ended
    monkeypatch.setattr(
        LiveRequest, "finish_if_all_ended", lambda live: (looks.append(live), finish_if_all_ended(live))[1]
    )
    stage.outputs([(0, 10), (1, 11)])
    assert (len(looks), len(stage.notified)) == (0, 1)
    stage.outputs([(0, 20), (1, 21)], [(0, EOS)])
    assert (len(looks), stage.live.ended) == (1, False)
    stage.outputs(ends=[(1, EOS)])
    assert (len(looks), stage.live.ended) == (2, True)


def test_outputs_after_a_samples_finish_are_ignored() -> None:
    stage = Stage(num_samples=2)
    stage.outputs([(0, 10)], [(0, EOS)])
    stage.outputs([(0, 11)])
    assert stage.ids == [[10], []]


def test_a_beam_search_returns_its_results_at_once() -> None:
    stage = Stage(num_samples=2, beams=BeamSpec(4), text=True)
    ids = [*TOKENIZER.encode("ab"), 2]
    stage.outputs(hypotheses=[(0, tuple(ids), -0.1, -0.3, EOS), (1, (TOKENIZER.encode("c")[0],), -1.0, -1.0, LONG)])
    assert stage.ids == [ids, TOKENIZER.encode("c")]
    assert [sample.cumulative_logprob for sample in stage.live.samples] == [-0.3, -1.0]
    assert [sample.text.text for sample in stage.live.samples] == ["ab", "c"]
    assert stage.live.ended


def test_an_aborted_beam_search_has_more_sequences_than_results() -> None:
    stage = Stage(num_samples=2, beams=BeamSpec(4))
    aborted = Finish(FinishDetail.ABORTED)
    stage.outputs(ends=[(index, aborted) for index in range(4)])
    assert [sample.finish for sample in stage.live.samples] == [aborted] * 2
    assert stage.live.ended


def test_the_best_are_chosen_when_the_last_has_ended() -> None:
    stage = Stage(num_samples=3, best_of=BestOf(2, returns_logprobs=False))
    stage.outputs([(0, 10)], [(0, EOS)], logprob=-3.0)
    stage.outputs([(1, 11)], [(1, EOS)], logprob=-1.0)
    assert stage.live.returned == []
    stage.outputs([(2, 12)], [(2, EOS)], logprob=-2.0)
    assert [sample.token_ids for sample in stage.live.returned] == [[11], [12]]
    assert stage.live.num_completion_tokens == 3


@pytest.mark.parametrize("again", [0, 16])
def test_cached_tokens_are_those_of_the_first_admission(again: int) -> None:
    stage = Stage(num_samples=2)
    first, second = stage.sequences
    first.num_hit_tokens = 32
    stage.planned(joined=[first, second])
    first.num_hit_tokens = again
    stage.planned(2, joined=[first])
    assert stage.live.counts.num_cached_tokens == 32
    assert stage.live.times.first_plan_ns > 0


def test_a_group_that_is_preempted_counts_once() -> None:
    stage = Stage(num_samples=2)
    stage.group.num_preemptions = 1
    stage.planned(preempted=stage.sequences)
    assert stage.live.counts.num_preemptions == 1
