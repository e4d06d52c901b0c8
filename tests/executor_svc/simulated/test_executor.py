"""Plans against the simulated executor: tokens as known in advance, and other ones after any wrong bookkeeping."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cadenza_common.plan.errors import InvalidPlan
from cadenza_common.plan.result import SlotError
from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.batch.slot_digest import digest_of
from executor_svc.simulated.costs import StepCosts
from executor_svc.simulated.expected_tokens import expected_candidates, expected_logprobs, expected_tokens
from tests.helpers.executor.plans import ints, scheduled, sequence
from tests.helpers.executor.simulated_rig import LIMITS, RandomHistory, Rig, columns, moves
from tests.helpers.marks import short_and_long

# Wide enough that a wrong token is not the right one by chance.
VOCAB = 2**21
WIDE = replace(LIMITS, vocab_size=VOCAB)
PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32, 38, 46, 26, 43, 38, 32, 7, 9]
GREEDY = SequenceSampling()


def expected(count: int, prompt: list[int] = PROMPT, sampling: SequenceSampling = GREEDY) -> list[int]:
    return expected_tokens(prompt, sampling, count, VOCAB, sample_index=sampling.sample_index)


@pytest.mark.slow
@pytest.mark.parametrize("seed", short_and_long(range(8), range(3)))
def test_random_histories_give_the_tokens_known_in_advance(seed: int) -> None:
    history = RandomHistory(seed)
    for _ in range(400):
        history.step()
    assert history.num_tokens > 300
    assert history.num_swaps > 20
    assert history.num_copies > 20
    assert history.num_forks > 20


# ---------------------------------------------------------------- one thing wrong at a time


def run(
    blocks: list[int] | None = None,
    *,
    computed_by_other: list[int] | None = None,
    before: Callable[[Rig], None] = lambda rig: None,
    **last: Any,
) -> list[int]:
    """Compute the prompt but for its last token in slot 0, then sample six tokens from `blocks` in slot 1."""
    rig = Rig(WIDE)
    rig.step(admitted=(sequence(0, PROMPT, [7, 2, 30]),), scheduled=scheduled((0, len(PROMPT) - 1, False)))
    before(rig)
    known = sequence(1, PROMPT, blocks or [7, 2, 30], len(PROMPT) - 1)
    return rig.decode(6, **{"released_slots": ints(0), "admitted": (known,), "appends": columns((1, 31))} | last)


def test_a_right_history_gives_the_right_tokens() -> None:
    assert run() == expected(6)


@pytest.mark.parametrize("blocks", [[2, 7, 30], [7, 3, 30], [7, 2, 29], [8, 2, 30], [7, 7, 30], [30, 2, 7]])
def test_a_wrong_block_table(blocks: list[int]) -> None:
    assert run(blocks)[0] != expected(1)[0]


def test_a_wrong_block_table_changes_no_other_sequence() -> None:
    """In one step, two sequences read the same blocks, which are at other places of the wrong table."""
    rig = Rig(WIDE)
    rig.step(admitted=(sequence(0, PROMPT, [7, 2, 30]),), scheduled=scheduled((0, len(PROMPT) - 1, False)))
    last = len(PROMPT) - 1
    tables = {1: [7, 2, 30], 2: [2, 7, 31], 3: [7, 7, 32]}
    rig.step(copies=moves((30, 31), (30, 32)))
    known = tuple(sequence(slot, PROMPT, blocks, last) for slot, blocks in tables.items())
    right, *wrong = rig.step(decode_ready=True, released_slots=ints(0), admitted=known).token_ids.tolist()
    assert right == expected(1)[0]
    assert right not in wrong


def test_a_right_and_a_wrong_copy() -> None:
    copied = [10, 11, 12]
    assert run(copied, copies=moves((7, 10), (2, 11), (30, 12))) == expected(6)
    for wrong in ([(7, 10), (2, 11)], [(7, 11), (2, 10), (30, 12)], [(7, 10), (3, 11), (30, 12)]):
        assert run(copied, copies=moves(*wrong))[0] != expected(1)[0]


def test_a_right_and_a_wrong_swap() -> None:
    def swapped(out: list[tuple[int, int]], back: list[tuple[int, int]]) -> list[int]:
        def overwrite(rig: Rig) -> None:
            rig.step(swap_out=moves(*out))
            rig.step(copies=moves((50, 7), (51, 2), (52, 30)))

        return run([20, 21, 22], before=overwrite, swap_in=moves(*back))

    out, back = [(7, 1), (2, 5), (30, 3)], [(1, 20), (5, 21), (3, 22)]
    assert swapped(out, back) == expected(6)
    assert swapped(out[:2], back)[0] != expected(1)[0]
    assert swapped(out, back[:2])[0] != expected(1)[0]
    assert swapped(out, [(5, 20), (1, 21), (3, 22)])[0] != expected(1)[0]
    assert swapped([(7, 5), (2, 1), (30, 3)], back)[0] != expected(1)[0]


def test_a_swap_comes_before_a_copy_and_that_before_a_swap_back() -> None:
    assert (
        run(
            [20, 2, 30],
            swap_out=moves((7, 1)),
            copies=moves((40, 7)),
        )[0]
        != expected(1)[0]
    )
    rig = Rig(WIDE)
    rig.executor.pools.device[:4] = np.arange(4)[:, None] + 10
    rig.executor.pools.host[0] = 99
    rig.step(swap_out=moves((0, 5)), copies=moves((1, 0), (2, 3)), swap_in=moves((0, 1)))
    assert rig.executor.pools.device[:4, 0].tolist() == [11, 99, 12, 12]
    assert rig.executor.pools.host[5].tolist() == [10] * 8


def test_a_block_that_another_sequence_has_taken() -> None:
    """The prompt's blocks were freed too early: another sequence computes into one of them."""

    def intrude(rig: Rig) -> None:
        rig.step(admitted=(sequence(5, [1, 2, 3], [2]),), scheduled=scheduled((5, 3, False)))
        rig.step(released_slots=ints(5))

    assert run(before=intrude)[0] != expected(1)[0]


