"""Steps of structured output on the driver's stub, beside steps without, where the model takes a simulated time.

The executor's worker runs plans as it does for a scheduler, two at once. A step's model keeps a `SimulatedStream` busy;
masks, waits, copies and launches of the host are real. Outputs are drawn ahead by a matcher of our own, uniformly of
what the grammar allows, and put where the device would put sampled tokens. Each is compared with the mask that the
executor has sent. Prints JSON; `benchmarks.gpu_host` starts it.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.common.rows import BenchmarkError
from benchmarks.gpu.host_child import BLOCKS, PROMPT, stubbed_executor
from benchmarks.gpu.serving.grammars import RECORDS, tokenizer_files
from benchmarks.gpu.simulated_stream import SimulatedStream
from cadenza_common.grammar.spec import GrammarSpec
from cadenza_common.grammar.table import TableSource
from cadenza_common.plan.result import StepResult
from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.step_result import LATE
from executor_svc.gpu import step as gpu_step
from executor_svc.gpu.kernels.slots.slots import StepSizes
from executor_svc.gpu.measuring import StepClock
from executor_svc.gpu.slots import staging
from executor_svc.gpu.step import GpuStepExecutor
from executor_svc.plan.arrays import IntArray
from executor_svc.sampling.masks import Words, num_mask_words
from executor_svc.startup import grammars as startup_grammars
from executor_svc.startup.grammars import Grammars
from executor_svc.structured.compiler import Compiler
from executor_svc.structured.matcher import GrammarState
from executor_svc.structured.slot_grammars import SlotGrammars
from executor_svc.worker.worker import Worker

_plans = import_module("tests.helpers.executor.plans")  # by name: tests are not type checked

_EOS = 1
_WARM = 30
_TRIED = 64
"""Tokens that are tried before all are looked at."""
_TURN_S = 0.001
"""From a result until the plan that follows it is there."""
_STRINGS: dict[str, Any] = {
    "type": "array",
    "minItems": 100_000,
    "items": {
        "type": "object",
        "properties": {"title": {"type": "string"}, "text": {"type": "string"}},
        "required": ["title", "text"],
        "additionalProperties": False,
    },
}
SCHEMAS = {"records": RECORDS, "strings": _STRINGS}
"""By name: many fields of all kinds; strings of any length."""


def drawn_outputs(source: TableSource, spec: GrammarSpec, num_seqs: int, num_tokens: int) -> IntArray:
    """Return outputs [num_seqs, num_tokens] under a grammar that ends none of them."""
    begun = Compiler(source).fresh(spec)
    bits = np.zeros(num_mask_words(source.vocab_size), np.uint32)
    outputs = np.zeros((num_seqs, num_tokens), np.int64)
    for seed, output in enumerate(outputs):
        matcher, rng = begun.matcher(), np.random.default_rng(seed)
        for at in range(num_tokens):
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            output[at] = _drawn(bits, source.vocab_size, rng)
            if not matcher.consume_tokens([int(output[at])]):
                raise BenchmarkError(f"llguidance refuses a token of its own mask: {matcher.get_error()}")
    return outputs


def _drawn(bits: Words, vocab_size: int, rng: np.random.Generator) -> int:
    """Draw one of the tokens that have a bit, all alike."""
    tried = rng.integers(vocab_size, size=_TRIED)
    (hits,) = ((bits[tried // 32] >> (tried % 32).astype(np.uint32)) & 1).nonzero()
    if len(hits):
        return int(tried[hits[0]])
    return int(rng.choice(np.unpackbits(bits.view(np.uint8), bitorder="little").nonzero()[0]))


class SimulatedDevice:
    """Lets a step's model take its time, and puts tokens of drawn outputs where the device would put its own."""

    def __init__(self, executor: GpuStepExecutor, stream: SimulatedStream, model_s: float, outputs: IntArray) -> None:
        self._executor, self._stream, self._model_s, self._outputs = executor, stream, model_s, outputs
        self._slots = executor._device_slots
        self._forward, self._fetch = executor._runner.forward, self._slots.fetch
        executor._runner.forward = self._run_model  # type: ignore[method-assign]
        self._slots.fetch = self._sample  # type: ignore[method-assign]
        self.begin(checks=False)

    def begin(self, *, checks: bool) -> None:
        """Begin all outputs anew; checks: each token is looked up in its mask."""
        self._checks = checks
        self._known = np.zeros(len(self._outputs), np.int64)
        self.num_late, self.spent_s = 0, 0.0

    def _run_model(self, *args: Any, **kwargs: Any) -> Any:
        found = self._forward(*args, **kwargs)
        self._stream.run(self._model_s)
        return found

    def _sample(self, scheduled: Scheduled, sizes: StepSizes) -> Any:
        """Write a step's results, as `commit_step` does, before they are fetched."""
        began = time.perf_counter()
        slots = scheduled.sampling_slots
        inputs = self._slots.inputs(sizes)
        errors = self._executor.sampling.sampler.rows(inputs)[1].numpy()
        late = errors[: len(slots)] == LATE
        tokens = self._outputs[slots, self._known[slots]]
        if self._checks:
            self._check(slots[~late], tokens[~late])
        results = self._slots.buffers.results[: sizes.num_results].numpy().reshape(3, sizes.num_rows)
        results[0, : len(slots)] = np.where(late, -1, tokens)
        results[1] = errors
        results[2, : len(slots)] = PROMPT + self._known[slots]
        self._known[slots[~late]] += 1
        self.num_late += int(late.sum())
        errors[:] = 0
        self.spent_s += time.perf_counter() - began
        return self._fetch(scheduled, sizes)

    def _check(self, slots: IntArray, tokens: IntArray) -> None:
        allowed = self._executor.sampling.state.state.allowed_bits.numpy()
        missing = (allowed[slots, tokens // 32].view(np.uint32) >> (tokens % 32).astype(np.uint32)) & 1 == 0
        if missing.any():
            raise BenchmarkError(f"the masks of slots {slots[missing].tolist()} lack their tokens")


class Phases:
    """Runs batches on a worker, with a grammar or without."""

    def __init__(self, executor: GpuStepExecutor, device: SimulatedDevice, masks: MaskTimes, num_seqs: int) -> None:
        self._device, self._num_seqs, self._step_id, self._last_at = device, num_seqs, 0, 0.0
        self._results: SimpleQueue[tuple[float, StepResult]] = SimpleQueue()
        self._worker = Worker(lambda: executor)
        self._worker.start()
        self._worker.ready.result()
        self._session, opened = self._worker.open_session(
            1, lambda result: self._results.put((time.perf_counter(), result))
        )
        opened.result()
        self._masks = masks

    def run(self, spec: GrammarSpec | None, count: int) -> dict[str, float]:
        """Decode so many steps behind those that warm up; returns milliseconds a token and step, and of its masks."""
        self._device.begin(checks=spec is not None)
        sampling = [SequenceSampling(temperature=1.0, seed=slot) for slot in range(self._num_seqs)]
        admitted = tuple(
            _plans.sequence(slot, [5] * PROMPT, list(range(BLOCKS)), sampling=each, grammar=spec)
            for slot, each in enumerate(sampling)
        )
        work = _plans.scheduled(*((slot, PROMPT, True) for slot in range(self._num_seqs)))
        released = _plans.ints(*range(self._num_seqs)) if self._step_id else _plans.ints()
        self._submit(released_slots=released, admitted=admitted, scheduled=work)
        self._submit(decode_ready=True)
        while self._decode(1) < self._num_seqs:
            continue  # the grammar is being compiled
        self._decode(_WARM)
        self._masks.begin()
        spent, num_late, began = self._device.spent_s, self._device.num_late, self._last_at
        num_tokens = self._decode(count)
        seconds, masks_ms, spent = self._last_at - began, self._masks.mean_ms(), self._device.spent_s - spent
        num_late = self._device.num_late - num_late
        for _ in range(2):
            self._result()
        return {
            "ms": 1e3 * seconds * self._num_seqs / num_tokens,
            "masks_ms": masks_ms,
            "late_percent": 100 * num_late / (count * self._num_seqs),
            "harness_us": 1e6 * spent / count,
        }

    def _decode(self, count: int) -> int:
        """Launch so many steps, each when the last but one has ended; return the tokens of as many that ended."""
        num_tokens = 0
        for _ in range(count):
            num_tokens += self._result()
            time.sleep(_TURN_S)
            self._submit(decode_ready=True)
        return num_tokens

    def _submit(self, **fields: Any) -> None:
        self._step_id += 1
        self._worker.submit(self._session, _plans.plan(step_id=self._step_id, **fields), time.monotonic_ns())

    def _result(self) -> int:
        """Wait for a step's result; return its number of tokens."""
        self._last_at, result = self._results.get(timeout=60)
        if result.error_message or any(result.errors):
            raise BenchmarkError(f"step {result.step_id}: {result.error_message or result.errors}")
        return len(result.token_ids)


class MaskTimes:
    """Times from when a step's tokens are known until the last of the next one's masks is made."""

    def __init__(self, patch: pytest.MonkeyPatch, grammars: SlotGrammars) -> None:
        self._committed, self._take, self._steps = grammars.committed, GrammarState.take, list[list[float]]()
        patch.setattr(grammars, "committed", self._begin_step)
        patch.setattr(GrammarState, "take", lambda state, tokens: self._take_and_note(state, tokens))

    def begin(self) -> None:
        """Forget the steps so far, but that which runs."""
        self._steps = self._steps[-1:]

    def mean_ms(self) -> float:
        """Return the mean of the steps, milliseconds; 0 if there were none."""
        return 1e3 * statistics.fmean(ended - began for began, ended in self._steps) if self._steps else 0.0

    def _begin_step(self, *args: Any) -> None:
        self._steps.append([time.perf_counter()] * 2)
        self._committed(*args)

    def _take_and_note(self, state: GrammarState, tokens: Sequence[int]) -> None:
        self._take(state, tokens)
        self._steps[-1][1] = time.perf_counter()


def main(
    stub_folder: str,
    checkpoint: str,
    schema: str,
    vocab_size: int,
    num_seqs: int,
    device_us: int,
    num_threads: int,
    count: int,
) -> None:
    """Print the metrics of one case; device_us: of a step's model. num_threads: that make masks."""
    stream = SimulatedStream()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(startup_grammars, "cores", lambda: startup_grammars._CORES_OF_THREAD * num_threads)
        patch.setattr(torch.cuda, "Event", stream.event)
        patch.setattr(gpu_step, "StepClock", lambda _: StepClock(torch.device("cuda")))
        patch.setattr(staging, "new_event", lambda _: stream.event())
        (file,) = (each for each in tokenizer_files(vocab_size) if each.name == "tokenizer.json")
        source, spec = TableSource(file, vocab_size, (_EOS,)), GrammarSpec("json_schema", json.dumps(SCHEMAS[schema]))
        outputs = drawn_outputs(source, spec, num_seqs, 2 * _WARM + count)
        executor, _ = stubbed_executor(
            patch, stub_folder, checkpoint, graphs=False, num_seqs=num_seqs, grammars=Grammars(source, source.engine())
        )
        assert executor.grammars is not None
        device = SimulatedDevice(executor, stream, 1e-6 * device_us, outputs)
        phases = Phases(executor, device, MaskTimes(patch, executor.grammars), num_seqs)
        without, found = phases.run(None, count), phases.run(spec, count)
    print(json.dumps(_metrics(without, found)))


def _metrics(without: dict[str, float], found: dict[str, float]) -> dict[str, float]:
    exposed = max(0.0, found["ms"] - without["ms"])
    return {
        "ratio": found["ms"] / without["ms"],
        "without_ms": without["ms"],
        "with_ms": found["ms"],
        "masks_ms": found["masks_ms"],
        "hidden_percent": 100 * max(0.0, 1 - exposed / found["masks_ms"]),
        "late_percent": found["late_percent"],
        "harness_us": found["harness_us"],
    }


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:]))  # type: ignore[arg-type]
