"""KV that sequences share, copy and swap on the real model: tokens and logits, to the bit, of each computed alone."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from cadenza_common.plan.plan import AdmittedSequence, BlockMoves
from cadenza_common.plan.result import StepResult
from executor_svc.batch.forward_batch import ForwardBatch
from executor_svc.cpu.runner import ModelRunner
from executor_svc.plan.arrays import IntArray
from executor_svc.worker.step import StepExecutor
from tests.checkpoints import make_llama
from tests.executor_svc.driver import Model
from tests.helpers.executor.plans import ints, scheduled, sequence
from tests.helpers.executor.stepping import BLOCK_SIZE, Stepper

NUM_OUTPUT = 10

Output = tuple[int, bytes]
"""A token and the bits of the logits that it was taken from."""


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(make_llama(tmp_path_factory.mktemp("model")), dtype=request.param, num_cpu_blocks=32)


class Watched:
    """A runner that keeps the logits of its last step."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.functions = runner.functions
        self.rows: list[bytes] = []

    def forward(self, batch: ForwardBatch) -> Tensor:
        self.rows = []
        return self._runner.forward(batch)

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        logits = self._runner.logits(hidden, rows)
        self.rows += [row.numpy().tobytes() for row in logits]
        return logits

    def argmax(self, logits: Tensor) -> IntArray:
        return self._runner.argmax(logits)


class Run(Stepper):
    """Steps over pools of NaN: whoever reads what was not computed, shared or moved fails."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        made = self.executor
        pools = made._pools
        for layer in (*pools.layers, *pools.layout.views(pools.host)):
            layer.fill_(float("nan"))
        self.runner = Watched(made._runner)
        self.executor = StepExecutor(self.runner, pools, replace(made.limits, num_host_blocks=pools.num_host_blocks))
        self.outputs: dict[int, list[Output]] = defaultdict(list)
        """By slot."""

    def step(self, **fields: Any) -> StepResult:
        result = super().step(**fields)
        if not result.errors:
            rows = zip(result.slots.tolist(), result.token_ids.tolist(), self.runner.rows, strict=True)
            for slot, token, logits in rows if len(result.slots) else ():
                self.outputs[slot].append((token, logits))
        return result

    def decode(self, count: int, **first: Any) -> None:
        """So many steps of all that are ready; `first` is part of the first of them."""
        for index in range(count):
            self.step(decode_ready=True, **(first if not index else {}))

    def tokens(self, slot: int) -> list[int]:
        return [token for token, _ in self.outputs[slot]]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(1000 * seed + length)
    return [rng.randrange(2, 131) for _ in range(length)]


def moves(sources: list[int], destinations: list[int]) -> BlockMoves:
    return BlockMoves(ints(*sources), ints(*destinations))


def blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


def alone(model: Model, prompt: list[int], count: int = NUM_OUTPUT) -> list[Output]:
    run = Run(model)
    run.step(admitted=(sequence(0, prompt, run.blocks(0)),), scheduled=scheduled((0, len(prompt), True)))
    run.decode(count - 1)
    assert len(run.outputs[0]) == count
    return run.outputs[0]


# ---------------------------------------------------------------- shared prefixes


def sharing(run: Run, slot: int, tokens: list[int], num_shared: int) -> AdmittedSequence:
    """A sequence over the first `num_shared` blocks of slot 0, and from there on over blocks of its own."""
    return sequence(slot, tokens, run.blocks(0)[:num_shared] + run.blocks(slot)[:8], num_shared * BLOCK_SIZE)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("released", [False, True], ids=["while held", "after its release"])
@pytest.mark.parametrize(("num_shared", "num_more"), [(1, 1), (1, 7), (2, 8), (2, 9), (5, 3), (7, 20)])
def test_a_prefix_that_another_has_computed(model: Model, num_shared: int, num_more: int, released: bool) -> None:
    """B finds the full blocks of A's prompt, computes the rest at once, and both go on."""
    shared = prompt_of(num_shared * BLOCK_SIZE)
    first, second = [*shared, *prompt_of(5, seed=1)], [*shared, *prompt_of(num_more, seed=2)]
    run = Run(model)
    run.step(admitted=(sequence(0, first, run.blocks(0)),), scheduled=scheduled((0, len(first), True)))
    run.decode(2)
    run.step(
        released_slots=ints(0) if released else ints(), admitted=(sharing(run, 1, second, num_shared),),
        scheduled=scheduled((1, num_more, True)), decode_ready=True,
    )  # fmt: skip
    run.decode(NUM_OUTPUT - 1)
    assert run.outputs[1] == alone(model, second)
    assert run.outputs[0] == alone(model, first, 3 if released else 3 + NUM_OUTPUT)


def test_what_was_not_computed_cannot_be_shared(model: Model) -> None:
    """Or the test above would prove nothing: a block too many, and the logits are not finite."""
    first, second = prompt_of(13), prompt_of(30)
    run = Run(model)
    run.step(admitted=(sequence(0, first, run.blocks(0)),), scheduled=scheduled((0, 13, True)))
    result = run.step(admitted=(sharing(run, 1, second, 2),), scheduled=scheduled((1, 14, True)))
    assert result.error_slots.tolist() == [1]