def test_a_block_freed_before_its_last_reader() -> None:
    """A token written over one position is enough."""

    def intrude(rig: Rig) -> None:
        rig.step(admitted=(sequence(5, [PROMPT[8] + 1], [2]),), scheduled=scheduled((5, 1, False)))
        rig.step(released_slots=ints(5))

    assert run(before=intrude)[0] != expected(1)[0]


def test_more_tokens_taken_for_computed_than_were() -> None:
    rig = Rig(WIDE)
    rig.step(admitted=(sequence(0, PROMPT, [7, 2, 30]),), scheduled=scheduled((0, len(PROMPT) - 2, False)))
    known = sequence(1, PROMPT, [7, 2, 30], len(PROMPT) - 1)
    assert rig.decode(1, admitted=(known,), held_slots=ints(0)) != expected(1)


def test_a_prefix_that_only_looks_alike() -> None:
    """Equal tokens at equal positions behind another beginning: other KV, so these blocks must not be shared."""
    other = [PROMPT[0] + 1, *PROMPT[1:]]
    rig = Rig(WIDE)
    rig.step(admitted=(sequence(0, other, [7, 2, 30]),), scheduled=scheduled((0, len(other), False)))
    rig.step(admitted=(sequence(1, PROMPT, [8]),), scheduled=scheduled((1, 8, False)))
    mixed = sequence(2, PROMPT, [8, 2, 30], 19)
    tokens = rig.decode(1, admitted=(mixed,), held_slots=ints(0, 1))
    assert tokens != expected(1)


def test_a_shared_prefix_is_as_good_as_ones_own() -> None:
    rig = Rig(WIDE)
    rig.step(admitted=(sequence(0, PROMPT, [7, 2, 30]),), scheduled=scheduled((0, 20, False)))
    longer = [*PROMPT[:16], 1, 2, 3]
    rig.step(admitted=(sequence(1, longer, [7, 2, 40], 16),), scheduled=scheduled((1, 2, False)))
    assert rig.decode(4, held_slots=ints(0)) == expected(4, longer)


def test_a_given_token_counts_as_sampled() -> None:
    rig = Rig(WIDE)
    rig.step(admitted=(sequence(0, PROMPT, [7, 2, 30]),), scheduled=scheduled((0, 20, False)))
    assert rig.decode(2, given=columns((0, 4))) == expected_tokens(PROMPT, GREEDY, 2, VOCAB, output=[4])


# ---------------------------------------------------------------- slots and sampling


def test_stopped_slots_are_idle() -> None:
    stop = expected(2)[1]
    sampling = SequenceSampling(stop_token_ids=ints(stop))
    rig = Rig(WIDE)
    rig.step(admitted=(sequence(0, PROMPT, [7, 2, 30], sampling=sampling),), scheduled=scheduled((0, 19, False)))
    assert rig.decode(9) == expected(9, sampling=sampling)
    result = rig.step(scheduled=scheduled((0, 1, True)))
    assert (result.slots.tolist(), result.num_tokens.tolist()) == ([0], [0])


