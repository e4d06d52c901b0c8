"""Made-up requests for comparing what steps do around a model: sampling with every parameter, plans of all kinds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cadenza_common.plan.plan import AdmittedSequence, GroupAppends, GroupTable, StepPlan
from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.plan.arrays import FloatArray, IntArray, column, float_column
from executor_svc.plan.limits import Limits
from executor_svc.speculation.drafts import Drafts

LONGEST = 1500
"""Tokens of the longest prompt: more words than one program writes to the state."""
_FIRST_CHUNK = 700
_SHORT = 12
_LONG = 4096
_BEHIND = 9
"""Tokens that a sequence may get after its prompt."""
_LISTED = 150
"""Entries of a list: more than a program reads at once."""
_DRAFTS = 3
_PAGES = 4096
"""Whose numbers block tables hold; there is no memory for them."""
_LIKELY = 60
"""A logit that is chosen, whatever the parameters are."""
DRAFTED = 4
"""The number of the step with drafts."""


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A sequence, and what is special about the logits that it samples from."""

    sampling: SequenceSampling
    periodic: bool = False
    """Whether its prompt repeats itself, so that it has drafts."""
    broken: bool = False
    """Whether its logits are not finite."""
    tied: bool = False
    """Whether many of its logits are equal."""
    ends: int | None = None
    """A stop token that its second token is."""

    @property
    def is_one_draw(self) -> bool:
        """Whether it is released after its first token: others would be drawn alike, which costs the host most."""
        s = self.sampling
        return s.temperature > 0 and not (self.periodic or s.top_k or s.min_tokens or next(s.edits(), None))