@pytest.mark.parametrize("num_chunk", [1, 3, 8, 11])
def test_the_rest_in_chunks_beside_the_first_one(model: Model, num_chunk: int) -> None:
    """Two more sequences over the same blocks, one of them over blocks that the other has added to them."""
    shared = prompt_of(3 * BLOCK_SIZE)
    first, second = [*shared, *prompt_of(2, seed=1)], [*shared, *prompt_of(21, seed=2)]
    third = [*second[: 5 * BLOCK_SIZE], *prompt_of(4, seed=3)]
    run = Run(model)
    run.step(admitted=(sequence(0, first, run.blocks(0)),), scheduled=scheduled((0, 9, False)))
    run.step(scheduled=scheduled((0, len(first) - 9, True)))
    admitted, left, steps = (sharing(run, 1, second, 3),), 21, 1
    while left:
        count = min(num_chunk, left)
        left -= count
        run.step(admitted=admitted, scheduled=scheduled((1, count, not left)), decode_ready=True)
        admitted, steps = (), steps + 1
    table = run.blocks(0)[:3] + run.blocks(1)[:2] + run.blocks(2)[:3]
    run.step(admitted=(sequence(2, third, table, 40),), scheduled=scheduled((2, 3, False)), decode_ready=True)
    run.decode(NUM_OUTPUT)
    assert run.outputs[0] == alone(model, first, steps + 1 + NUM_OUTPUT)
    assert run.outputs[1] == alone(model, second, 2 + NUM_OUTPUT)
    assert run.outputs[2] == alone(model, third)


def test_a_next_turn_finds_what_was_said_before(model: Model) -> None:
    """Blocks that were filled token by token serve as prompt, for somebody else with more of it as prompt."""
    first = prompt_of(11)
    run = Run(model)
    run.step(admitted=(sequence(0, first, run.blocks(0)),), scheduled=scheduled((0, 11, True)))
    run.decode(22)
    said = first + run.tokens(0)
    assert len(said) == 34
    second = [*said, *prompt_of(6, seed=2)]
    # The newest token has no KV yet; 32 of the other 33 fill blocks.
    turn = {"released_slots": ints(0), "admitted": (sharing(run, 1, second, 4),)}
    run.step(**turn, scheduled=scheduled((1, 8, True)))
    run.decode(NUM_OUTPUT - 1)
    assert run.outputs[1] == alone(model, second)


# ---------------------------------------------------------------- swaps


def two_that_share(run: Run) -> tuple[list[int], list[int]]:
    """Slots 0 and 1 share two blocks, and have sampled four and three tokens."""
    shared = prompt_of(2 * BLOCK_SIZE)
    first, second = [*shared, *prompt_of(5, seed=1)], [*shared, *prompt_of(9, seed=2)]
    run.step(admitted=(sequence(0, first, run.blocks(0)),), scheduled=scheduled((0, len(first), True)))
    run.step(admitted=(sharing(run, 1, second, 2),), scheduled=scheduled((1, 9, True)), decode_ready=True)
    run.decode(2)
    return first, second


def swapped(run: Run, first: list[int], second: list[int], *, back: bool = True) -> StepResult:
    """Swap both out, each shared block once; compute another over their blocks at once; swap them in elsewhere."""
    known = first + run.tokens(0), second + run.tokens(1)
    computed = [len(tokens) - 1 for tokens in known]
    tails = [run.blocks(0)[2 : blocks_for(computed[0])], run.blocks(1)[: blocks_for(computed[1]) - 2]]
    device = [*run.blocks(0)[:2], *tails[0], *tails[1]]
    host = list(range(20, 20 + len(device)))[::-1]
    intruder = sequence(5, prompt_of(len(device) * BLOCK_SIZE, seed=5), device)
    run.step(
        released_slots=ints(0, 1), swap_out=moves(device, host), admitted=(intruder,),
        scheduled=scheduled((5, len(intruder.token_ids), False)),
    )  # fmt: skip
    run.step(released_slots=ints(5))
    # Sharing kept, in an order of its own, behind blocks that nobody had before.
    places = run.blocks(6)[3 : 3 + len(device)]
    tables = [
        places[:2] + places[2 : 2 + len(tails[0])] + run.blocks(3)[:3],
        places[:2] + places[2 + len(tails[0]) :] + run.blocks(4)[:3],
    ]
    return run.step(
        swap_in=moves(host, places) if back else BlockMoves(),
        admitted=tuple(
            sequence(slot, known[slot], tables[slot], computed[slot], prompt=(len(first), len(second))[slot])
            for slot in (0, 1)
        ),
        decode_ready=True,
    )


def test_sequences_that_were_swapped_go_on(model: Model) -> None:
    run = Run(model)
    first, second = two_that_share(run)
    swapped(run, first, second)
    run.decode(NUM_OUTPUT)
    assert run.outputs[0] == alone(model, first, 4 + 1 + NUM_OUTPUT)
    assert run.outputs[1] == alone(model, second, 3 + 1 + NUM_OUTPUT)