def test_a_slot_without_an_allowed_token_fails_alone() -> None:
    none = SequenceSampling(allowed_token_ids=ints(4), bad_words=(ints(4),))
    rig = Rig(WIDE)
    rows = (sequence(0, PROMPT, [7, 2, 30]), sequence(1, PROMPT, [8, 3, 31], sampling=none))
    result = rig.step(admitted=rows, scheduled=scheduled((0, 20, True), (1, 20, True)))
    assert result.token_ids.tolist() == expected(1)
    assert (result.error_slots.tolist(), result.errors) == ([1], (SlotError.NO_ALLOWED_TOKEN,))


def test_logprobs_are_of_the_model_whatever_is_drawn() -> None:
    sampling = SequenceSampling(temperature=1.0, seed=5, num_logprobs=3)
    rig = Rig(WIDE)
    first = rig.step(admitted=(sequence(0, PROMPT, [7, 2, 30], sampling=sampling),), scheduled=scheduled((0, 20, True)))
    token = first.token_ids.tolist()[0]
    logprob, rank, best, logprobs = expected_logprobs([*PROMPT, token], 20, 3, VOCAB)
    ((slot, entry),) = first.logprobs.items()
    assert (slot, entry.start, entry.num_top) == (0, 20, 3)
    assert entry.ranks.tolist() == [rank]
    assert entry.top_token_ids.tolist() == best
    assert best[0] == expected(1)[0]
    assert np.allclose([*entry.logprobs, *entry.top_logprobs], [logprob, *logprobs])


@pytest.mark.parametrize("chunks", [[20], [1, 19], [8, 8, 4], [7, 2, 10, 1]])
def test_prompt_logprobs_in_chunks(chunks: list[int]) -> None:
    """Beside another prompt that requests more of them, and one that requests none."""
    some, more = SequenceSampling(num_prompt_logprobs=2), SequenceSampling(num_prompt_logprobs=4)
    rig = Rig(WIDE)
    admitted = (
        sequence(0, [1, 2, 3], [40]),
        sequence(1, PROMPT, [7, 2, 30], sampling=some),
        sequence(2, PROMPT[::-1], [8, 3, 31], sampling=more),
    )
    found: dict[int, list[tuple[int, float, int, list[int], list[float]]]] = {1: [], 2: []}
    for index, count in enumerate(chunks):
        rows = [(1, count, False), (2, count, False)] + ([(0, 2, False)] if not index else [])
        for slot, entry in rig.step(admitted=admitted, scheduled=scheduled(*rows)).prompt_logprobs.items():
            for i, logprob in enumerate(entry.logprobs):
                top = slice(i * entry.num_top, (i + 1) * entry.num_top)
                ids, logprobs = entry.top_token_ids[top].tolist(), entry.top_logprobs[top].tolist()
                found[slot].append((entry.start + i, logprob, entry.ranks[i], ids, logprobs))
        admitted = ()
    for slot, prompt, num_top in ((1, PROMPT, 2), (2, PROMPT[::-1], 4)):
        assert [row[0] for row in found[slot]] == list(range(1, 20))
        for position, logprob, rank, ids, logprobs in found[slot]:
            wanted = expected_logprobs(prompt, position, num_top, VOCAB)
            assert (rank, ids) == (wanted[1], wanted[2])
            assert np.allclose([logprob, *logprobs], [wanted[0], *wanted[3]])


# ---------------------------------------------------------------- forks and candidates


