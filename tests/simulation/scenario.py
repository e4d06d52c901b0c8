"""What one history is made of, drawn from its seed: options, an executor, clients, faults."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any

from cadenza.v1.types_pb2 import NumericsFingerprint
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.kv_groups import KVGroup
from scheduler_svc.plan_loop.ports import ModelDescription
from tests.helpers.loadtest.simulations import options
from tests.helpers.scheduler.changing_executor import MODEL, OTHER_NUMERICS
from tests.simulation.catalogue import NUM_ENTRIES, NUM_STEMS, catalogue, entries_of_stem
from tests.simulation.executor.adapting import CONTENTS, NO_ADAPTERS, AdapterPlan, path_of
from tests.simulation.executor.drafting import NO_DRAFTS, DraftPlan
from tests.simulation.executor.network import Delays

REAL_EXECUTOR_EVERY = 20
"""One history of so many runs the simulated executor of the service, over the wire's conversions."""
SHARE_WITH_DRAFTS = 0.34
"""Of histories."""
SHARE_WITH_ADAPTERS = 0.4
GROUPS_EVERY = 7
"""One history of so many has executors of several KV groups, or of one with a window or several pages a block."""
STATES_EVERY = 9
"""One history of so many has executors of a model with recurrent states."""
RECORDED_EVERY = 12
"""One history of so many is recorded, and its plan log replayed."""

FAULT_KINDS = (
    "cut", "stall", "silence", "kill", "stop", "hang", "watchdog", "slow step", "failed step", "out of memory",
    "non-finite", "other limits", "other numerics", "unusable limits", "replaced while opening", "refused session",
    "held", "fenced", "poison", "late scheduler", "wall clock jump", "drain", "terminated",
)  # fmt: skip
LANE_FAULT_KINDS = (
    "join", "drained executor", "drained and removed", "removed", "gone", "other list", "other model", "network",
)  # fmt: skip
"""Faults of histories with several executors."""
ADAPTER_FAULT_KINDS = (
    "changed adapter", "failed load", "slow load", "forgotten adapters", "unloaded adapter", "reloaded adapter",
)  # fmt: skip
"""Faults of histories with adapters, and what an operator does with them."""
_WEIGHTS = {"cut": 6, "kill": 6, "failed step": 3, "other limits": 4, "fenced": 0.4, "poison": 1.2, "silence": 0.7,
            "hang": 1.5, "watchdog": 1.0, "unusable limits": 0.6, "other numerics": 1.0,
            "non-finite": 2.5, "join": 2.0, "drained executor": 3.0, "drained and removed": 2.0, "gone": 3.0,
            "other list": 2.0}  # fmt: skip
KERNELS: tuple[dict[str, Any], ...] = (
    {"fingerprint": MODEL.fingerprint, "numerics": MODEL.numerics},
    {"fingerprint": OTHER_NUMERICS["fingerprint"], "numerics": (*MODEL.numerics, ("kernels", "others"))},
)
"""By numerics: the fingerprints of one model on several kernels."""
OTHER_MODEL: dict[str, Any] = {
    "fingerprint": NumericsFingerprint(digest=b"three").SerializeToString(),
    "numerics": (("weights", "3333"),),
}
NUMERICS: dict[bytes, int] = {each["fingerprint"]: number for number, each in enumerate((*KERNELS, OTHER_MODEL))}
"""By fingerprint: what the tokens of a process depend on."""
CLIENT_KINDS = ("patient", "slow", "cancels", "disconnects", "deadline", "twice")
_CLIENT_WEIGHTS = (8, 3, 2, 1, 2, 1)
_CLIENT_DRAFTS = (None, None, None, 0, 1, 2)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, and when it happens; `number` varies it."""

    kind: str
    at_s: float
    number: float
    place: float = 0.0
    """Which executor it happens to: a share of those that there are by then."""


@dataclass(frozen=True, slots=True)
class ClientPlan:
    """One client with one request."""

    name: str
    index: int
    """Of the catalogue."""
    kind: str
    arrives_s: float
    max_tokens: int | None
    tenant: str
    priority: int
    number: float
    """When it cancels or disconnects, or its deadline, in seconds after its arrival; how slowly it reads."""
    max_bytes: int
    """Of one message that it reads."""
    final_only: bool
    max_drafts: int | None = None
    """The most drafts that it allows; None: as many as the executor."""
    adapter: str = ""
    """The name of its adapter; empty: none."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One history before it runs."""

    seed: int
    config: SchedulerConfig
    models: tuple[ModelDescription, ...]
    """Of the executors at the start."""
    numerics: tuple[int, ...]
    """Of each of them."""
    delays: Delays
    latest_s: float
    clients: tuple[ClientPlan, ...]
    faults: tuple[Fault, ...]
    is_real: bool
    """Whether the executor is the service's own simulated one."""
    is_recorded: bool
    resolves: bool
    """Whether the scheduler's list of executors is a name that it resolves again and again."""
    drafts: DraftPlan = NO_DRAFTS
    adapters: AdapterPlan = NO_ADAPTERS


