"""The device drafts, checks and commits as the host's slots do, over random histories of slots that come and go."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from cadenza_common.plan.plan import AdmittedSequence, StepPlan
from cadenza_common.plan.result import SlotError
from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.batch.step_result import SampledTokens
from executor_svc.gpu.kernels.slots.slots import StepInputs, StepSizes
from executor_svc.gpu.slots.device_slots import CommittedTokens, DeviceSlots, NgramLengths
from executor_svc.plan.arrays import IntArray
from executor_svc.plan.limits import Limits
from executor_svc.speculation.drafting import Drafting, draft_room
from executor_svc.speculation.ngram import NgramSource
from executor_svc.speculation.verification import accept_drafts
from tests.helpers.executor.plans import columns, flat, ints, plan, scheduled, sequence
from tests.helpers.marks import short_and_long

VOCAB = 50
LIMITS = Limits(
    num_slots=7, max_num_seqs=80, max_num_batched_tokens=300, max_model_len=60, vocab_size=VOCAB, max_logprobs=5,
    block_size=4, num_device_blocks=64, num_host_blocks=0, max_inflight_plans=3, max_drafts=6,
)  # fmt: skip
FAILED = int(SlotError.NON_FINITE_LOGITS)


def following(tokens: list[int]) -> int:
    """The token after these: mostly as in a text with a period, else one of a few, now and then none that is valid."""
    number = sum((index + 3) * token for index, token in enumerate(tokens)) * 7919 % 101
    if number < 6:
        return -1
    return tokens[-3] if number < 80 and len(tokens) > 3 else number % 5


class History:
    """Steps on the host's slots and on the device."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.host = Slots(LIMITS)
        self.drafting = Drafting(self.host, NgramSource(LIMITS))
        self.slots = DeviceSlots(LIMITS, device, ngrams=NgramLengths(2, 4))
        self.num_accepted = self.num_failed_behind = 0

    def below(self, end: int) -> int:
        return int(self.rng.integers(end))

    def admission(self, slot: int) -> AdmittedSequence:
        prompt = [self.below(5)] * self.below(3) + [1, 2, 3] * (1 + self.below(4))
        sampling = SequenceSampling(stop_token_ids=ints(*range(self.below(2) * 2)), min_tokens=self.below(12))
        blocks = self.rng.integers(0, 64, -(-len(prompt) // 4) + self.below(3)).tolist()
        return sequence(
            slot, prompt, blocks, sampling=sampling, max_drafts=self.below(7), max_len=len(prompt) + 1 + self.below(40)
        )

    def next_plan(self) -> StepPlan:
        """Sequences that are computed in one part or two; blocks are appended when the next token needs one, or so."""
        host = self.host
        released = ints(*(s for s in range(LIMITS.num_slots) if host.admitted[s] and host.stopped[s] and self.below(2)))
        free = [s for s in range(LIMITS.num_slots) if not host.admitted[s] or s in released]
        admitted = tuple(self.admission(slot) for slot in free[: self.below(3)])
        rows = [(each.slot, len(each.token_ids), True) for each in admitted if self.below(2)]
        appends = []
        for slot in np.flatnonzero(host.admitted & ~host.stopped).tolist():
            left = int(host.num_tokens[slot] - host.num_computed_tokens[slot])
            if left > 1 and slot not in released:
                rows.append((slot, left, True) if self.below(2) else (slot, left - 1, False))
            places = int(host.num_blocks[slot]) * 4
            if slot not in released and places < min(int(host.num_tokens[slot]) + 1 + self.below(2) * 6, 60):
                appends += [(slot, self.below(64))] * (1 + self.below(2)) if places < 56 else [(slot, 3)]
        step = plan(
            released_slots=released, admitted=admitted, appends=columns(*appends), decode_ready=self.below(9) > 0,
            max_drafts=max(0, self.below(9) - 2),
        )  # fmt: skip
        return replace(step, **flat(scheduled=scheduled(*rows))) if rows else step

    def step(self) -> None:
        step = self.next_plan()
        self.host.apply(step)
        work = self.host.schedule(step)
        self.drafting.follow(step)
        room = draft_room(self.host, step, work)
        drafted = self.drafting.add(step, work)
        self.slots.apply(step)
        if not len(work.slots):
            self.slots.flush()
            return
        places = np.where(room > 0, max(step.max_drafts, self.below(7)), 0)
        laid_out = work.with_drafts(places) if places.any() else work
        committed = self._on_device(work, laid_out, step.max_drafts)
        self._on_host(work, drafted, committed)
        self._check_state()

    def _on_device(self, work: Scheduled, laid_out: Scheduled, most: int) -> CommittedTokens:
        num_drafts = 0 if laid_out.num_drafts is None else int(laid_out.num_drafts.max())
        sizes = StepSizes(
            int(laid_out.num_tokens.sum()) + self.below(4), len(work.slots) + self.below(3),
            len(laid_out.logits_slots) + self.below(3), len(work.sampling_slots) + self.below(3), num_drafts,
        )  # fmt: skip
        inputs = self.slots.build(laid_out, sizes, most)
        for round in range(1 + num_drafts):
            tokens, errors = self._sampled(inputs)
            self.slots.launch_commit(sizes, tokens, errors, round)
        return self.slots.fetch(work, sizes).wait()

    def _sampled(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens that follow the known ones of each row that is not padding; of padding, what may not be read."""
        state, found = self.slots.state, []
        for slot, place in zip(inputs.rows.tolist(), inputs.sources.tolist(), strict=True):
            known = int(state.num_tokens[slot])
            history = state.token_ids[slot, :known].tolist()
            found.append(following(history) if slot >= 0 else 2**31 - 1)
            if slot >= 0:
                # The logits that it reads are those of its last known token.
                token = int(inputs.logits_rows[place])
                assert (int(inputs.token_ids[token]), int(inputs.positions[token])) == (history[-1], known - 1)
        tokens = torch.tensor(found, device=inputs.rows.device)
        return tokens, torch.where(tokens < 0, FAILED, 0).int()

    def _on_host(self, work: Scheduled, drafted: Scheduled, committed: CommittedTokens) -> None:
        rows, host = drafted.rows, self.host
        ahead: IntArray = np.zeros(len(rows.slots), np.int64) if rows.ahead is None else rows.ahead
        lengths = host.num_tokens[rows.slots] + ahead
        places = zip(rows.slots.tolist(), lengths.tolist(), strict=True)
        sampled = ints(*(following(host.token_ids[slot, :end].tolist()) for slot, end in places))
        found = accept_drafts(host, drafted, SampledTokens(sampled, np.where(sampled < 0, FAILED, 0), None))
        assert committed.ahead.tolist() == ahead.tolist()
        assert committed.errors.tolist() == found.errors.tolist()
        assert not committed.idle.any()
        assert committed.token_ids[found.valid].tolist() == found.token_ids[found.valid].tolist()
        assert committed.positions[found.valid].tolist() == lengths[found.valid].tolist()
        self.num_accepted += int((found.valid & (ahead > 0)).sum())
        self.num_failed_behind += int(((sampled < 0) & (ahead > 0) & np.roll(found.valid, 1)).sum())
        host.commit(drafted, found.token_ids, found.valid)

    def _check_state(self) -> None:
        state, host = self.slots.state, self.host
        for name in ("num_tokens", "num_computed_tokens", "stopped"):
            there = getattr(host, name)[host.admitted].tolist()
            assert getattr(state, name).cpu().numpy()[host.admitted].tolist() == there, name
        for slot in np.flatnonzero(host.admitted).tolist():
            known = int(host.num_tokens[slot])
            assert state.token_ids[slot, :known].tolist() == host.token_ids[slot, :known].tolist()


@pytest.mark.parametrize("seed", short_and_long([1, 2, 3], [1]))
def test_random_histories(device: torch.device, seed: int) -> None:
    history = History(device, seed)
    for _ in range(40):
        history.step()
    assert history.num_accepted > 20
    assert history.num_failed_behind > 0