def test_forks_draw_from_one_row_and_go_on_over_copied_blocks() -> None:
    """Three samples of one prompt: shared full blocks, a copy of the partial one, each its own seeds and masks."""
    samples = [SequenceSampling(temperature=1.0, seed=9, sample_index=index, num_logprobs=1) for index in range(3)]
    rig = Rig(WIDE)
    rig.step(admitted=(sequence(1, PROMPT, [7, 2, 30], sampling=samples[0]),), scheduled=scheduled((1, 12, False)))
    forks = tuple(sequence(slot, PROMPT, [7, 2], sampling=samples[i]) for i, slot in ((1, 0), (2, 3)))
    first = rig.step(admitted=forks, scheduled=scheduled((1, 8, True)), forks=columns((3, 1), (0, 1)))
    found = {slot: [token] for slot, token in zip(first.slots.tolist(), first.token_ids.tolist(), strict=True)}
    for slot, entry in first.logprobs.items():
        wanted = expected_logprobs([*PROMPT, *found[slot]], 20, 1, VOCAB)
        assert entry.ranks.tolist() == [wanted[1]]
        assert entry.top_token_ids.tolist() == wanted[2]
    moved = {"appends": columns((0, 40), (3, 41)), "copies": moves((30, 40), (30, 41))}
    for index in range(4):
        result = rig.step(decode_ready=True, **(moved if not index else {}))
        for slot, token in zip(result.slots.tolist(), result.token_ids.tolist(), strict=True):
            found[slot].append(token)
    assert found == {slot: expected(5, sampling=samples[i]) for slot, i in ((1, 0), (0, 1), (3, 2))}
    assert len({tokens[0] for tokens in found.values()}) == 3


def test_a_fork_whose_partial_block_is_not_copied() -> None:
    rig = Rig(WIDE)
    rig.step(admitted=(sequence(1, PROMPT, [7, 2, 30]),), scheduled=scheduled((1, 19, False)))
    fork = sequence(0, PROMPT, [7, 2, 40])
    rig.step(admitted=(fork,), decode_ready=True, forks=columns((0, 1)))
    tokens = rig.step(decode_ready=True).token_ids.tolist()
    assert tokens[1] == expected(2)[1]
    assert tokens[0] != expected(2)[1]


def test_candidates_are_reported_and_beams_go_on_with_given_tokens() -> None:
    """Two beams of one prompt beside a slot that samples; the second comes to the first's blocks by a copy."""
    beam = SequenceSampling(num_candidates=4, num_logprobs=2)
    masked = SequenceSampling(num_candidates=3, min_tokens=9, stop_token_ids=ints(expected(1)[0]))
    rig = Rig(WIDE)
    admitted = (
        sequence(0, PROMPT, [7, 2, 30], sampling=beam),
        sequence(2, PROMPT, [8, 3, 31]),
        sequence(5, PROMPT, [9, 4, 32], sampling=masked),
    )
    rows = ((0, 20, True), (2, 20, True), (5, 20, True))
    result = rig.step(admitted=admitted, scheduled=scheduled(*rows))
    assert (result.slots.tolist(), result.num_tokens.tolist()) == ([0, 2, 5], [0, 1, 0])
    assert result.token_ids.tolist() == expected(1)
    assert not result.logprobs
    for entry, sampling in zip(result.candidates.values(), (beam, masked), strict=True):
        wanted = expected_candidates(PROMPT, [], sampling, sampling.num_candidates, VOCAB)
        assert entry.token_ids.tolist() == [token for token, _ in wanted]
        assert np.allclose(entry.logprobs, [logprob for _, logprob in wanted])
    best, second = result.candidates[0].token_ids[:2].tolist()
    other = sequence(1, [*PROMPT, second], [7, 2, 40], 20, prompt=20, sampling=beam)
    plan = {"released_slots": ints(2, 5), "copies": moves((30, 40)), "admitted": (other,)}
    result = rig.step(**plan, given=columns((0, best)), decode_ready=True)
    assert list(result.candidates) == [0, 1]
    for entry, token in zip(result.candidates.values(), (best, second), strict=True):
        assert entry.token_ids.tolist() == [i for i, _ in expected_candidates(PROMPT, [token], beam, 4, VOCAB)]
    assert not rig.step(decode_ready=True).slots.tolist(), "no token was given"


def test_a_beam_without_a_candidate_fails_alone() -> None:
    none = SequenceSampling(num_candidates=2, allowed_token_ids=ints(4), bad_words=(ints(4),))
    few = SequenceSampling(num_candidates=2, allowed_token_ids=ints(4))
    rig = Rig(WIDE)
    rows = (sequence(0, PROMPT, [7, 2, 30], sampling=none), sequence(1, PROMPT, [8, 3, 31], sampling=few))
    result = rig.step(admitted=rows, scheduled=scheduled((0, 20, True), (1, 20, True)))
    assert (result.error_slots.tolist(), result.errors) == ([0], (SlotError.NO_ALLOWED_TOKEN,))
    assert [(slot, entry.token_ids.tolist()) for slot, entry in result.candidates.items()] == [(1, [4])]


