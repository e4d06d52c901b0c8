"""An executor in this process that gets plans as from the scheduler, two in flight, without gRPC."""

from __future__ import annotations

import itertools
import queue
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common.rows import BenchmarkError
from cadenza_common.plan.plan import AdmittedSequence, StepPlan
from cadenza_common.plan.result import StepResult, StepStatus
from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.config import ExecutorConfig
from executor_svc.plan.limits import Limits
from executor_svc.worker.session import PlanSession
from executor_svc.worker.worker import Executor, Worker

_IN_FLIGHT = 2
_EPOCH = 1
_TIMEOUT_S = 60.0
_STOP_S = 10.0


class PlanDriver:
    """Sequences of a loaded model. Each has from the start all blocks that it needs, in random order."""

    def __init__(self, folder: Path, **options: Any) -> None:
        """Start to load the model, on a separate thread as in the service."""
        self.config = ExecutorConfig(model=str(folder), **options)
        self._results: queue.SimpleQueue[tuple[float, StepResult]] = queue.SimpleQueue()
        self._loaded, self._may_build = threading.Event(), threading.Event()
        self._worker = Worker(self._build)
        self._worker.ready.add_done_callback(lambda _: self._loaded.set())
        self._worker.start()
        self._session: PlanSession | None = None
        self._step_id = 0
        self._admitted: list[int] = []
        self._rng = random.Random(0)
        self._free: list[int] = []

    def wait_loaded(self) -> None:
        """Wait until the weights are loaded or loading failed; the device then stays idle until `open`."""
        self._loaded.wait()

    def open(self) -> None:
        """Build the rest of the executor and open a session, once; raises the error of loading."""
        self._may_build.set()
        self.limits: Limits = self._worker.ready.result().limits
        if self._session is None:
            self._session, opened = self._worker.open_session(_EPOCH, self._take)
            opened.result()

    def close(self) -> None:
        """End the device thread."""
        self._may_build.set()
        self._worker.stop(_STOP_S)

    def _build(self) -> Executor:
        from executor_svc.startup import build as model_build

        names = vars(model_build)
        load = names["load_model"]

        def load_and_wait(*arguments: Any) -> Any:
            loaded = load(*arguments)
            self._loaded.set()
            self._may_build.wait()
            return loaded

        # Replaced for this one call, so that no graph is captured while other groups are measured.
        names["load_model"] = load_and_wait
        try:
            return model_build.build_model(self.config)[0]
        finally:
            names["load_model"] = load

    def _take(self, result: StepResult) -> None:
        self._results.put((time.perf_counter(), result))

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Random token ids."""
        return [[self._rng.randrange(self.limits.vocab_size) for _ in range(length)] for _ in range(count)]

    def start(self, count: int, length: int, more: int) -> None:
        """Replace all sequences by `count` prompts of `length` tokens, with blocks for `more`; each samples a token."""
        prompts = self.prompts(count, length)
        self._reset()
        most = self.limits.max_num_batched_tokens
        chunks = [(slot, first, min(most, length - first)) for slot in range(count) for first in range(0, length, most)]
        for batch in _batches(chunks, most):
            new = [self._sequence(slot, prompts[slot], more) for slot, first, _ in batch if not first]
            self._admitted += [sequence.slot for sequence in new]
            self._run([self._plan(admitted=new, **_scheduled(batch, length))])

    def decode(self, num_steps: int) -> list[float]:
        """Decode all sequences `num_steps` times; returns seconds from each result to the next."""
        times = self._run([self._plan(decode_ready=True) for _ in range(num_steps)])
        return [after - before for before, after in itertools.pairwise(times)]

    def prefill(self, count: int, length: int, times: int) -> list[float]:
        """Replace all sequences by new prompts in one step, `times` times; returns seconds between results."""
        plans = []
        self._reset()
        for _ in range(times + 1):
            released, self._admitted = self._admitted, list(range(count))
            self._new_blocks()
            new = [self._sequence(slot, prompt, 0) for slot, prompt in enumerate(self.prompts(count, length))]
            rows = _scheduled([(slot, 0, length) for slot in range(count)], length)
            plans.append(self._plan(released_slots=released, admitted=new, **rows))
        ends = self._run(plans)
        return [after - before for before, after in itertools.pairwise(ends)]

    def mixed(self, length: int, times: int) -> list[float]:
        """Decode all sequences beside one new prompt, `times` times; returns seconds between results.

        A prompt is computed whole in one step and released in the next.
        """
        first = len(self._admitted)
        prompts = self.prompts(times + 1, length)
        places = [self._sequence(first + place, prompts[0], 0) for place in range(2)]
        plans: list[StepPlan] = []
        released: list[int] = []
        for index, prompt in enumerate(prompts):
            new = replace(places[index % 2], token_ids=prompt)
            rows = _scheduled([(new.slot, 0, length)], length)
            plans.append(self._plan(released_slots=released, admitted=[new], **rows, decode_ready=True))
            released = [new.slot]
        ends = self._run(plans)
        self._run([self._plan(released_slots=released)])
        self._free += [block for place in places for block in place.block_ids]
        return [after - before for before, after in itertools.pairwise(ends)]

    def _reset(self) -> None:
        if self._admitted:
            self._run([self._plan(released_slots=self._admitted)])
        self._admitted = []
        self._new_blocks()

    def _new_blocks(self) -> None:
        self._free = list(range(self.limits.num_device_blocks))
        self._rng.shuffle(self._free)

    def _sequence(self, slot: int, prompt: list[int], more: int) -> AdmittedSequence:
        needed = -(-(len(prompt) + more) // self.limits.block_size)
        if needed > len(self._free):
            raise BenchmarkError(f"a sequence needs {needed} blocks, {len(self._free)} are left")
        blocks = [self._free.pop() for _ in range(needed)]
        return AdmittedSequence(slot, prompt, len(prompt), 0, blocks, SequenceSampling())

    def _plan(self, **fields: Any) -> StepPlan:
        self._step_id += 1
        return StepPlan(step_id=self._step_id, epoch=_EPOCH, **fields)

    def _run(self, plans: Sequence[StepPlan]) -> list[float]:
        """Run plans, at most two in flight; returns when each result arrived, in seconds of time.perf_counter()."""
        assert self._session is not None, "call open() first"
        waiting, ends = list(plans), []
        in_flight = 0
        while waiting or in_flight:
            while waiting and in_flight < _IN_FLIGHT:
                self._worker.submit(self._session, waiting.pop(0), time.monotonic_ns())
                in_flight += 1
            try:
                end, result = self._results.get(timeout=_TIMEOUT_S)
            except queue.Empty:
                raise BenchmarkError(f"a step gave no result in {_TIMEOUT_S:.0f} s") from None
            in_flight -= 1
            _check(result)
            ends.append(end)
        return ends


def _check(result: StepResult) -> None:
    if result.status != StepStatus.OK:
        raise BenchmarkError(f"step {result.step_id}: {result.status.name}: {result.error_message}")
    if len(result.error_slots):
        raise BenchmarkError(f"step {result.step_id}: slot {result.error_slots[0]}: {result.errors[0].name}")


def _batches(chunks: Sequence[tuple[int, int, int]], most: int) -> list[list[tuple[int, int, int]]]:
    """Distribute chunks (slot, first token, tokens) over steps of at most `most` tokens, each slot once per step."""
    steps: list[list[tuple[int, int, int]]] = [[]]
    for chunk in chunks:
        step = steps[-1]
        if sum(count for _, _, count in step) + chunk[2] > most or any(slot == chunk[0] for slot, _, _ in step):
            steps.append(step := [])
        step.append(chunk)
    return steps


def _scheduled(chunks: Sequence[tuple[int, int, int]], length: int) -> dict[str, list[int]]:
    """Return the fields of a plan that schedules these chunks."""
    return {
        "scheduled_slots": [slot for slot, _, _ in chunks],
        "scheduled_num_tokens": [count for _, _, count in chunks],
        "scheduled_samples": [first + count == length for _, first, count in chunks],
    }