@cache
def _base_config() -> SchedulerConfig:
    return options(log_stats_interval_s=0.0, max_queued_requests=64)


def draw_scenario(seed: int) -> Scenario:
    """The same for the same seed."""
    rng = Random(f"scenario {seed}")
    is_real = seed % REAL_EXECUTOR_EVERY == 0
    models = _draw_models(rng)
    duration_s = rng.choice([0.2, 0.5, 1.0])
    stem = rng.randrange(NUM_STEMS)
    num_clients = rng.choice([3, 5, 6, 8] if len(models) == 1 else [3, 4, 6, 9])
    clients = tuple(_draw_client(rng, f"r{number}", duration_s, stem) for number in range(num_clients))
    scenario = Scenario(
        seed=seed,
        config=_base_config().model_copy(update=_draw_options(rng)),
        models=models,
        numerics=_draw_numerics(rng, len(models), is_real=is_real),
        delays=Delays(rng.choice([0.0005, 0.002, 0.02]), rng.choice([0.0, 0.05])),
        latest_s=rng.choice([0.0, 0.001, 0.001, 0.005]),
        clients=clients,
        faults=_draw_faults(rng, duration_s, clients, is_real=is_real, has_lanes=len(models) > 1),
        is_real=is_real,
        is_recorded=seed % RECORDED_EVERY == 0,
        resolves=rng.random() < 0.2,
    )
    if seed % GROUPS_EVERY == 4:
        scenario = replace(scenario, models=_with_groups(Random(f"groups {seed}"), models))
    drawn = Random(f"drafts {seed}")
    if drawn.random() < SHARE_WITH_DRAFTS:
        scenario = _with_drafts(drawn, scenario)
    drawn = Random(f"adapters {seed}")
    if drawn.random() < SHARE_WITH_ADAPTERS:
        scenario = _with_adapters(drawn, scenario, duration_s)
    return _with_states(Random(f"states {seed}"), scenario) if seed % STATES_EVERY == 6 else scenario


def _with_adapters(rng: Random, scenario: Scenario, duration_s: float) -> Scenario:
    """The same with executors that have adapters, requests of theirs and of none, and more clients now and then."""
    contents = {f"a{number}": rng.choice(CONTENTS) for number in range(1, 1 + rng.choice([2, 3, 4, 8]))}
    if rng.random() < 0.2:
        contents["broken"] = 0
    names = list(contents)
    more = [
        _draw_client(rng, f"s{number}", duration_s, rng.randrange(NUM_STEMS)) for number in range(rng.choice([0, 4, 8]))
    ]
    clients = tuple(
        replace(client, adapter=_draw_name(rng, names) if rng.random() < 0.8 else "")
        for client in (*scenario.clients, *more)
    )
    max_loras, continuous = rng.choice([1, 1, 2, 3]), scenario.config.batching == "continuous"
    faults = [
        Fault(rng.choice(ADAPTER_FAULT_KINDS), rng.random() * 1.2 * duration_s, rng.random(), rng.random())
        for _ in range(rng.choice([0, 1, 2, 4]))
    ]
    return replace(
        scenario,
        config=scenario.config.model_copy(
            update={
                "lora": [f"{name}={path_of(name)}" for name in names],
                "lora_load_timeout_s": rng.choice([0.5, 4.0, 300.0]),
                # Groups that wait for their adapter count, and a batch would wait for others behind a full queue.
                "max_queued_requests": scenario.config.max_queued_requests if continuous else 64,
            }
        ),
        models=tuple(_with_places(rng, model, max_loras) for model in scenario.models),
        clients=clients,
        faults=(*scenario.faults, *faults),
        adapters=AdapterPlan(
            tuple(contents.items()),
            load_s=rng.choice([0.001, 0.02, 0.2]),
            max_passed=rng.choice([2, 3, 32]),
            max_passed_s=rng.choice([0.05, 0.2, 1.0]),
        ),
    )


