"""What do a prefix cache and a host tier give agents whose contexts are more than the device's pool holds?

Both services on the CPU, a checkpoint with random weights. Agents share the text of their tools, and have a task each.
A call adds an answer and a tool's output to an agent's prompt. Agents make a few calls in a row, drawn by the seed, and
wait while others go on; one request runs at a time. The device's pool holds a share of what all agents need for their
next calls: the KV of their prompts and a state each. Each case runs without a host pool, and with one for all agents.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.benchmark import Benchmark, positive, progress
from benchmarks.common.burst_client import local_services
from benchmarks.common.checkpoints import SHAPES, random_checkpoint, vocab_size
from benchmarks.common.first_token import first_token
from benchmarks.common.rows import OtherLoad, Row, make_row, percentile, wait_quiet
from cadenza import AsyncClient
from cadenza.info import ServerInfo

NAME = "agents"
_BLOCK = 16
_TOOLS, _TASK, _ANSWER, _OUTPUT = 256, 192, 16, 96
"""Tokens of the common text, of a task, of an answer and of a tool's output."""
_ROW = (1, 3)
"""Calls in a row."""
_MOST_TOKENS = 4096
_VOCABULARY = 32_000
_COSTS = {"step_us": 2000, "token_us": 300, "moved_block_us": 50}
"""Of the simulated executor: whether a block is kept on the host depends on what moving and computing it take."""
_STATE_BLOCKS = {"qwen3.5-0.8b": 101, "lfm2.5-1.2b": 1}
"""Blocks of KV that take as much memory as a state."""
_STATES_BESIDE = 2
"""An executor adds a state for each sequence of a batch to its pool: for the running request, and a copy of it."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The calls of all agents in their order."""

    num_agents: int
    num_calls: int
    """Of each agent."""
    seed: int

    def order(self) -> list[int]:
        """The agent of each call."""
        rng = random.Random(self.seed)
        left = dict.fromkeys(range(self.num_agents), self.num_calls)
        order = list[int]()
        while left:
            agent = rng.choice([each for each in left if not order or each != order[-1]] or list(left))
            count = min(left[agent], rng.randint(*_ROW))
            order += [agent] * count
            left[agent] -= count
            if not left[agent]:
                del left[agent]
        return order

    def num_blocks(self, state_blocks: int) -> int:
        """KV blocks of what all agents need for their last calls."""
        last = _TASK + self.num_calls * (_ANSWER + _OUTPUT)
        return -(-_TOOLS // _BLOCK) + self.num_agents * (-(-last // _BLOCK) + state_blocks)


@dataclass(frozen=True, slots=True)
class Served:
    """What came of a trace."""

    first_s: list[float]
    """Seconds to the first token of each call but the first of each agent."""
    num_prompt: int
    num_found: int
    num_on_host: int
    """Of these, tokens that were found in the host pool."""


async def serve(target: str, trace: Trace, vocabulary: int) -> Served:
    """Make the calls of a trace, one after the other."""
    rng = random.Random(trace.seed)
    tools = _draw(rng, _TOOLS, vocabulary)
    prompts = [[*tools, *_draw(rng, _TASK, vocabulary)] for _ in range(trace.num_agents)]
    first_s, started = list[float](), set[int]()
    async with AsyncClient(target) as client:
        await first_token(client, [5, 6, 7], _ANSWER)  # so that the times do not include connecting
        before = await client.server_info()
        for agent in trace.order():
            taken, answer = await first_token(client, prompts[agent], _ANSWER)
            first_s += [taken] if agent in started else []
            started.add(agent)
            prompts[agent] += [*answer, *_draw(rng, _OUTPUT, vocabulary)]
        return _served(first_s, before, await client.server_info())


def _served(first_s: list[float], before: ServerInfo, after: ServerInfo) -> Served:
    names = ("num_prefix_queries", "num_prefix_hits", "num_prefix_host_hits")
    return Served(first_s, *(getattr(after.load, name) - getattr(before.load, name) for name in names))


def _draw(rng: random.Random, count: int, vocabulary: int) -> list[int]:
    return [rng.randrange(5, vocabulary) for _ in range(count)]


def _measure(
    folder: Path, trace: Trace, num_blocks: int, num_host_blocks: int, simulated: int | None
) -> dict[str, float]:
    """Run a case. simulated: pages of a state on the simulated executor; None: the model is run."""
    options: dict[str, Any] = {
        "max_model_len": _MOST_TOKENS, "max_num_seqs": _STATES_BESIDE, "block_size": _BLOCK,
        "num_gpu_blocks": num_blocks, "num_cpu_blocks": num_host_blocks,
    }  # fmt: skip
    if simulated is not None:
        costs = Path(tempfile.mkdtemp()) / "costs.json"
        costs.write_text(json.dumps(_COSTS))
        options |= {"simulate": str(costs), "simulate_vocab_size": _VOCABULARY, "simulate_kv_groups": "full:1"}
        options |= {"simulate_state_pages": simulated, "num_gpu_blocks": num_blocks + _STATES_BESIDE * simulated}
    start = time.perf_counter()
    with local_services(folder, **options) as services:
        ready = time.perf_counter()
        vocabulary = vocab_size(folder) if simulated is None else _VOCABULARY
        served = asyncio.run(serve(services.target, trace, vocabulary))
        progress(f"{NAME}: started in {ready - start:.0f} s, served in {time.perf_counter() - ready:.0f} s")
    return {
        "found_share": served.num_found / served.num_prompt,
        "on_host_share": served.num_on_host / served.num_prompt,
        "ttft_p50_ms": 1e3 * percentile(served.first_s, 50),
        "ttft_p90_ms": 1e3 * percentile(served.first_s, 90),
        "ttft_mean_ms": 1e3 * sum(served.first_s) / len(served.first_s),
        "prompt_tokens": float(served.num_prompt),
    }


def _run(options: argparse.Namespace) -> Iterator[Row]:
    for shape in options.shapes:
        state_blocks = _STATE_BLOCKS.get(shape, 0)
        folder, simulated = (Path("simulated"), state_blocks) if options.simulate else (random_checkpoint(shape), None)
        for share in options.shares:
            for with_host in (False, True):
                repeats, others = [], []
                for seed in range(options.seed, options.seed + options.repeats):
                    trace = Trace(options.agents, options.calls, seed)
                    all_blocks = trace.num_blocks(state_blocks)
                    num_blocks = round(share * all_blocks)
                    progress(f"{NAME}: {shape}, pool of {num_blocks} blocks, host pool {with_host}, seed {seed}")
                    wait_quiet(options.quiet_wait_s)
                    with OtherLoad() as other:
                        host_blocks = 2 * all_blocks if with_host else 0
                        repeats.append(_measure(folder, trace, num_blocks, host_blocks, simulated))
                    others.append(other.cores)
                model = f"{folder.name} {shape}" if options.simulate else folder.name
                params = {"model": model, "agents": options.agents, "calls": options.calls, "pool": share}
                params |= {"blocks": num_blocks, "host": with_host}
                yield make_row(NAME, seed=options.seed, params=params, repeats=repeats, other_cores=others)


def _describe(row: Row) -> str:
    found, params = row.medians, row.params
    where = "with a host pool" if params["host"] else "without one"
    return (
        f"{params['model']}, {params['agents']} agents, the pool holds {params['pool']:.0%}, {where}: found "
        f"{found['found_share']:.1%} of the prompts' tokens ({found['on_host_share']:.1%} on the host), to the first "
        f"token {found['ttft_p50_ms']:.0f} ms, p90 {found['ttft_p90_ms']:.0f} ms"
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shapes",
        nargs="+",
        choices=tuple(SHAPES),
        default=["qwen3-0.6b", "lfm2.5-1.2b", "qwen3.5-0.8b"],
        help="(default an attention model and two hybrids)",
    )
    parser.add_argument("--simulate", action="store_true", help="on the simulated executor, 300 us a token")
    parser.add_argument("--agents", type=positive, default=5, help="(default 5)")
    parser.add_argument("--calls", type=positive, default=6, help="of each agent (default 6)")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5], help="that the pool holds (default 0.5)")


BENCHMARK = Benchmark(NAME, "what does a host tier give agents beside the prefix cache?", _add_options, _run, _describe)
