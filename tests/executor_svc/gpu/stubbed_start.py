"""A start of the GPU executor as on an H200, and some steps, on a driver that computes nothing (stub_cuda.c).

Triton compiles for it and launches what it has compiled by its own launcher: with the arguments, grids, shared memory
and descriptors that it would have there. All tensors lie on the CPU and hold whatever they held before. Run with the
folder of the stub, in whose environment it is found, that of a checkpoint, a source of drafts, and options in JSON that
replace some; prints JSON.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.backends.nvidia.driver import (
    _BASE_ARGS_FORMAT_LEN,
    CudaDriver,
    CudaLauncher,
    CudaUtils,
    wrap_handle_tensordesc,
)
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.gpu import device as gpu_device
from executor_svc.gpu import graphs as gpu_graphs
from executor_svc.gpu import runner as gpu_runner
from executor_svc.gpu.compiled.kernel_cache import COMPILED
from executor_svc.gpu.kernels.slots.slots import StepSizes
from executor_svc.gpu.launches.repeated import RepeatedParts
from executor_svc.gpu.launches.watched_launcher import WatchedLauncher
from executor_svc.gpu.linear import PlainLinear
from executor_svc.gpu.skinny import dependent_probe
from executor_svc.startup import executors as startup_device
from tests.executor_svc.gpu.repeating import count_repeats
from tests.helpers.executor.plans import ints, plan, scheduled, sequence

LIBRARY = "libcuda.so.1"
_NUM_OPTIONS = 7
"""Of a launch: its grid, stream, function, and whether it is cooperative or programmatic."""
launched: list[list[Any]] = []
OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "quantization": "int8",
    "kv_cache_dtype": "fp8",
    "block_size": 64,
    "max_num_seqs": 20,
    "max_num_batched_tokens": 64,
    "max_model_len": 512,
    "num_gpu_blocks": 64,
    "num_cpu_blocks": 4,
    "num_speculative_tokens": 3,
}


class StubbedDriver(CudaDriver):  # type: ignore[misc]
    """Triton's driver, of one Hopper GPU and one stream; its own start would ask PyTorch for them."""

    def __init__(self) -> None:
        self.utils, self.launcher_cls = CudaUtils(), CudaLauncher
        self.get_device_capability = lambda device=0: (9, 0)
        self.get_current_stream = self.get_current_device = lambda device=0: 0
        self.set_current_device = lambda device: None


class SpiedLauncher(WatchedLauncher):
    """Notes grids, options and arguments, in the form of addresses, as they come to Triton's compiled launcher."""

    def __init__(self, src: Any, metadata: Any) -> None:
        super().__init__(src, metadata)
        compiled = self._compiled

        def spied(*args: Any) -> Any:
            launched.append([_comparable(each) for each in (*args[:_NUM_OPTIONS], *args[_BASE_ARGS_FORMAT_LEN:])])
            return compiled(*args)

        encodes = self.launch is not compiled
        descriptors = getattr(metadata, "tensordesc_meta", None)
        self.launch = wrap_handle_tensordesc(spied, src.signature, descriptors) if encodes else spied
        self._compiled = spied