def _draw_name(rng: Random, names: list[str]) -> str:
    """The first ones most often."""
    return names[min(len(names) - 1, int(rng.expovariate(0.6)))]


def _with_places(rng: Random, model: ModelDescription, max_loras: int) -> ModelDescription:
    """Places for adapters; one of several executors may have none, or others."""
    chosen = rng.random()
    max_loras = 0 if chosen < 0.05 else rng.choice([1, 2, 4]) if chosen < 0.2 else max_loras
    return replace(model, max_loras=max_loras, max_cpu_loras=max_loras and max_loras + rng.choice([0, 0, 1, 3, 8]))


def _with_drafts(rng: Random, scenario: Scenario) -> Scenario:
    """The same with executors that draft, and requests with and without a limit of their own."""
    most, adaptive = rng.choice([1, 2, 3, 5, 9]), rng.random() < 0.5
    return replace(
        scenario,
        models=tuple(_drafting(rng, model, most, adaptive=adaptive) for model in scenario.models),
        clients=tuple(replace(client, max_drafts=rng.choice(_CLIENT_DRAFTS)) for client in scenario.clients),
        drafts=DraftPlan(rng.choice([0.0, 0.3, 0.7, 0.9, 1.0]), row_ns=rng.choice([1_000, 10_000, 100_000])),
    )


def _drafting(rng: Random, model: ModelDescription, most: int, *, adaptive: bool) -> ModelDescription:
    """Rows of logits bound drafts: there are some to spare, now and then none. One of several may have no drafts."""
    num_rows = model.max_num_seqs + rng.choice([0, 2, 6, 20])
    return replace(
        model,
        max_drafts=0 if rng.random() < 0.1 else most,
        adaptive_drafts=adaptive,
        max_num_seqs=num_rows,
        num_slots=model.num_slots + num_rows - model.max_num_seqs,
        max_num_batched_tokens=model.max_num_batched_tokens + num_rows - model.max_num_seqs,
    )


def _with_groups(rng: Random, models: tuple[ModelDescription, ...]) -> tuple[ModelDescription, ...]:
    """The same with KV groups; one of several may have others, or none. Windows need few pages: there are few."""
    usual, found = _draw_groups(rng), list[ModelDescription]()
    for model in models:
        groups = usual if rng.random() < 0.8 else rng.choice([(), _draw_groups(rng)])
        size = rng.choice([1, 2, model.block_size])
        changes: dict[str, Any] = {}
        if groups:
            pages = sum(group.pages_per_block for group in groups)
            share = rng.choice([0.4, 0.6, 1.0]) * pages * model.block_size / size
            changes = {"kv_groups": groups, "block_size": size}
            changes |= {name: int(getattr(model, name) * share) for name in ("num_device_blocks", "num_host_blocks")}
        found.append(replace(model, **changes))
    return tuple(found)


def _with_states(rng: Random, scenario: Scenario) -> Scenario:
    """The same with recurrent states: pages for all that run, for a few, or for a few copies besides.

    Nobody is poisoned: a sample that comes back alone is no suspect, and here it kills whatever is tried beside it.
    """
    models = []
    for model in scenario.models:
        num_pages = rng.randint(1, 3)
        count = num_pages * rng.choice([model.max_num_seqs, 3, 2 * model.max_num_seqs])
        models.append(
            replace(
                model,
                pages_per_state=num_pages,
                num_device_blocks=model.num_device_blocks + count,
                num_host_blocks=model.num_host_blocks and model.num_host_blocks + count,
            )
        )
    faults = tuple(fault for fault in scenario.faults if fault.kind != "poison")
    return replace(scenario, models=tuple(models), faults=faults)


def _draw_groups(rng: Random) -> tuple[KVGroup, ...]:
    groups = [KVGroup(0, None, rng.randint(1, 3))] if rng.random() < 0.8 else []
    if not groups or rng.random() < 0.85:
        groups.append(KVGroup(len(groups), rng.choice([2, 3, 5, 9, 16]), rng.randint(1, 3)))
        if rng.random() < 0.2:
            groups.append(KVGroup(len(groups), rng.choice([2, 6, 12]), rng.randint(1, 2)))
    return tuple(groups)


def _draw_models(rng: Random) -> tuple[ModelDescription, ...]:
    """One executor, or up to four, half of which are like the first."""
    first, count = _draw_model(rng), rng.choices([1, 2, 3, 4], [3, 3, 2, 1])[0]
    return first, *(draw_peer(rng, first) for _ in range(count - 1))


