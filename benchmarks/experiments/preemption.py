"""Experiment 6: preemption by recompute or by swap, by block size and memory pressure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from benchmarks.experiments.experiment import (
    Experiment,
    ExperimentResult,
    Figure,
    Finding,
    Place,
    Repeated,
    RunSettings,
    Series,
    Table,
    percent_more,
    ratio,
    series,
)
from benchmarks.experiments.preemption_runs import (
    AUTO,
    BESIDE,
    OWN_STEP,
    RECOMPUTE,
    SWAP,
    Outcome,
    Preempted,
    measured,
    simulated,
    swap_name,
)

_PAPER = "[vLLM, section 7.3](https://arxiv.org/abs/2309.06180)"
_MEDIUM = (16, 64)
"""Smallest and largest medium block size."""
_AUTO_WITHIN: dict[Place, float] = {"simulate": 0.01, "cpu": 0.05}
"""Allowed difference; measurements vary from run to run."""
_AGAINST: dict[Place, str] = {
    "simulate": "Each seed against the same seed, so that the difference is the rule's.",
    "cpu": "The same requests, due at the same times; random differences are included.",
}
_MICRO_BY: dict[Place, str] = {"simulate": "By the cost model", "cpu": "By the executor's own times"}


def run(settings: RunSettings) -> ExperimentResult:
    """Run in virtual time or on the CPU, with the same questions."""
    outcome = measured(settings) if settings.place == "cpu" else simulated(settings)
    own = _cpu_findings(outcome) if settings.place == "cpu" else _simulated_findings(outcome)
    return ExperimentResult(
        experiment=EXPERIMENT.name,
        place=settings.place,
        seed=settings.seed,
        setup=dict(outcome.setup),
        findings=[*own, _auto_finding(outcome, _AUTO_WITHIN[settings.place]), _pressure_finding(outcome)],
        figures=_figures(outcome, settings.place),
        tables=[_size_table(outcome), _pool_table(outcome)],
    )


def _simulated_findings(outcome: Outcome) -> list[Finding]:
    return [_micro_finding(outcome), _small_finding(outcome), _large_finding(outcome)]


def _cpu_findings(outcome: Outcome) -> list[Finding]:
    """Without blocks of 1: the executor has none."""
    swaps, gains = outcome.micro_ms[swap_name(outcome.layout)], _gains(outcome, SWAP)
    own, beside = (next(iter(outcome.micro_ms[way].values())) for way in (OWN_STEP, BESIDE))
    return [
        Finding(
            claim=f"Moving KV in blocks of 16 to 64 takes about as long as computing it again ({_PAPER}, figure 19a). "
            "Holds if half to 1.5 times",
            held=all(0.5 < swaps[size] / own < 1.5 for size in _medium(outcome)),
            evidence=f"256 tokens: computed in a step of their own {own:.1f} ms, beside 20 decodes {beside:.1f} ms "
            "more than these alone; moved out and in "
            + ", ".join(f"{ms:.2f} ms with blocks of {size}" for size, ms in swaps.items()),
        ),
        Finding(
            claim=f"End to end, swapping is as good with blocks of 16 to 64 ({_PAPER}, figure 19b). Holds if its "
            "throughput is within 3%",
            held=all(abs(gains[size].mean - 1) < 0.03 for size in _medium(outcome)),
            evidence=_gain_text(gains),
        ),
        Finding(
            claim="Expected: on a CPU both pools are the same memory and computing takes long, so moving is better "
            "with blocks of every size. Holds if its throughput is higher with each, and its latency lower",
            held=all(gain.mean > 1 for gain in gains.values())
            and all(
                case.latency_s.mean < outcome.by_size[RECOMPUTE][size].latency_s.mean
                for size, case in outcome.by_size[SWAP].items()
            ),
            evidence="latency by swap and by recompute, ms/token: "
            + ", ".join(
                f"{1e3 * case.latency_s.mean:.1f} and {1e3 * outcome.by_size[RECOMPUTE][size].latency_s.mean:.1f} with "
                f"blocks of {size}"
                for size, case in outcome.by_size[SWAP].items()
            ),
        ),
    ]


def _micro_finding(outcome: Outcome) -> Finding:
    swaps, own = outcome.micro_ms[swap_name(outcome.layout)], outcome.micro_ms[OWN_STEP]
    return Finding(
        claim="Moving KV in small blocks takes far longer than computing it again, in blocks of 16 to 64 about as long "
        f"({_PAPER}, figure 19a: some 135 ms against 25 ms with blocks of 1, read off the plot). Holds if a swap takes "
        "over 3 times as long with blocks of 1, and half to 1.5 times with 16 to 64",
        held=swaps[1] > 3 * own[1] and all(0.5 < swaps[size] / own[size] < 1.5 for size in _medium(outcome)),
        evidence=f"256 tokens, by the cost model: computed in a step of their own {own[1]:.0f} ms; moved out and in "
        + ", ".join(f"{swaps[size]:.0f} ms with blocks of {size}" for size in (1, *_medium(outcome))),
    )


def _small_finding(outcome: Outcome) -> Finding:
    gains = _gains(outcome, SWAP)
    return Finding(
        claim=f"End to end, swapping is worse with small blocks, and as good with blocks of 16 to 64 ({_PAPER}, figure "
        "19b). Holds if its throughput is over 5% lower with blocks of 1, and within 3% with 16 to 64",
        held=gains[1].mean < 0.95 and all(abs(gains[size].mean - 1) < 0.03 for size in _medium(outcome)),
        evidence=_gain_text(gains),
    )


def _large_finding(outcome: Outcome) -> Finding:
    largest = max(outcome.by_size[SWAP])
    gain = _gains(outcome, SWAP)[largest]
    own, beside = outcome.micro_ms[OWN_STEP][largest], outcome.micro_ms[BESIDE][largest]
    return Finding(
        claim=f"Swapping is the better one with large blocks ({_PAPER}). Holds if its throughput with blocks of "
        f"{largest} is not lower",
        held=gain.mean >= 1,
        evidence=f"{gain.mean - 1:+.1%}; 256 tokens computed beside 20 decodes take {beside:.1f} ms more than these "
        f"alone, not {own:.0f} ms, and moved {outcome.micro_ms[swap_name(outcome.layout)][largest]:.0f} ms",
    )


def _auto_finding(outcome: Outcome, within: float) -> Finding:
    better = {
        size: max(outcome.by_size[rule][size].output_tokens_per_s.mean for rule in (RECOMPUTE, SWAP))
        for size in outcome.by_size[AUTO]
    }
    against = {size: auto.output_tokens_per_s.mean / better[size] - 1 for size, auto in outcome.by_size[AUTO].items()}
    return Finding(
        claim="auto takes whichever costs less ([options](options.md)). Holds if its throughput is within "
        f"{within:.0%} of the better rule's with every block size",
        held=min(against.values()) > -within,
        evidence="against the better of both: "
        + ", ".join(f"{share:+.1%} with blocks of {size}" for size, share in against.items()),
    )


def _pressure_finding(outcome: Outcome) -> Finding:
    evidence, held = [], True
    for rule, cases in outcome.by_pool.items():
        pools = sorted(cases)
        held &= all(cases[a].preemptions.mean >= cases[b].preemptions.mean for a, b in itertools.pairwise(pools))
        small, full = cases[pools[0]], cases[pools[-1]]
        held &= small.preemptions.mean > 0
        evidence.append(f"{rule} {small.preemptions.mean:.2f} and {full.preemptions.mean:.2f} per request")
    return Finding(
        claim="Expected: the smaller the pool, the more requests are preempted, whatever the rule. Holds if "
        "preemptions per request never fall as the pool shrinks, and there are some",
        held=held,
        evidence=f"at the rate, with {min(outcome.by_pool[AUTO]):.0%} of the pool and all of it: "
        + "; ".join(evidence),
    )


def _medium(outcome: Outcome) -> list[int]:
    return [size for size in outcome.by_size[SWAP] if _MEDIUM[0] <= size <= _MEDIUM[1]]


def _gains(outcome: Outcome, line: str) -> dict[int, Repeated]:
    base = outcome.by_size[RECOMPUTE]
    return {
        size: ratio(case.output_tokens_per_s, base[size].output_tokens_per_s)
        for size, case in outcome.by_size[line].items()
    }


def _gain_text(gains: Mapping[int, Repeated]) -> str:
    evidence = ", ".join(f"{gain.mean - 1:+.1%} with blocks of {size}" for size, gain in gains.items())
    return f"throughput of swap against recompute: {evidence}"


def _figures(outcome: Outcome, place: Place) -> list[Figure]:
    sizes: list[float | str] = list(outcome.by_size[SWAP])
    pools: list[float | str] = [f"{pool:.0%}" for pool in outcome.by_pool[SWAP]]
    return [
        Figure(
            name="micro",
            title="What it takes to bring 256 tokens back",
            x_label="tokens of a block",
            y_label="time, ms",
            log_x=True,
            log_y=True,
            series=[Series(label=name, x=sizes, y=list(each.values())) for name, each in outcome.micro_ms.items()],
            caption=f"{_MICRO_BY[place]}; a swap is out and in. Beside decodes, weights are read anyway.",
        ),
        _against_recompute(outcome, place, "throughput", "Throughput", "output_tokens_per_s", "all at once"),
        _against_recompute(outcome, place, "latency", "Normalized latency", "latency_s", "at one request rate"),
        Figure(
            name="pressure",
            title="Preemptions by size of the pool, at one request rate",
            x_label="share of the whole pool",
            y_label="preemptions per request",
            kind="bar",
            series=[
                series(rule, pools, [case.preemptions for case in cases.values()])
                for rule, cases in outcome.by_pool.items()
            ],
        ),
    ]


def _against_recompute(outcome: Outcome, place: Place, name: str, title: str, field: str, load: str) -> Figure:
    base = outcome.by_size[RECOMPUTE]
    labels = {SWAP: swap_name(outcome.layout)}
    return Figure(
        name=name,
        title=f"{title} against recompute, {load}",
        x_label="tokens of a block",
        y_label=f"{title.lower()}, difference in %",
        log_x=True,
        series=[
            series(
                labels.get(line, line),
                list(cases),
                [percent_more(getattr(case, field), getattr(base[size], field)) for size, case in cases.items()],
            )
            for line, cases in outcome.by_size.items()
            if line != RECOMPUTE
        ],
        caption=f"Half of the pool. {_AGAINST[place]}",
    )


_FIELDS = [
    "all at once: output tokens/s", "at the rate: latency, ms/token", "E2E p99, s", "preemptions per request"
]  # fmt: skip


def _cells(case: Preempted) -> list[str]:
    return [
        case.output_tokens_per_s.text(".0f"),
        case.latency_s.text(".1f", scale=1e3),
        case.e2e_p99_s.text(".1f"),
        case.preemptions.text(".2f"),
    ]


def _size_table(outcome: Outcome) -> Table:
    rows = [
        [str(size), line, *_cells(cases[size])]
        for size in outcome.by_size[SWAP]
        for line, cases in outcome.by_size.items()
        if size in cases
    ]
    return Table(title="By size of blocks", columns=["block", "rule", *_FIELDS], rows=rows)


def _pool_table(outcome: Outcome) -> Table:
    rows = [
        [f"{pool:.0%}", rule, *_cells(cases[pool])]
        for pool in outcome.by_pool[SWAP]
        for rule, cases in outcome.by_pool.items()
    ]
    return Table(title="By size of the pool, in blocks of 16", columns=["pool", "rule", *_FIELDS], rows=rows)


EXPERIMENT = Experiment(
    name="6-preemption",
    title="Preemption: compute again, or move away",
    hypothesis=f"""
