"""Makes the drawings of docs/scheduler.md from runs of the core: `python docs/generate_scheduler.py [--check]`.

Each run is the service's core over the simulated executor on virtual time, so drawings are the same on every machine.
A drawing is in the page between `<!-- begin NAME -->` and `<!-- end NAME -->`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from scheduler_runs import VOCAB_SIZE, Run, fenced, grid, lane_spec, name_of, pairs_text, table, write_page

from cadenza_common.plan.sampling import SequenceSampling
from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.lanes.planned_step import PlannedStep
from scheduler_svc.core.memory.block_pool import BlockPool
from scheduler_svc.core.policies.batching import BatchingPolicy, ContinuousBatching, StaticBatching
from scheduler_svc.core.policies.policies import Policies, Preemption
from scheduler_svc.core.sequences.sequence import Sequence
from scheduler_svc.core.types import BeamSpec, SequenceState
from tests.helpers.core.core_executor import COSTS

TARGET = Path(__file__).with_name("scheduler.md")


# --- queues ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _History:
    """The activity of each request in each step, and the free blocks after it."""

    cells: dict[str, list[str]]
    tokens: list[int] = field(default_factory=list)
    num_free: list[int] = field(default_factory=list)
    num_host: list[int] = field(default_factory=list)


_ARRIVALS = {1: [("A", 6, 10), ("B", 13, 9), ("C", 3, 9)], 3: [("D", 5, 6)]}
"""Requests by the step before which they arrive: name, prompt tokens, output tokens."""
_LETTERS = {
    SequenceState.WAITING: "W",
    SequenceState.RUNNING: "D",
    SequenceState.SWAPPED: "S",
    SequenceState.FINISHED: ".",
}


def queues(preemption: Preemption) -> str:
    """A table of steps by requests: waiting, computing a chunk, decoding, swapped, finished."""
    run = Run(
        Policies(preemption=preemption), lane_spec(10, max_num_seqs=3, max_num_batched_tokens=8, num_host_blocks=8)
    )
    history = _History({name: [] for arrivals in _ARRIVALS.values() for name, _, _ in arrivals})
    groups = {}
    number = 0
    while number < max(_ARRIVALS) or run.core.groups:
        number += 1
        for name, num_prompt, num_output in _ARRIVALS.get(number, []):
            run.add(name, range(1, num_prompt + 1), num_output)
            groups[name] = run.core.groups["", name]
        step = run.plan()
        if step is None:
            break
        for name, cells in history.cells.items():
            cells.append(_activity(step, groups[name].sequences[0]) if name in groups else "")
        history.tokens.append(step.total_tokens)
        history.num_free.append(run.lane.blocks.num_free)
        history.num_host.append(run.lane.blocks.num_used_host)
        run.apply(step)
    rows: list[list[object]] = [["step", *range(1, len(history.tokens) + 1)]]
    rows += [[name, *cells] for name, cells in history.cells.items()]
    rows += [["tokens", *history.tokens], ["free blocks", *history.num_free], ["host blocks", *history.num_host]]
    return fenced(grid(rows))


def _activity(step: PlannedStep, sequence: Sequence) -> str:
    if sequence.state is SequenceState.RUNNING:
        for chunk in step.chunks:
            if chunk.sequence is sequence and chunk.context_len < len(sequence.token_ids) - 1:
                return f"P{chunk.num_tokens}"
    return _LETTERS[sequence.state]


# --- tables ----------------------------------------------------------------------------------------------------------


def tables() -> str:
    """Block tables, ref counts and slot mapping of one step."""
    run = Run(Policies(), lane_spec(12, max_num_batched_tokens=12))
    steps: list[PlannedStep] = []
    for arrivals in ([("A", 7, 3), ("B", 5, 9)], [], [("C", 4, 6)], [("D", 11, 5)]):
        for name, num_prompt, num_output in arrivals:
            run.add(name, range(1, num_prompt + 1), num_output)
        if steps:
            run.apply(steps[-1])
        steps.append(run.step())
    step, lane = steps[-1], run.lane
    rows: list[list[object]] = [["sequence", "tokens", "block table", "computes positions", "slot mapping"]]
    for sequence in lane.running:
        positions, size = _computes(step, sequence), lane.spec.block_size
        mapping = [sequence.block_ids[position // size] * size + position % size for position in positions]
        rows.append(
            [name_of(sequence), sequence.num_planned_tokens, sequence.block_ids, _span(positions), _spans(mapping)]
        )
    return fenced(grid(rows), grid(_pool(lane)))


def _computes(step: PlannedStep, sequence: Sequence) -> range:
    """The positions that a sequence computes in this step."""
    for chunk in step.chunks:
        if chunk.sequence is sequence:
            return range(chunk.context_len, chunk.context_len + chunk.num_tokens)
    end = sequence.num_computed_tokens
    return range(end - sequence.is_decoding, end)


def _span(numbers: range) -> str:
    if not numbers:
        return "-"
    return f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])


def _spans(numbers: list[int]) -> str:
    """Consecutive numbers as spans."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][-1] == number - 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    return ", ".join(_span(range(span[0], span[-1] + 1)) for span in spans)