def draw_peer(rng: Random, first: ModelDescription) -> ModelDescription:
    """An executor beside another one: mostly of the same size, or at least with the same longest sequence."""
    if rng.random() < 0.5:
        return first
    model = _draw_model(rng)
    return model if rng.random() < 0.3 else replace(model, max_model_len=first.max_model_len)


def _draw_model(rng: Random) -> ModelDescription:
    block_size, max_num_seqs = rng.choice([2, 4, 4, 8]), rng.choice([2, 3, 4, 4, 6])
    return replace(
        MODEL,
        block_size=block_size,
        num_device_blocks=rng.choice([72, 72, 100, 160, 400]) // block_size,
        num_host_blocks=rng.choice([0, 40, 100]) // block_size,
        max_num_seqs=max_num_seqs,
        num_slots=max_num_seqs + rng.choice([0, 1, 3]),
        max_num_batched_tokens=max_num_seqs + rng.choice([0, 6, 24, 60]),
        max_model_len=rng.choice([50, 60]),
        max_inflight_plans=4,
    )


def _draw_options(rng: Random) -> dict[str, Any]:
    return {
        "batching": rng.choice(["continuous"] * 6 + ["static", "dynamic"]),
        "batch_size": rng.choice([2, 3]),
        "batch_window_ms": 30.0,
        "order": rng.choice(["fcfs", "fcfs", "priority", "fair", "sjf"]),
        "preemption": rng.choice(["recompute", "swap", "auto"]),
        "enable_prefix_caching": rng.random() < 0.7,
        "watermark": rng.choice([0.0, 0.01, 0.1]),
        "max_inflight_plans": rng.choice([1, 2, 2, 2, 3, 4]),
        "long_prefill_token_threshold": rng.choice([0, 0, 5]),
        "max_wait_s": rng.choice([None, 0.3]),
        "waiting_served_ratio": rng.choice([0.0, 0.0, 1.0]),
        "max_queued_requests": rng.choice([3, 64, 64]),
        "allow_fingerprint_change": rng.random() < 0.5,
    }


def _draw_client(rng: Random, name: str, duration_s: float, stem: int) -> ClientPlan:
    index = rng.choice(entries_of_stem(stem)) if rng.random() < 0.6 else rng.randrange(NUM_ENTRIES)
    most = 10 if catalogue()[index].spec.beams else 20
    kind = rng.choices(CLIENT_KINDS, _CLIENT_WEIGHTS)[0]
    return ClientPlan(
        name=name,
        index=index,
        kind=kind,
        arrives_s=rng.choice([0.0, rng.random() * duration_s]),
        max_tokens=None if rng.random() < 0.05 else rng.randint(1, most),
        tenant="a" if rng.random() < 0.2 else "",
        priority=rng.randint(-1, 1),
        number=rng.random() * (100.0 if kind == "deadline" and rng.random() < 0.3 else rng.choice([0.1, 0.5])),
        max_bytes=rng.choice([1, 150, 1 << 20]),
        final_only=rng.random() < 0.1,
    )


def _draw_numerics(rng: Random, count: int, *, is_real: bool) -> tuple[int, ...]:
    """Mostly all executors have the same."""
    if count == 1 or is_real or rng.random() < 0.8:
        return (0,) * count
    return tuple(rng.choice([0, 1]) for _ in range(count))


def _draw_faults(
    rng: Random, duration_s: float, clients: tuple[ClientPlan, ...], *, is_real: bool, has_lanes: bool
) -> tuple[Fault, ...]:
    kinds = FAULT_KINDS + LANE_FAULT_KINDS if has_lanes else FAULT_KINDS
    # The service's executor has one numerics, and nothing to find a poisoned request by.
    kinds = tuple(kind for kind in kinds if not (is_real and kind in ("other numerics", "poison", "other model")))
    weights = [_WEIGHTS.get(kind, 1.0) for kind in kinds]
    count = rng.choice([1, 2, 3, 3, 4, 5] if has_lanes else [0, 1, 2, 2, 3, 3, 5])
    drawn: list[Fault] = []
    for _ in range(count):
        at_s = rng.random() * 1.2 * duration_s
        if has_lanes and rng.random() < 0.5:
            # Soon after a request has arrived, when executors have something to do.
            at_s = rng.choice(clients).arrives_s + 0.15 * rng.random()
        drawn.append(Fault(rng.choices(kinds, weights)[0], at_s, rng.random(), rng.random()))
    # What ends the service comes last.
    return tuple(replace(fault, at_s=fault.at_s + duration_s) if fault.kind == "fenced" else fault for fault in drawn)