A scheduler that runs out of memory can drop KV and compute it again, or move it to the host and back. {_PAPER} finds
that moving suffers with small blocks, as a small copy takes about as long as its launch: K and V of each layer of each
block were copied by themselves. Computing again takes the same with every block size. With blocks of 16 to 64 both came
out alike; with larger ones moving was better, though computing again never took over 20% longer.

The same model and lengths here in virtual time. A block of n tokens takes 80 copies (40 layers, K and V), each 2.3 us
([as measured on an H20](https://github.com/taco-project/FlexKV/pull/193)) besides its bytes at 80% of PCIe 4.0's 32
GB/s. Cadenza's own executor gathers blocks on the device and copies them at once, so a line shows one copy for a block.
What is moved waits in line with the step, as nothing overlaps in the cost model. `--preemption auto` chooses for each
request by what computing and moving were measured to cost.
""",
    notes="""
Large blocks do not make moving better here, because computing again is cheaper than in the paper: there a prompt was a
step of its own, here its tokens run in the same step as the decodes, whose weights are read in any case. Up to some
230 tokens a step are then free, and only what a whole step takes alone compares as the paper has it. With one copy for
a block, moving is as good as computing with blocks of up to 64, and no better.

auto goes by what a token adds to a step, the slope of step times over their tokens. It once divided whole steps by
their tokens, of which most only decode: 20 tokens in 25 ms, so that a token seemed to cost over 1 ms, where one more
costs 0.1 ms at most and mostly nothing. It then moved nearly always, and lost up to 11% with small blocks; this
experiment found that.

On the real services moving 256 tokens takes a quarter of computing them, as both pools are the same memory. What that
is worth end to end these single runs do not show: 60 requests take a few seconds, and without any preemption, with all
of the pool, the rules differ as well. Longer runs, and several, are needed.
""",
    run=run,
    places=("simulate", "cpu"),
)