def made_requests(vocab: int, rng: np.random.Generator) -> list[CheckedRequest]:
    """Return requests whose parameters, alone and together, have all kernels of sampling compute."""
    some, last = rng.permutation(vocab)[: min(_LISTED, vocab // 2)], vocab - 1
    biases = rng.normal(size=len(some)).astype(np.float32) * 8
    stop = int(some[0])
    nothing = SequenceSampling(allowed_token_ids=[5], bad_words=([5],))
    parameters: list[SequenceSampling] = [
        SequenceSampling(),
        SequenceSampling(num_logprobs=min(5, vocab)),
        SequenceSampling(temperature=0.8, seed=3, num_logprobs=0),
        SequenceSampling(temperature=1.0, seed=4, top_k=5),
        SequenceSampling(temperature=0.8, seed=2**63 + 5, top_p=0.3, num_logprobs=3),
        SequenceSampling(temperature=1.3, seed=6, top_k=50, top_p=0.4),
        SequenceSampling(temperature=1.0, seed=7, min_p=0.3),
        SequenceSampling(temperature=0.9, seed=8, top_n_sigma=1.0, top_p=0.95),
        SequenceSampling(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2, num_logprobs=2),
        SequenceSampling(temperature=0.8, seed=9, sample_index=3, frequency_penalty=0.7, top_k=20),
        SequenceSampling(temperature=1.2, seed=9, sample_index=4),
        SequenceSampling(bias_token_ids=column(some), biases=float_column(biases)),
        SequenceSampling(temperature=0.9, seed=10, bad_words=([last], [7, 1, 2], column(some[:3]))),
        SequenceSampling(temperature=1.0, seed=11, allowed_token_ids=column(np.sort(some))),
        SequenceSampling(min_tokens=3, stop_token_ids=column(some), temperature=0.5, seed=12, min_p=0.01),
        SequenceSampling(num_candidates=4),
        nothing,
    ]
    return [
        *map(CheckedRequest, parameters),
        CheckedRequest(SequenceSampling(), broken=True),
        CheckedRequest(SequenceSampling(temperature=0.6, seed=13, top_p=0.999), broken=True),
        CheckedRequest(SequenceSampling(temperature=0.6, seed=14, top_k=30, top_p=0.99), tied=True),
        CheckedRequest(SequenceSampling(stop_token_ids=[stop]), ends=stop),
        CheckedRequest(SequenceSampling(), periodic=True),
        CheckedRequest(SequenceSampling(temperature=0.7, seed=15, top_p=0.9, num_logprobs=2), periodic=True),
        CheckedRequest(SequenceSampling(repetition_penalty=1.1, num_logprobs=1), periodic=True),
    ]


@dataclass(slots=True)
class CheckedPlans:
    """The plans of some requests, in their order; each depends on the slots as the one before has left them."""

    limits: Limits
    requests: list[CheckedRequest]
    rng: np.random.Generator
    special: dict[int, CheckedRequest] = field(default_factory=dict)
    """By slot: the request in it."""
    _periods: dict[int, tuple[IntArray, int]] = field(default_factory=dict)
    """By slot: what its prompt repeats, and the prompt's length."""
    _long: int = 0
    """The slot of the longest prompt."""

    @classmethod
    def of(cls, real: Limits, seed: int = 0) -> CheckedPlans:
        """Return plans within the limits of an executor, in fewer slots than it has."""
        rng = np.random.default_rng(seed)
        requests = made_requests(real.vocab_size, rng)
        seqs = len(requests) + 2
        # Kernels are compiled for whether a row of tokens is a multiple of 16 long, not for its length.
        longest = real.max_model_len if real.max_model_len < _LONG else _LONG + real.max_model_len % 16
        limits = replace(
            real, max_model_len=longest, num_slots=seqs, max_num_seqs=2 * seqs,
            max_num_batched_tokens=LONGEST + 32 * seqs,
            max_logprobs=min(real.vocab_size, 16), num_device_blocks=max(_PAGES, seqs * real.pages_per_state),
            max_drafts=min(real.max_drafts, _DRAFTS), max_loras=0, has_grammars=False,
        )  # fmt: skip
        return cls(limits, requests, rng)

    def first(self) -> StepPlan:
        """Admit all; all sample but that of the longest prompt, of which a part is computed."""
        admitted = [self._admission(slot, request) for slot, request in enumerate(self.requests)]
        counts = [len(each.token_ids) for each in admitted]
        counts[self._long] = min(_FIRST_CHUNK, counts[self._long] - 1)
        return StepPlan(
            1, epoch=1, admitted=admitted, scheduled_slots=list(range(len(admitted))), scheduled_num_tokens=counts,
            scheduled_samples=[slot != self._long for slot in range(len(admitted))],
        )  # fmt: skip

    def second(self, slots: Slots) -> StepPlan:
        """The rest of the long prompt, a given token, blocks, a new sequence in a slot that failed, and a fork."""
        waits = next(slot for slot, each in self.special.items() if each.sampling.num_candidates)
        failed = int(np.flatnonzero(slots.admitted & slots.stopped)[0])
        source, fork = next(slot for slot, each in self.special.items() if each.sampling.top_k), len(self.requests)
        given, groups = int(self.rng.integers(self.limits.vocab_size)), self.limits.groups
        done = [slot for slot, each in self.special.items() if each.is_one_draw and slot != failed]
        known = slots.token_ids[source, : slots.num_tokens[source]].astype(np.int64)
        admitted = [
            self._admission(failed, CheckedRequest(self.special[source].sampling)),
            self._admission(fork, CheckedRequest(SequenceSampling(temperature=1.1, seed=21)), known, len(known) - 1),
        ]
        growing = [waits] * (self.limits.max_blocks_per_seq > 1)
        appends = [
            GroupAppends(index, growing * size, self._pages(size * len(growing)).tolist())
            for index, size in enumerate(group.pages_per_block for group in groups)
        ]
        left = int(slots.num_tokens[self._long] - slots.num_computed_tokens[self._long])
        return StepPlan(
            2, epoch=1, released_slots=[failed, *done], admitted=admitted, decode_ready=True,
            append_slots=list(appends[0].slots), append_block_ids=list(appends[0].page_ids),
            group_appends=appends[1:] if growing else (), given_slots=[waits], given_token_ids=[given],
            scheduled_slots=[self._long, failed], scheduled_num_tokens=[left, len(admitted[0].token_ids)],
            scheduled_samples=[True, True], fork_slots=[fork], fork_source_slots=[source],
        )  # fmt: skip

    def fewer(self, slots: Slots) -> StepPlan:
        """All leave but those with drafts, who go on without any; one joins, of whose prompt a part is computed."""
        leaving = [slot for slot in np.flatnonzero(slots.admitted).tolist() if not self.special[slot].periodic]
        joins = self._admission(leaving[-1], CheckedRequest(SequenceSampling(), periodic=True))
        return StepPlan(
            5, epoch=1, released_slots=leaving, admitted=[joins], decode_ready=True, scheduled_slots=[joins.slot],
            scheduled_num_tokens=[len(joins.token_ids) // 2], scheduled_samples=[False],
        )  # fmt: skip

    def decode(self, max_drafts: int = 0, slots: Slots | None = None) -> StepPlan:
        """All that are ready go on; slots: the rest of prompts is computed too."""
        plan = StepPlan(3, epoch=1, decode_ready=True, max_drafts=max_drafts)
        if slots is None:
            return plan
        left = slots.num_tokens - slots.num_computed_tokens
        begun = np.flatnonzero(slots.admitted & ~slots.stopped & (left > 1))
        return replace(
            plan, scheduled_slots=begun.tolist(), scheduled_num_tokens=left[begun].tolist(),
            scheduled_samples=[True] * len(begun),
        )  # fmt: skip

    def logits(self, slots: IntArray, step: int) -> FloatArray:
        """Return random logits [len(slots), vocab] float32 of rows of these slots."""
        # So even that a parameter that is not heeded mostly gives another token, and not so even that the host's sums
        # for top_p need the whole vocabulary.
        vocab = self.limits.vocab_size
        x = self.rng.standard_normal((len(slots), vocab), dtype=np.float32) * np.float32(
            max(1.0, math.log10(vocab) - 2)
        )
        for row, slot in enumerate(slots.tolist()):
            request = self.special[slot]
            if request.broken:
                x[row, -1] = np.nan
            if request.tied:
                x[row] = np.round(2 * x[row]) / 2
            if request.ends is not None and step == 2:
                x[row, request.ends] = _LIKELY
            if request.periodic and step < DRAFTED:
                period, length = self._periods[slot]
                x[row, period[(length + step - 1) % len(period)]] = _LIKELY
        return x

    def _admission(
        self, slot: int, request: CheckedRequest, tokens: IntArray | None = None, computed: int = 0
    ) -> AdmittedSequence:
        """Return an admission with random tokens, if none are given, and pages of all its blocks but a last one."""
        limits, self.special[slot] = self.limits, request
        if tokens is None:
            length = LONGEST if slot == self._long else _SHORT + slot % 5
            tokens = self.rng.integers(0, limits.vocab_size, min(length, limits.max_model_len - _BEHIND))
            if request.periodic:
                self._periods[slot] = tokens[:3], len(tokens)
                tokens = np.resize(tokens[:3], len(tokens))
        length = min(len(tokens) + _BEHIND, limits.max_model_len)
        blocks = min(limits.max_blocks_per_seq, -(-length // limits.block_size))
        if request.sampling.num_candidates:  # the plan of its token appends one
            blocks = max(1, min(blocks, limits.max_blocks_per_seq - 1))
        first, *others = [column(self._pages(blocks * group.pages_per_block)) for group in limits.groups]
        return AdmittedSequence(
            slot, column(tokens), len(tokens) - (computed > 0), computed, first, request.sampling,
            group_tables=[GroupTable(index, 0, pages) for index, pages in enumerate(others, 1)],
            state_pages=list(range(slot * limits.pages_per_state, (slot + 1) * limits.pages_per_state)),
            max_drafts=limits.max_drafts if request.periodic else 0,
            # One of them has less room for drafts.
            max_len=len(tokens) + DRAFTED + 1 if request.periodic and slot % 2 else 0,
        )  # fmt: skip

    def _pages(self, count: int) -> IntArray:
        return self.rng.integers(0, self.limits.num_device_blocks, count)


class UnevenDrafts:
    """Random drafts; every other slot has one fewer than it may have, as if the row of that one had failed.

    Implements `DraftSource`.
    """

    def __init__(self, limits: Limits) -> None:
        self._vocab, self._rng = limits.vocab_size, np.random.default_rng(1)

    def propose(self, slots: Slots, rows: IntArray, most: IntArray) -> Drafts:
        """As in `DraftSource`; some slot has drafts."""
        fewer = most - np.arange(len(most)) % 2
        counts = fewer if fewer.any() else most
        return Drafts(counts, self._rng.integers(0, self._vocab, int(counts.sum())))

    def looks(self, slots: Slots, rows: IntArray) -> bool:
        """As in `DraftSource`."""
        return True

    def follow(self, plan: StepPlan) -> None:
        """As in `DraftSource`."""

    def admitted(self, slot: int, scope: int) -> None:
        """As in `DraftSource`."""

    def released(self, slots: IntArray) -> None:
        """As in `DraftSource`."""

    def committed(self, slots: Slots, scheduled: Scheduled, starts: IntArray) -> None:
        """As in `DraftSource`."""

    def clear(self) -> None:
        """As in `DraftSource`."""


def drafted_logits(x: FloatArray, drafts: Sequence[int]) -> None:
    """Let most of the rows' drafts be likely, so that they are accepted; drafts: of the token after each row, or -1."""
    for row, draft in enumerate(drafts):
        if draft >= 0 and row % 4:
            x[row, draft] = _LIKELY