# ---------------------------------------------------------------- refusals and times


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"admitted": (sequence(0, [1], [0]),)}, "slot 0 is not free"),
        ({"admitted": (sequence(1, [VOCAB], [0]),)}, f"token id {VOCAB} is out of range"),
        ({"admitted": (sequence(1, [1, 2], [64]),)}, "block 64 is out of range"),
        ({"admitted": (sequence(1, [1], []),), "decode_ready": True}, "block table of slot 1 is too short"),
        ({"scheduled": scheduled((0, 2, True))}, "only 1 of its known tokens are not computed"),
        ({"scheduled": scheduled((3, 1, True))}, "slot 3 is not admitted"),
        ({"released_slots": ints(4)}, "slot 4 is not admitted"),
        ({"copies": moves((1, 2), (2, 3))}, "block 2 is both source and destination"),
        ({"swap_in": moves((1, 2), (3, 2))}, "destination block 2 is named twice"),
        ({"reserved": ("drafts",)}, "not supported by this executor: drafts"),
    ],
)
def test_contradictions_are_refused_before_anything_moves(fields: dict[str, Any], message: str) -> None:
    rig = Rig(WIDE)
    rig.step(admitted=(sequence(0, PROMPT, [7, 2, 30]),), scheduled=scheduled((0, 19, False)))
    rig.executor.pools.host[:] = 5
    device, host = rig.executor.pools.device.copy(), rig.executor.pools.host.copy()
    swap = {} if {"swap_in", "copies"} & set(fields) else {"swap_in": moves((0, 60))}
    with pytest.raises(InvalidPlan, match=message):
        rig.step(**swap, **fields)
    assert (rig.executor.pools.device == device).all()
    assert (rig.executor.pools.host == host).all()


def test_the_digest_is_that_of_the_slots() -> None:
    rig = Rig(WIDE)
    result = rig.step(admitted=(sequence(0, PROMPT, [7, 2, 30]),), debug_digest=True)
    assert result.debug_digest == digest_of(rig.executor.slots)


def test_steps_end_when_their_modelled_time_has_passed() -> None:
    """Costs by what a step does; a plan that came while another ran begins after it, one that comes late at once."""
    costs = StepCosts(step_us=100, token_us=10, context_token_us=1, sample_us=3, moved_block_us=20)
    moments: list[int] = []
    rig = Rig(WIDE, costs, wait=moments.append)
    admitted = (sequence(0, PROMPT, [7, 2, 30]), sequence(1, [1], [8]))
    first = rig.step(1_000_000, admitted=admitted, scheduled=scheduled((0, 4, False), (1, 1, True)))
    # 5 tokens that read 1 + 2 + 3 + 4 + 1 positions, one sample.
    assert first.timings.device_ns == 1000 * (100 + 50 + 11)
    assert first.timings.sample_ns == 3000
    assert first.timings.total_ns == 164_000
    second = rig.step(1_050_000, scheduled=scheduled((0, 2, False)), copies=moves((40, 41)), swap_out=moves((7, 0)))
    assert second.timings.queue_ns == 114_000
    assert second.timings.device_ns == 1000 * (100 + 20 + 11)
    assert second.timings.moves_ns == 40_000
    assert second.timings.total_ns == second.timings.device_ns + 40_000
    assert first.timings.moves_ns == 0
    third = rig.step(5_000_000)
    assert (third.timings.queue_ns, third.timings.total_ns) == (0, 100_000)
    assert moments == [1_164_000, 1_164_000 + 171_000, 5_100_000]


def test_instant_steps_wait_for_nothing() -> None:
    def never(moment_ns: int) -> None:
        raise AssertionError(moment_ns)

    rig = Rig(WIDE, wait=never)
    result = rig.step(admitted=(sequence(0, PROMPT, [7, 2, 30]),), scheduled=scheduled((0, 20, True)))
    timings = result.timings
    assert min(timings.device_ns, timings.sample_ns) > 0
    assert timings.total_ns >= timings.device_ns + timings.sample_ns
    assert timings.moves_ns == 0
    moved = rig.step(copies=moves((7, 40)), swap_out=moves((7, 0)), swap_in=moves((3, 41))).timings
    assert 0 < moved.moves_ns <= moved.total_ns


def test_a_cleared_executor_keeps_its_kv() -> None:
    rig = Rig(WIDE)
    rig.step(admitted=(sequence(0, PROMPT, [7, 2, 30]),), scheduled=scheduled((0, 19, False)))
    rig.executor.clear()
    assert rig.decode(3, admitted=(sequence(0, PROMPT, [7, 2, 30], 19),)) == expected(3)
