"""Steps of a model with recurrent layers, plan by plan: what is copied, moved or wrong in its states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cadenza_common.plan.errors import InvalidPlan
from cadenza_common.plan.plan import BlockMoves, StateSaves
from cadenza_common.plan.result import StepResult
from executor_svc.config import ExecutorConfig
from executor_svc.cpu.runner import ModelRunner
from executor_svc.plan.description import limits_of
from executor_svc.worker.step import StepExecutor
from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import NUM_THREADS, Model
from tests.helpers.executor.known_drafts import KnownDrafts
from tests.helpers.executor.plans import columns, ints, plan, scheduled, sequence
from tests.simulation.bugs.seeded_bugs import SeededBug, seeded

VOCAB, BLOCK, TOKENS = 131, 8, [(7 * at + 3) % 131 for at in range(40)]
STEPS = 6


class Rig:
    """An executor whose pages are all NaN; the pages of slot s for blocks and its state are its own."""

    def __init__(self, model: Model, max_drafts: int = 0, drafts: KnownDrafts | None = None) -> None:
        options = {**model.options, "block_size": BLOCK, "num_gpu_blocks": 40, "num_cpu_blocks": 40, "max_num_seqs": 8}
        if max_drafts:
            options |= {"speculative": "ngram", "num_speculative_tokens": max_drafts}
        config = ExecutorConfig(**options)
        self.pools = model.device.new_kv_cache(model.loaded.geometry, config)
        self.pools.pool.fill_(0xFF)
        self.pools.host.fill_(0xFF)
        limits = limits_of(config, model.loaded.geometry, self.pools)
        self.tables, self.pages = limits.num_tables, limits.pages_per_state
        assert self.pages == self.pools.pages_per_state > 0
        runner = ModelRunner(model.loaded.model, model.device, self.pools, limits)
        self.executor = StepExecutor(runner, self.pools, limits, drafts=drafts)
        self.max_drafts = max_drafts

    def blocks(self, slot: int) -> list[int]:
        """Pages of ten blocks."""
        return list(range(slot * 10 * self.tables, (slot + 1) * 10 * self.tables))

    def state(self, number: int) -> list[int]:
        """Pages of a state: those of slots first."""
        first = 40 * self.tables + number * self.pages
        return list(range(first, first + self.pages))

    def admitted(self, slot: int, tokens: list[int], computed: int = 0, **fields: Any) -> Any:
        fields = {"state_pages": self.state(slot), "max_drafts": self.max_drafts, **fields}
        return sequence(slot, tokens, self.blocks(slot), computed, **fields)

    def step(self, **fields: Any) -> StepResult:
        return self.executor.execute(plan(max_drafts=self.max_drafts, **fields), 0)

    def decode(self, slot: int = 0) -> list[int]:
        """So many steps more."""
        return [token for _ in range(STEPS) for token in self.step(scheduled=scheduled((slot, 1, True))).token_ids]

    def folded(self, number: int) -> int:
        return int(self.pools.pool[self.state(number)[0]].view(torch.int32)[0])


@pytest.fixture(scope="module", params=["lfm2", "qwen3_5_delta"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    before = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    yield Model(make_checkpoint(tmp_path_factory.mktemp("model"), request.param), dtype="float32")
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def expected(model: Model) -> list[int]:
    """The next tokens, of one chunk."""
    rig = Rig(model)
    first = rig.step(admitted=[rig.admitted(0, TOKENS)], scheduled=scheduled((0, len(TOKENS), True)))
    return [*first.token_ids, *rig.decode()]


def chunks(rig: Rig, cuts: list[int], **first: Any) -> StepResult:
    """Compute the tokens in chunks that end at these."""
    ends = [*cuts, len(TOKENS)]
    for start, end in zip([0, *cuts], ends, strict=True):
        fields = {"admitted": [rig.admitted(0, TOKENS)], **first} if not start else {}
        found = rig.step(scheduled=scheduled((0, end - start, end == len(TOKENS))), **fields)
    return found


@pytest.mark.parametrize("cuts", [[1], [39], [8, 9, 10, 11], [13, 26], list(range(1, 40))], ids=str)
def test_chunks(model: Model, expected: list[int], cuts: list[int]) -> None:
    rig = Rig(model)
    found = chunks(rig, cuts)
    assert [*found.token_ids, *rig.decode()] == expected
    assert rig.folded(0) == len(TOKENS) + STEPS - 1


@pytest.mark.parametrize("cuts", [[], [15, 16, 17], [20]], ids=str)
def test_copies_are_named_and_others_begin_with_them(model: Model, expected: list[int], cuts: list[int]) -> None:
    rig, found = Rig(model), []
    saves = StateSaves([0, 0], [16, 32], [*rig.state(4), *rig.state(5)])
    for start, end in zip([0, *cuts], [*cuts, len(TOKENS)], strict=True):
        fields = {} if start else {"admitted": [rig.admitted(0, TOKENS)], "state_saves": saves}
        result = rig.step(scheduled=scheduled((0, end - start, end == len(TOKENS))), **fields)
        found += list(zip(result.saved_slots, result.saved_positions, strict=True))
    assert found == [(0, 16), (0, 32)]
    assert (rig.folded(4), rig.folded(5)) == (16, 32)
    for number, position in ((4, 16), (5, 32)):
        other = rig.admitted(1, TOKENS, position)
        moves = BlockMoves(
            [*rig.blocks(0)[: position // BLOCK * rig.tables], *rig.state(number)],
            [*rig.blocks(1)[: position // BLOCK * rig.tables], *rig.state(1)],
        )
        work = scheduled((1, len(TOKENS) - position, True))
        first = rig.step(admitted=[other], copies=moves, scheduled=work)
        assert [*first.token_ids, *rig.decode(1)] == expected
        rig.step(released_slots=ints(1))
        assert rig.folded(number) == position


def test_a_swapped_state_goes_on(model: Model, expected: list[int]) -> None:
    rig = Rig(model)
    chunks(rig, [21])
    pages = [*rig.blocks(0)[: 6 * rig.tables], *rig.state(0)]
    host = list(range(len(pages)))
    rig.step(released_slots=ints(0), swap_out=BlockMoves(pages, host))
    rig.pools.pool.fill_(0xFF)
    moved = [*rig.blocks(2)[: 6 * rig.tables], *rig.state(6)]
    back = rig.admitted(2, [*TOKENS, expected[0]], len(TOKENS), prompt=len(TOKENS), state_pages=rig.state(6))
    first = rig.step(admitted=[back], swap_in=BlockMoves(host, moved), scheduled=scheduled((2, 1, True)))
    assert [*first.token_ids, *rig.decode(2)][:STEPS] == expected[1:]


def test_a_fork_goes_on_with_a_copy(model: Model, expected: list[int]) -> None:
    """Its pages hold garbage in the plan that forks it; the next one copies its source's state as it stands then."""
    rig = Rig(model)
    pair = [rig.admitted(0, TOKENS), rig.admitted(1, TOKENS, len(TOKENS) - 1, held=True)]
    first = rig.step(admitted=pair, forks=columns((1, 0)), scheduled=scheduled((0, len(TOKENS), True)))
    assert list(first.token_ids) == [expected[0]] * 2
    moves = BlockMoves(
        [*rig.blocks(0)[: 5 * rig.tables], *rig.state(0)], [*rig.blocks(1)[: 5 * rig.tables], *rig.state(1)]
    )
    second = rig.step(copies=moves, resumed_slots=ints(1), decode_ready=True)
    assert list(second.token_ids) == [expected[1]] * 2
    assert [token for _ in range(4) for token in rig.step(decode_ready=True).token_ids] == [
        token for token in expected[2:6] for _ in range(2)
    ]