def _comparable(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    return argument if isinstance(argument, int) else type(argument).__name__


def noted_compiles(patch: pytest.MonkeyPatch) -> list[str]:
    """Names of kernels, as they are compiled."""
    found: list[str] = []
    compile_ = JITFunction._do_compile

    def noted(self: Any, *args: Any) -> Any:
        found.append(self.fn.__qualname__)
        return compile_(self, *args)

    patch.setattr(JITFunction, "_do_compile", noted)
    return found


def noted_launches(patch: pytest.MonkeyPatch) -> list[str]:
    """Names of kernels, as they are launched."""
    found: list[str] = []
    run = JITFunction.run

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(self.fn.__name__)
        return run(self, *args, **kwargs)

    patch.setattr(JITFunction, "run", noted)
    return found


def _launched_alike(executor: Any, step_id: int) -> list[list[list[Any]]]:
    """Return the launches of three steps with the same prompt: the first is new, the second noted."""
    size, strips = executor.limits.pages_per_state, executor.limits.num_tables
    pages = [6 * size + 3 * strips + strip for strip in range(strips)]
    prompt = sequence(4, [5] * 40, pages, state_pages=list(range(2 * size, 3 * size)))
    released = {"released_slots": ints(4)}
    alike: list[list[list[Any]]] = []
    executor._runner.repeated = RepeatedParts()
    for each in range(step_id, step_id + 3):
        del launched[:]
        fields = {"admitted": (prompt,), "scheduled": scheduled((4, 40, True))} | (released if alike else {})
        executor.launch(plan(step_id=each, **fields), 0).result()
        alike.append(list(launched))
    return alike


def _decodes_alike(executor: Any, stub: ctypes.CDLL) -> tuple[list[list[list[Any]]], list[int]]:
    """Return the launches of hidden states of a decode, three times, and how many of each were programmatic."""
    runner, sizes = executor._runner, StepSizes.decode(2)
    runner.repeated = RepeatedParts()
    alike, programmatic = [], []
    for _ in range(3):
        del launched[:]
        before = stub.stub_programmatic()
        runner.run_part("decode", partial(runner._run_hidden, sizes, 1, OPTIONS["max_model_len"]))
        programmatic.append(stub.stub_programmatic() - before)
        alike.append(list(launched))
    return alike, programmatic


def _steps(executor: Any) -> list[dict[str, Any]]:
    """The fields of plans: chunks of a prompt, a sequence that joins, then decodes with drafts."""
    drawn = SequenceSampling(temperature=0.9, top_p=0.8, frequency_penalty=0.5, num_logprobs=2)
    other = SequenceSampling(min_tokens=3, stop_token_ids=ints(4), num_prompt_logprobs=1)
    size, strips = executor.limits.pages_per_state, executor.limits.num_tables
    states = [list(range(index * size, (index + 1) * size)) for index in range(2)]
    blocks = [[6 * size + block * strips + strip for strip in range(strips)] for block in range(3)]
    first = sequence(0, [5] * 70, blocks[0] + blocks[1], sampling=drawn, max_drafts=3, state_pages=states[0])
    second = sequence(2, [7], blocks[2], sampling=other, max_drafts=3, state_pages=states[1])
    return [
        {"admitted": (first,), "scheduled": scheduled((0, 60, False))},
        {"admitted": (second,), "scheduled": scheduled((0, 10, True), (2, 1, True))},
        *({"decode_ready": True, "max_drafts": most} for most in (0, 2, 3)),
    ]


def main(stub_folder: str, checkpoint: str, speculative: str, options: str = "{}") -> None:
    stub = ctypes.CDLL(str(Path(stub_folder, LIBRARY)), mode=ctypes.RTLD_GLOBAL)
    driver.set_active(StubbedDriver())
    driver.active.launcher_cls = SpiedLauncher
    from tests.executor_svc.gpu.test_warm_up import started

    with pytest.MonkeyPatch.context() as patch:
        # Tensors lie where they would lie for the interpreter.
        patch.setattr(startup_device, "is_interpreted", lambda: True)
        patch.setattr(gpu_device, "is_interpreted", lambda: True)
        patch.setattr(gpu_runner, "are_watched", lambda _: True)
        repeated = count_repeats(patch)
        patch.setattr(gpu_graphs, "_MIXED_TOKENS", (32,))
        # As on a GPU, where a wider result is written by one operation.
        patch.setattr(PlainLinear, "_to_float", lambda _, x, out: out.zero_())
        seconds = itertools.count(1.0, -1e-3)
        measured = partial(dependent_probe.probe_dependent, measure=lambda run: (run, next(seconds)))
        patch.setattr(gpu_runner, "probe_dependent", measured)
        compiled, names = noted_compiles(patch), noted_launches(patch)
        COMPILED.listen()
        began = time.monotonic()
        executor = started(Path(checkpoint), patch, speculative=speculative, **OPTIONS | json.loads(options))
        num_at_start, start_s = len(compiled), time.monotonic() - began
        steps = _steps(executor)
        launches, by_step = [stub.stub_launches()], []
        programmatic = [stub.stub_programmatic()]
        for step_id, fields in enumerate(steps, 1):
            names.clear()
            executor.launch(plan(step_id=step_id, **fields), 0).result()
            launches.append(stub.stub_launches())
            programmatic.append(stub.stub_programmatic())
            by_step.append(Counter(names))
        alike = _launched_alike(executor, len(steps) + 1)
        decodes, of_decodes = _decodes_alike(executor, stub)
    seen = {
        "compiled": compiled[:num_at_start],
        "compiled_by_steps": compiled[num_at_start:],
        "launches": [after - before for before, after in itertools.pairwise(launches)],
        "programmatic": [after - before for before, after in itertools.pairwise(programmatic)],
        "names": by_step,
        "num_descriptors": stub.stub_descriptors(),
        "compiled_anew": COMPILED.num_compiled,
        "from_cache": COMPILED.num_cached,
        "compile_s": round(COMPILED.seconds, 1),
        "start_s": round(start_s, 1),
        "differing": sum(one != other for each in (alike, decodes) for one, other in zip(*each[1:], strict=True)),
        "programmatic_decodes": of_decodes,
        "repeated": repeated,
    }
    print(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
