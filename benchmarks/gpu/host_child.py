"""Host times of a GPU executor's steps, on the driver stub of tests/executor_svc/gpu: `benchmarks.gpu_host` starts it.

All tensors lie on the CPU, and a graph's replay does nothing: what is timed is the host's own work, without what CUDA's
runtime takes for a copy, an event or a graph's launch (some microseconds each). Prints JSON.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime import driver

from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.gpu import device as gpu_device
from executor_svc.gpu import graphs as gpu_graphs
from executor_svc.gpu import runner as gpu_runner
from executor_svc.gpu.graphs import DirectReplayer
from executor_svc.gpu.launches.watching import watch_launches
from executor_svc.gpu.linear import PlainLinear
from executor_svc.gpu.step import GpuStepExecutor
from executor_svc.startup import executors

# By name: tests are not type checked.
_warm_up, _stubbed, _plans = (
    import_module(f"tests.{name}")
    for name in ("executor_svc.gpu.test_warm_up", "executor_svc.gpu.stubbed_start", "helpers.executor.plans")
)
ints, plan, scheduled, sequence = (getattr(_plans, name) for name in ("ints", "plan", "scheduled", "sequence"))

_WARM = 30
PROMPT = 16
BLOCKS = 40
"""Of each sequence: the same ones, as nothing is computed."""
_NUMBER = torch.zeros(1, 1, dtype=torch.bfloat16)
_FEATURES: dict[str, Any] = {
    "temperature": 0.9, "top_p": 0.8, "top_k": 50, "min_p": 0.01, "frequency_penalty": 0.5, "presence_penalty": 0.1,
    "repetition_penalty": 1.1, "num_logprobs": 5, "min_tokens": 5, "top_n_sigma": 3.0, "stop_token_ids": ints(3),
    "allowed_token_ids": ints(*range(4, 400)), "bias_token_ids": ints(7, 9), "biases": [0.5, -0.5],
    "bad_words": (ints(11), ints(5, 12)),
}  # fmt: skip
"""All that changes or describes a row's token, but grammars."""


class NoReplayer(DirectReplayer):
    """Runs the largest step when it is made, and replays nothing."""

    def __init__(self, sizes: Any, step: Any) -> None:
        super().__init__(sizes, step)
        if sizes:
            step(max(sizes, key=lambda each: each.num_tokens))

    def replay(self, sizes: Any) -> None:
        pass


class Steps:
    """An executor whose steps are timed."""

    def __init__(self, executor: GpuStepExecutor, stub: Any, num_seqs: int, kind: str, num_prompt: int) -> None:
        """num_prompt: tokens of a prompt in each step, beside the decodes of num_seqs sequences; 0: there is none."""
        self._executor, self._stub, self._num_seqs, self._step_id = executor, stub, num_seqs, 0
        self._num_prompt, self._had_prompt = num_prompt, False
        parameters = {} if kind == "greedy" else dict(_FEATURES)
        if kind == "edited":
            del parameters["num_logprobs"]
        for slot in range(num_seqs):
            sampling = SequenceSampling(**parameters | {"seed": slot})
            self._run(admitted=(self._sequence(slot, sampling),), scheduled=scheduled((slot, PROMPT, True)))

    def _sequence(self, slot: int, sampling: SequenceSampling) -> Any:
        return sequence(slot, [5] * PROMPT, list(range(BLOCKS)), sampling=sampling)

    def _launch(self, **fields: Any) -> Any:
        self._step_id += 1
        return self._executor.launch(plan(step_id=self._step_id, **fields), 0)

    def _run(self, **fields: Any) -> None:
        self._launch(**fields).result()

    def _fields(self) -> dict[str, Any]:
        """Return a plan of decodes of all sequences, and of a prompt in a slot of its own."""
        if not self._num_prompt:
            return {"decode_ready": True}
        slot, count = self._num_seqs, self._num_prompt
        released, self._had_prompt = ints(slot) if self._had_prompt else ints(), True
        prompt = sequence(slot, [5] * count, list(range(BLOCKS)))
        work = scheduled((slot, count, True))
        return {"released_slots": released, "admitted": (prompt,), "scheduled": work, "decode_ready": True}

    def timed(self, count: int) -> dict[str, float]:
        """Medians of so many steps, each launched before the one ahead of it is settled."""
        for _ in range(_WARM):
            self._run(**self._fields())
        launched, settled, before = list[float](), list[float](), self._launch(**self._fields())
        first = self._stub.stub_launches()
        for _ in range(count):
            fields = self._fields()
            began = time.perf_counter()
            step = self._launch(**fields)
            middle = time.perf_counter()
            before.result()
            settled.append(time.perf_counter() - middle)
            launched.append(middle - began)
            before = step
        launches = (self._stub.stub_launches() - first) / count
        before.result()
        return _metrics(launched, settled, launches)


def _metrics(launched: list[float], settled: list[float], launches: float) -> dict[str, float]:
    times = [1e6 * statistics.median(each) for each in (launched, settled)]
    return {"host_us": sum(times), "launch_us": times[0], "settle_us": times[1], "launches": launches}


def _multiply_nothing(linear: PlainLinear, x: Tensor, out: Tensor | None = None, _: object = None) -> Tensor:
    """Call PyTorch's product for one number, as the CPU would be long at the rest."""
    assert out is not None
    torch.mm(x[:1], linear.weight.t()[:, :1], out=_NUMBER)
    return out


def stubbed_executor(
    patch: pytest.MonkeyPatch, stub_folder: str, checkpoint: str, *, graphs: bool, num_seqs: int, **options: Any
) -> tuple[GpuStepExecutor, Any]:
    """Return an executor on the stub, which is found by the environment, and the stub.

    graphs: whether steps with prompts have some, as of small models and few tokens. num_seqs: that decode at once.
    options: as of `test_warm_up.started`.
    """
    stub = ctypes.CDLL(str(Path(stub_folder, _stubbed.LIBRARY)), mode=ctypes.RTLD_GLOBAL)
    driver.set_active(_stubbed.StubbedDriver())
    watch_launches()
    # Tensors lie where they would lie for the interpreter.
    patch.setattr(executors, "is_interpreted", lambda: True)
    patch.setattr(gpu_device, "is_interpreted", lambda: True)
    patch.setattr(_warm_up, "CapturedReplayer", NoReplayer)
    patch.setattr(PlainLinear, "__call__", _multiply_nothing)
    patch.setattr(gpu_runner, "are_watched", lambda _: True)
    if not graphs:
        patch.setattr(gpu_graphs, "_MAX_OPERATIONS", 0)
    executor: GpuStepExecutor = _warm_up.started(
        Path(checkpoint), patch, dtype="bfloat16", block_size=16, max_num_seqs=num_seqs + 2,
        max_num_batched_tokens=1024, max_model_len=16 * BLOCKS, num_gpu_blocks=2 * BLOCKS,
        num_cpu_blocks=4, **options,
    )  # fmt: skip
    return executor, stub


def main(stub_folder: str, checkpoint: str, kind: str, num_seqs: int, num_prompt: int, graphs: int, count: int) -> None:
    """Print the metrics of one case; graphs: 1 if steps with prompts have some."""
    with pytest.MonkeyPatch.context() as patch:
        executor, stub = stubbed_executor(patch, stub_folder, checkpoint, graphs=bool(graphs), num_seqs=num_seqs)
        found = Steps(executor, stub, num_seqs, kind, num_prompt).timed(count)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:]))  # type: ignore[arg-type]
