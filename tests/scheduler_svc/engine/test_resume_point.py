"""A stream that is resumed: after any cut, the rest comes exactly once, tokens, text, logprobs and finishes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from cadenza_common.plan.result import LogprobColumns, TokenLogprobs
from cadenza_common.plan.sampling import SequenceSampling
from scheduler_svc.core.errors import DataLossError, RequestRejectedError
from scheduler_svc.core.types import Finish, FinishDetail, RequestSpec
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.engine.reader import OutputChunk, RequestReader
from scheduler_svc.engine.resume_point import ResumePoint, SamplePosition
from scheduler_svc.plan_loop.ports import BestOf, EngineRequest
from scheduler_svc.requests.detokenizer import StoppedText
from tests.helpers.models.toy_tokenizers import byte_level

TOKENIZER = byte_level()
TEXTS = [
    "Hello 😀, there",
    "今天天气很好，我们去公园散步吧。 Hello",
    "Zoë's naïve café 👨‍👩‍👧‍👦 the end of",
    "one two thr",
]
STOP = ["散步吧", "the end of it", "three"]
END, ABORTED = Finish(FinishDetail.MAX_TOKENS), Finish(FinishDetail.ABORTED)
NUM_PROMPT = 9


def make(num_samples: int = 1, *, best_of: BestOf | None = None, logprobs: bool = False) -> LiveRequest:
    sampling = SequenceSampling(num_logprobs=1 if logprobs else None, num_prompt_logprobs=1 if logprobs else None)
    spec = RequestSpec("r", tuple(range(NUM_PROMPT)), sampling, num_samples=num_samples)
    return LiveRequest(EngineRequest(spec, lambda: StoppedText(TOKENIZER, stop=STOP), best_of=best_of), arrival_ns=1)


@dataclass
class Received:
    """What a client has put together; anything lost or sent twice fails."""

    ids: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    finishes: dict[int, Finish] = field(default_factory=dict)
    prompt_logprobs: list[float] = field(default_factory=list)
    is_over: bool = False

    def add(self, chunk: OutputChunk) -> None:
        assert not self.is_over
        if chunk.prompt_logprobs is not None:
            assert chunk.prompt_logprobs.start == len(self.prompt_logprobs) + 1
            assert not self.ids
            self.prompt_logprobs += chunk.prompt_logprobs.logprobs
        for part in chunk.samples:
            index = part.sample_index
            ids, text = self.ids.setdefault(index, []), self.texts.setdefault(index, "")
            assert (part.first_token_index, part.text_offset) == (len(ids), len(text))
            assert index not in self.finishes
            ids += part.token_ids
            self.texts[index] = text + part.text
            self.logprobs.setdefault(index, []).extend(entry.logprob for entry in part.logprobs)
            if part.finish is not None:
                self.finishes[index] = part.finish
        self.is_over = chunk.is_last

    def point(self) -> ResumePoint:
        positions = [SamplePosition(index, len(ids), index in self.finishes) for index, ids in self.ids.items()]
        has_output = any(position.token_index or position.finished for position in positions)
        start = 0 if has_output or not self.prompt_logprobs else len(self.prompt_logprobs) + 1
        return ResumePoint(tuple(positions), start)


class Growing:
    """A request whose samples grow, each at its pace."""

    def __init__(self, rng: random.Random, num_samples: int) -> None:
        self.live, self._rng = make(num_samples, logprobs=True), rng
        self._left = [TOKENIZER.encode(rng.choice(TEXTS) * 3) for _ in range(num_samples)]
        self._num_prompt = 0

    def grow(self) -> None:
        """Some more prompt logprobs while the prompt is computed, then tokens, then a finish of each sample."""
        if self._num_prompt < NUM_PROMPT - 1:
            count = min(self._rng.randint(1, 4), NUM_PROMPT - 1 - self._num_prompt)
            values = [-1.0 - self._num_prompt - i for i in range(count)]
            known = LogprobColumns(1 + self._num_prompt, values, [1] * count, 1, [7] * count, values)
            assert self.live.prompt_logprobs is not None
            self.live.prompt_logprobs.extend(known)
            self._num_prompt += count
            return
        for sample, left in zip(self.live.samples, self._left, strict=True):
            if sample.finish is None and self._rng.random() < 0.7:
                count = self._rng.randint(0, 3)
                ids, left[:count] = left[:count], []
                finish = END if not left else ABORTED if self._rng.random() < 0.03 else None
                sample.extend(ids, [TokenLogprobs(-0.5 - each, 1, (each,), (-0.5,)) for each in ids], finish)
        self.live.ended = self.live.finish_if_all_ended()


@pytest.mark.parametrize("first_seed", range(0, 60, 10))
def test_after_any_cut_the_rest_comes_exactly_once(first_seed: int) -> None:
    assert sum(map(cut_at_random, range(first_seed, first_seed + 10))) > 30, "the streams are cut"


def cut_at_random(seed: int) -> int:
    """Cuts come at random, and what was on the way is lost with the connection; returns the number of cuts."""
    rng = random.Random(seed)
    growing = Growing(rng, num_samples=rng.choice((1, 1, 3)))
    final_only = rng.random() < 0.2
    live, whole, cut = growing.live, Received(), Received()
    undisturbed, reader = RequestReader(live, final_only=final_only), RequestReader(live, final_only=final_only)
    num_cuts = 0
    while not cut.is_over:
        growing.grow()
        while (chunk := undisturbed.take()) is not None:
            whole.add(chunk)
        while (chunk := reader.take(rng.choice((1, 150, 400, 1 << 20)))) is not None:
            if rng.random() < 0.3:
                num_cuts += 1
                reader = RequestReader(live, final_only=final_only, resume=cut.point(), starts_at_once=True)
                continue
            cut.add(chunk)
    assert cut == whole
    assert [sample.text.text for sample in live.samples] == [whole.texts[i] for i in range(len(live.samples))]
    return num_cuts


def grown(num_tokens: int, finish: Finish | None = None) -> LiveRequest:
    live = make(2)
    for sample in live.samples:
        sample.extend(TOKENIZER.encode("abcdefghij")[:num_tokens], (), finish)
    return live


def test_a_stream_that_is_resumed_starts_at_once() -> None:
    live = make()
    reader = RequestReader(live, resume=ResumePoint(), starts_at_once=True)
    first = reader.take()
    assert first is not None
    assert (first.is_first, first.is_last, first.samples) == (True, False, [])
    assert reader.take() is None
    live.samples[0].extend(TOKENIZER.encode("abc"), (), END)
    last = reader.take()
    assert last is not None
    assert (last.is_first, last.is_last, last.samples[0].text) == (False, True, "abc")


def test_after_all_finishes_only_the_end_comes() -> None:
    live = grown(3, END)
    point = ResumePoint((SamplePosition(0, 3, True), SamplePosition(1, 3, True)))
    reader = RequestReader(live, resume=point, starts_at_once=True)
    last = reader.take()
    assert last is not None
    assert (last.is_first, last.is_last, last.samples) == (True, True, [])
    assert reader.take() is None


def test_positions_beyond_the_output_are_refused() -> None:
    live = grown(3)
    for field_path, positions in {
        "resume.positions[0].sample_index": [(2, 0, False)],
        "resume.positions[1].sample_index": [(1, 0, False), (1, 0, False)],
        "resume.positions[0].token_index": [(0, 4, False)],
        "resume.positions[1].token_index": [(0, 3, False), (1, 2**32 - 1, False)],
        "resume.positions[0].finished": [(0, 3, True)],
    }.items():
        with pytest.raises(RequestRejectedError) as caught:
            RequestReader(live, resume=ResumePoint(tuple(SamplePosition(*each) for each in positions)))
        assert caught.value.field == field_path
    with pytest.raises(RequestRejectedError, match="beyond the prompt logprobs so far, which end at 0"):
        RequestReader(live, resume=ResumePoint((), 1))
    RequestReader(live, resume=ResumePoint((SamplePosition(0, 3), SamplePosition(1, 0))))


def test_prompt_logprobs_resume_at_their_index() -> None:
    live = make(logprobs=True)
    assert live.prompt_logprobs is not None
    live.prompt_logprobs.extend(LogprobColumns(1, [-1.0] * 4, [1] * 4, 1, [7] * 4, [-1.0] * 4))
    chunk = RequestReader(live, resume=ResumePoint((), 3)).take()
    assert chunk is not None
    assert chunk.prompt_logprobs is not None
    assert (chunk.prompt_logprobs.start, len(chunk.prompt_logprobs.logprobs)) == (3, 2)
    with pytest.raises(RequestRejectedError) as caught:
        RequestReader(live, resume=ResumePoint((), 6))
    assert caught.value.field == "resume.prompt_logprobs_start"


def test_nothing_can_be_resumed_of_samples_that_are_not_chosen_yet() -> None:
    """best_of and beams show nothing before their end."""
    live = make(3, best_of=BestOf(2, returns_logprobs=False))
    live.samples[0].extend(TOKENIZER.encode("abc"))
    with pytest.raises(RequestRejectedError, match="beyond the sample's 0 tokens"):
        RequestReader(live, resume=ResumePoint((SamplePosition(0, 1),)))
    with pytest.raises(RequestRejectedError, match="below 2"):
        RequestReader(live, resume=ResumePoint((SamplePosition(2, 0),)))
    reader = RequestReader(live, resume=ResumePoint((SamplePosition(0, 0),)))
    for sample in live.samples:
        sample.extend(TOKENIZER.encode("abc"), (), END)
    assert live.finish_if_all_ended()
    chunk = reader.take()
    assert chunk is not None
    assert [part.first_token_index for part in chunk.samples] == [0, 0]


def test_a_request_that_catches_up_waits_for_the_clients_position() -> None:
    """A restarted scheduler computes the tokens again; the client has more of them than it."""
    live = make()
    live.catches_up = True
    ids = TOKENIZER.encode("Hello 你好 world")
    live.samples[0].extend(ids[:2])
    reader = RequestReader(live, resume=ResumePoint((SamplePosition(0, 6),)), starts_at_once=True)
    first = reader.take()
    assert first is not None
    assert not first.samples
    live.samples[0].extend(ids[2:6])
    text_start = len(live.samples[0].text.text)
    assert reader.take() is None
    live.samples[0].extend(ids[6:], (), END)
    last = reader.take()
    assert last is not None
    assert (last.samples[0].first_token_index, last.samples[0].token_ids) == (6, ids[6:])
    assert last.samples[0].text == "Hello 你好 world"[text_start:]


def test_a_request_that_ends_before_the_clients_position_has_lost_data() -> None:
    live = make()
    live.catches_up = True
    reader = RequestReader(live, resume=ResumePoint((SamplePosition(0, 6),)))
    live.samples[0].extend(TOKENIZER.encode("a"), (), Finish(FinishDetail.MAX_TOKENS))
    with pytest.raises(DataLossError, match="ended after 1 tokens, before token 6"):
        reader.take()