@pytest.mark.parametrize("acceptance", [0.0, 0.6, 1.0])
def test_rejected_drafts_leave_no_trace(model: Model, expected: list[int], acceptance: float) -> None:
    drafts = KnownDrafts([(tuple(TOKENS), expected)], VOCAB, acceptance=acceptance)
    rig = Rig(model, 3, drafts)
    found = list(chunks(rig, [11]).token_ids)
    while len(found) < len(expected):
        tokens = rig.step(scheduled=scheduled((0, 1, True))).token_ids
        assert len(tokens)
        found += tokens
    assert found[: len(expected)] == expected


BUGS = (
    SeededBug(
        "drafts are added to the matrices before they are accepted (vLLM 43559, 53912)",
        "executor_svc.cpu.kernels.states.plan", "CpuStatePlan.fill",
        "np.maximum(rows[order] - self.tail, 0)", "rows[order] - 1",
    ),
    SeededBug(
        "rows that were not accepted are part of the state (vLLM 43559; transformers PR 46873)",
        "executor_svc.batch.state_steps", "_folded",
        "slots.num_computed_tokens[rows]", "slots.num_computed_tokens[rows] + 1",
    ),
    SeededBug(
        "a state is read from the pages of another slot (vLLM 53142, 55601)",
        "executor_svc.batch.step_states", "step_states",
        "states.tables[rows]", "states.tables[rows + 1]",
    ),
)  # fmt: skip


@pytest.mark.parametrize(
    ("model", "bug"),
    # Short convolutions have no matrices.
    [("qwen3_5_delta", BUGS[0]), *((family, bug) for family in ("lfm2", "qwen3_5_delta") for bug in BUGS[1:])],
    indirect=["model"],
    scope="module",
    ids=lambda value: getattr(value, "name", value),
)
def test_a_bug_of_states_in_steps_is_found(model: Model, expected: list[int], bug: SeededBug) -> None:
    with seeded(bug), pytest.raises((AssertionError, InvalidPlan)):
        test_rejected_drafts_leave_no_trace(model, expected, 0.6)


def test_a_state_that_does_not_stand_where_a_plan_says_is_refused(model: Model) -> None:
    rig = Rig(model)
    chunks(rig, [21], state_saves=StateSaves([0], [16], rig.state(4)))
    for position, stands in ((16, -1), (24, 16), (8, 16)):
        source = rig.state(3) if stands < 0 else rig.state(4)
        wrong = rig.admitted(1, TOKENS, position)
        with pytest.raises(InvalidPlan, match=f"state_pages of slot 1 hold a state that stands at {stands}:"):
            rig.step(admitted=[wrong], copies=BlockMoves(source, rig.state(1)))
        rig.executor.clear()


def test_a_step_is_refused_whose_fork_got_no_copy(model: Model) -> None:
    rig = Rig(model)
    pair = [rig.admitted(0, TOKENS), rig.admitted(1, TOKENS, len(TOKENS) - 1, held=True)]
    rig.step(admitted=pair, forks=columns((1, 0)), scheduled=scheduled((0, len(TOKENS), True)))
    with pytest.raises(InvalidPlan, match="state_pages of slot 1 hold a state that stands at -1"):
        rig.step(resumed_slots=ints(1), decode_ready=True)