def test_without_the_way_back_they_fail(model: Model) -> None:
    run = Run(model)
    assert swapped(run, *two_that_share(run), back=False).error_slots.tolist() == [0, 1]


def test_a_prefix_found_in_the_host_pool(model: Model) -> None:
    """Two blocks come in for two sequences that the same plan admits; one finds a third block on the device."""
    shared = prompt_of(3 * BLOCK_SIZE)
    second, third = [*shared, *prompt_of(3, seed=2)], [*shared[:16], *prompt_of(10, seed=3)]
    run = Run(model)
    run.step(admitted=(sequence(0, shared, run.blocks(0)),), scheduled=scheduled((0, 24, True)))
    evicted = run.blocks(0)[:2]
    overwriting = sequence(5, prompt_of(16, seed=5), evicted)
    run.step(
        released_slots=ints(0), swap_out=moves(evicted, [9, 4]), admitted=(overwriting,),
        scheduled=scheduled((5, 16, True)),
    )  # fmt: skip
    back = run.blocks(6)[:2]
    tables = [*back, run.blocks(0)[2], *run.blocks(1)[:3]], [*back, *run.blocks(2)[:3]]
    run.step(
        released_slots=ints(5),
        swap_in=moves([9, 4], back),
        admitted=(sequence(1, second, tables[0], 24), sequence(2, third, tables[1], 16)),
        scheduled=scheduled((1, 3, True), (2, 10, True)),
    )
    run.decode(NUM_OUTPUT - 1)
    assert run.outputs[1] == alone(model, second)
    assert run.outputs[2] == alone(model, third)


# ---------------------------------------------------------------- copies


@pytest.mark.parametrize("length", [17, 20, 23])
def test_a_shared_partial_block_is_copied_before_it_is_written(model: Model, length: int) -> None:
    """Three go on from one sequence with other tokens: two over copies, and the last holder over the block itself."""
    prompt = prompt_of(length)
    run = Run(model)
    run.step(admitted=(sequence(0, prompt, run.blocks(0)),), scheduled=scheduled((0, length, True)))
    full, partial = run.blocks(0)[:2], run.blocks(0)[2]
    texts = [[*prompt, 40 + slot] for slot in range(3)]
    tables = [
        [*full, block, *own]
        for block, own in (
            (partial, run.blocks(0)[3:6]), (run.blocks(1)[0], run.blocks(1)[1:4]), (run.blocks(2)[7], run.blocks(2)[:3])
        )
    ]  # fmt: skip
    step = {
        "released_slots": ints(0),
        "admitted": tuple(sequence(slot, texts[slot], tables[slot], length, prompt=length) for slot in range(3)),
        "decode_ready": True,
    }
    run.outputs.clear()
    run.step(**step, copies=moves([partial] * 2, [run.blocks(1)[0], run.blocks(2)[7]]))
    run.decode(NUM_OUTPUT - 1)
    for slot in range(3):
        assert run.outputs[slot] == alone(model, texts[slot])


def test_a_block_is_left_then_copied_into_and_a_third_comes_in(model: Model) -> None:
    """One plan in which each move needs the one before: out of a, a copy of b over it, in from the host over c."""
    first, second = prompt_of(13, seed=1), prompt_of(12, seed=2)
    run = Run(model)
    (a0, a1), (b0, b1), c0 = run.blocks(0)[:2], run.blocks(1)[:2], run.blocks(2)[0]
    run.step(
        admitted=(sequence(0, first, [a0, a1]), sequence(1, second, [b0, b1])),
        scheduled=scheduled((0, 13, True), (1, 12, True)),
    )
    run.step(released_slots=ints(0), swap_out=moves([a0], [3]), decode_ready=True)
    known = first + run.tokens(0), second + run.tokens(1)
    # Slot 0's second block goes out and slot 1's is copied there; slot 0's first comes back into the copied one.
    run.step(
        released_slots=ints(1), swap_out=moves([a1], [8]), copies=moves([b1], [a1]), swap_in=moves([3], [b1]),
        admitted=(sequence(1, known[1], [b0, a1], len(known[1]) - 1, prompt=12),), decode_ready=True,
    )  # fmt: skip
    run.step(
        swap_in=moves([8], [c0]),
        admitted=(sequence(0, known[0], [b1, c0], len(known[0]) - 1, prompt=13),), decode_ready=True,
    )  # fmt: skip
    run.decode(1)
    assert run.outputs[0] == alone(model, first, 3)
    assert run.outputs[1] == alone(model, second, 5)


def test_moves_take_time_and_steps_without_them_none(model: Model) -> None:
    run = Run(model)
    admitted = (sequence(0, prompt_of(9), run.blocks(0)),)
    assert run.step(admitted=admitted, scheduled=scheduled((0, 9, True))).timings.moves_ns == 0
    for part in ("swap_out", "copies", "swap_in"):
        timings = run.step(**{part: moves([0, 1], [20, 21])}).timings
        assert 0 < timings.moves_ns <= timings.total_ns
    assert run.step(decode_ready=True).timings.moves_ns == 0