def _pool(lane: Lane) -> list[list[object]]:
    """Ref counts of the device pool, and each block's holders with the index in their block table."""
    holders: dict[int, list[str]] = {}
    for sequence in lane.running:
        for index, block_id in enumerate(sequence.block_ids):
            holders.setdefault(block_id, []).append(f"{name_of(sequence)}[{index}]")
    counts = lane.blocks.pool.num_holders
    rows: list[list[object]] = [["block", *range(len(counts))], ["ref count", *counts]]
    rows.append(["holder", *("+".join(holders.get(block_id, ["-"])) for block_id in range(len(counts)))])
    return rows


# --- samples and beams -----------------------------------------------------------------------------------------------


def forks() -> str:
    """The block tables of three samples before their fork, in the plan of the fork, and in the plan after it."""
    run = Run(Policies(), lane_spec(10, max_num_batched_tokens=8))
    run.add("A", range(1, 15), 6, num_samples=3)
    rows: list[list[object]] = [["plan", "sequence", "computes", "block table", "ref counts", "the plan says"]]
    for number in range(1, 4):
        step = run.step()
        for sequence in run.lane.running:
            positions = _span(_computes(step, sequence))
            rows.append([number, name_of(sequence), positions, *_held(run.lane, sequence), _says(step, sequence)])
        run.apply(step)
    return fenced(grid(rows))


def _says(step: PlannedStep, sequence: Sequence) -> str:
    """The entries of a plan for one sequence."""
    plan, slot = step.plan, sequence.slot
    said = [f"admit, blocks {list(admitted.block_ids)}" for admitted in plan.admitted if admitted.slot == slot]
    pairs = zip(plan.fork_source_slots, plan.fork_slots, strict=True)
    said += [f"fork from slot {source} to {fork}" for source, fork in pairs if fork == slot]
    said += [f"copy {pair[0]}→{pair[1]}" for pair in plan.copies if pair[1] in sequence.block_ids]
    appended = [block for at, block in zip(plan.append_slots, plan.append_block_ids, strict=True) if at == slot]
    said += [f"append {block_id}" for block_id in appended]
    said += ["resume" for at in plan.resumed_slots if at == slot]
    given = zip(plan.given_slots, plan.given_token_ids, strict=True)
    said += [f"given {token_id}" for at, token_id in given if at == slot]
    return "; ".join(said) or "-"


def beams() -> str:
    """Beams, best first, after each of some results, and their entries in the next plan."""
    run = Run(Policies(), lane_spec(14, max_num_batched_tokens=8), vocab_size=19)
    run.add("A", range(4, 10), 8, num_samples=2, beams=BeamSpec(width=3))
    group, pool = run.core.groups["", "A"], run.lane.blocks
    rows: list[list[object]] = [
        ["result", "output", "parent", "beam", "slot", "block table", "ref counts", "the next plan says", "free"]
    ]
    step = run.step()
    names: dict[tuple[int, ...], str] = {(): "A0"}
    for number in range(1, 5):
        run.apply(step)
        found = [(beam, tuple(beam.token_ids[6:]), _held(run.lane, beam)) for beam in group.beams]
        num_free = pool.num_free
        step = run.step()
        for index, (beam, output, held) in enumerate(found):
            begin = [number if not index else "", " ".join(map(str, output)), names[output[:-1]], name_of(beam)]
            rows.append([*begin, beam.slot, *held, _says(step, beam), num_free if not index else ""])
        names = {output: name_of(beam) for beam, output, _ in found}
    return fenced(grid(rows))


def _held(lane: Lane, sequence: Sequence) -> tuple[str, str]:
    """A block table and its ref counts."""
    counts = lane.blocks.pool.num_holders
    return str(sequence.block_ids), str([counts[block_id] for block_id in sequence.block_ids])


# --- prefix cache ----------------------------------------------------------------------------------------------------

_SYSTEM = range(1, 10)
"""The common prefix of some prompts."""


def prefix_cache() -> str:
    """The cache hits of each request at admission, and the state of the pools."""
    run = Run(Policies(prefix_caching=True), lane_spec(8, num_host_blocks=4))
    requests = [
        ("A", [*_SYSTEM, 20, 21], 4),
        ("B", [*_SYSTEM, 30], 4),
        ("C", range(40, 65), 4),
        ("D", [*_SYSTEM, 31], 2),
    ]
    rows: list[list[object]] = [["step", "in the batch", "found", "moved out", "moved in", "device", "host"]]
    number = 0
    while number < 2 or run.core.groups or requests:
        number += 1
        # B arrives while A runs; the others when nothing runs any more.
        if requests and (number < 3 or not run.core.groups):
            run.add(*requests.pop(0))
        step = run.step()
        found = [f"{name_of(joined)}: {joined.num_hit_tokens} of {joined.num_tokens}" for joined in step.joined]
        batch = [name_of(holder) for slot in sorted(step.slots) if (holder := run.lane.sequence_at[slot])]
        moves = step.plan.swap_out, step.plan.swap_in
        pools = run.lane.blocks.pool, run.lane.blocks.host_pool
        row = [" ".join(batch), " ".join(found) or "-", *map(pairs_text, moves), *map(_map, pools)]
        if rows[-1][1:] == row:
            rows[-1][0] = f"{str(rows[-1][0]).split()[0]} to {number}"
        else:
            rows.append([number, *row])
        run.apply(step)
    return fenced(grid(rows))


def _map(pool: BlockPool) -> str:
    """A character for each block: its ref count, c if it is cached without holders, a dot if it is unused."""
    counts = enumerate(pool.num_holders)
    return "".join(str(count) if count else "c" if block_id in pool.cached else "." for block_id, count in counts)


# --- preemption ------------------------------------------------------------------------------------------------------


def auto() -> str:
    """The choices of `auto` for one load on executors with increasing cost of block moves."""
    size = 16
    rows = [
        ["moving a block takes", "a token computed takes", "2 blocks moved", f"{size} tokens computed", "preempted"]
    ]
    for moved_block_us in (20.0, 80.0, 320.0):
        costs = COSTS.model_copy(update={"moved_block_us": moved_block_us})
        spec = lane_spec(10, size, num_host_blocks=10, max_num_batched_tokens=64, max_model_len=128)
        run = Run(Policies(preemption="auto"), spec, costs)
        for name in "ABCD":
            run.add(name, range(1, 33), 48)
        num_preempted = num_swapped = 0
        while run.core.groups:
            step = run.step()
            num_preempted += len(step.preempted)
            num_swapped += len(step.swapped_out)
            run.apply(step)
        rates = run.lane.rates
        per_token, per_block = (rates.ns_per_token or 0.0) / 1000, rates.ns_per_block / 1000
        preempted = f"{num_swapped} by swap, {num_preempted - num_swapped} by recompute"
        rows.append([*(f"{us:,.0f} µs" for us in (per_block, per_token, 2 * per_block, size * per_token)), preempted])
    return table(rows)


# --- fragmentation ---------------------------------------------------------------------------------------------------

_STEP_S = 0.025
"""Duration of a step in this run."""


def fragmentation() -> str:
    """The use of token slots in held blocks, by batching policy, over all steps of one load."""
    cases: list[tuple[str, BatchingPolicy, int | None]] = [
        ("continuous", ContinuousBatching(), 512),
        ("dynamic", StaticBatching(8, window_s=0.05), 512),
        ("static", StaticBatching(8), 512),
        ("continuous", ContinuousBatching(), None),
        ("static", StaticBatching(8), None),
    ]
    head = ["batching", "max_tokens", "stored", "reserved, unused", "internal", "external", "running", "steps"]
    rows = [head]
    for name, policy, max_tokens in cases:
        held, stored, reserved, running, steps = _account(policy, max_tokens)
        shares = [f"{100 * count / held:.1f} %" for count in (stored, reserved, held - stored - reserved)]
        limit = "not given" if max_tokens is None else str(max_tokens)
        rows.append([name, limit, *shares, "0", f"{running / steps:.1f}", f"{steps:,}"])
    return table(rows)


def _account(policy: BatchingPolicy, max_tokens: int | None) -> tuple[int, int, int, int, int]:
    """Token slots held, stored and reserved, and running sequences, summed over steps; and the number of steps."""
    spec = lane_spec(512, 16, num_slots=40, max_num_seqs=32, max_num_batched_tokens=512, max_model_len=2048)
    run, random = Run(Policies(batching=policy), spec), Random(4)
    sampling = SequenceSampling(stop_token_ids=(0, 1))
    arrivals: deque[tuple[float, list[int]]] = deque()
    moment = 0.0
    for _ in range(48):
        moment += random.expovariate(8.0)
        arrivals.append((moment, [random.randrange(2, VOCAB_SIZE) for _ in range(random.randint(16, 256))]))
    held = stored = reserved = running = steps = 0
    while arrivals or run.core.groups:
        while arrivals and arrivals[0][0] <= run.now:
            run.add(str(len(arrivals)), arrivals.popleft()[1], max_tokens, sampling=sampling)
        run.core.drain(not arrivals)
        step = run.plan()
        if step is None:
            run.now += _STEP_S
            continue
        lane = run.lane
        held += (lane.spec.num_blocks - lane.blocks.num_free) * lane.spec.block_size
        stored += lane.num_stored_tokens
        reserved += lane.spec.block_size * sum(map(lane.blocks.num_reserved, lane.running))
        running += len(lane.running)
        steps += 1
        run.apply(step, _STEP_S)
    return held, stored, reserved, running, steps


# --- the page --------------------------------------------------------------------------------------------------------

_DRAWINGS: dict[str, Callable[[], str]] = {
    "queues-recompute": lambda: queues("recompute"),
    "queues-swap": lambda: queues("swap"),
    "tables": tables,
    "forks": forks,
    "beams": beams,
    "prefix-cache": prefix_cache,
    "auto": auto,
    "fragmentation": fragmentation,
}


if __name__ == "__main__":
    write_page(TARGET, _DRAWINGS)
