"""Compiles the kernels of a model for a GPU that is not here: `python -m executor_svc.startup.compile_ahead --help`.

A start with the same options on such a GPU, with the same versions and sources, finds them in its cache.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence

import torch

from cadenza_common.settings import service as settings
from cadenza_common.telemetry.logs import report_error
from executor_svc.config import ExecutorConfig
from executor_svc.errors import StartError
from executor_svc.gpu.checks.fallbacks import Fallbacks
from executor_svc.gpu.checks.model_steps import ModelSteps
from executor_svc.gpu.checks.steps.step_check import StepCheck
from executor_svc.gpu.compiled.ahead import MULTIPROCESSORS, compiling_for
from executor_svc.gpu.compiled.kernel_cache import COMPILED, use_kernel_cache
from executor_svc.gpu.device import GpuDevice
from executor_svc.gpu.warm_up import run_steps
from executor_svc.models.loading import load_model
from executor_svc.plan.description import limits_of
from executor_svc.startup.adapters import adapter_sizes, make_adapters, with_adapters
from executor_svc.startup.executors import make_executor, run_trial
from executor_svc.startup.gpu_report import LEAST_LENGTH
from executor_svc.startup.speculation import (
    check_speculation,
    load_speculative_model,
    make_draft_source,
    model_on_gpu,
    state_layers_of,
)

_BLOCKS = 64
"""KV blocks of the executor that launches everything once; no kernel hangs on their number."""


def compile_ahead(config: ExecutorConfig, arch: int) -> None:
    """Compile what a start with these options launches on a GPU of this compute capability, such as 90.

    Weights are in the host's memory meanwhile; --load-format dummy reads none. Raises StartError. Not compiled: kernels
    that only the comparison of exact mode launches, and those of ranks.
    """
    device = GpuDevice(config, (arch, MULTIPROCESSORS[arch]))
    check_speculation(config, device.name)
    config = config.sized_for(device.name).model_copy(update={"num_gpu_blocks": _BLOCKS, "num_cpu_blocks": min(
        config.num_cpu_blocks, _BLOCKS)})  # fmt: skip
    torch.set_num_threads(device.num_threads)
    with compiling_for(arch):
        loaded = load_model(config, device, adapter_sizes(config, device))
        draft = load_speculative_model(config, device, loaded)
        adapters = make_adapters(config, device, loaded)
        layers = None if draft is None else draft.layers
        is_long = loaded.geometry.max_model_len >= LEAST_LENGTH
        if is_long:
            with device.kernels.passing():
                steps = ModelSteps.of(loaded, device, config, layers)
                for _, chunks in steps.steps():
                    steps.run(steps.fill(chunks))
        if is_long and config.kernel_checks != "off":
            check = StepCheck(loaded, device, config, device.choices, layers, model_on_gpu(draft, device))
            check.launch(Fallbacks(device.kernels, device.choices))
        run_trial(loaded, device, config, draft)
        pools = device.new_kv_cache(loaded.geometry, config, 0, layers)
        limits = with_adapters(limits_of(config, loaded.geometry, pools), adapters)
        executor = make_executor(
            loaded, device, pools, limits, enforce_eager=config.enforce_eager, state_layers=state_layers_of(draft),
            drafts=lambda runner: make_draft_source(config, limits, draft, device, pools, runner),
            draft_model=model_on_gpu(draft, device), adapters=adapters,
        )  # fmt: skip
        run_steps(executor)


def main(arguments: Sequence[str]) -> int:
    """Exit codes: 0 all compiled, 1 a kernel or the model is refused, 2 wrong options."""
    parser = argparse.ArgumentParser(
        prog="python -m executor_svc.startup.compile_ahead",
        description=f"{__doc__}\nAll other options are the executor's, as --model and --load-format dummy.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = ", ".join(map(str, MULTIPROCESSORS))
    parser.add_argument("--arch", type=int, choices=list(MULTIPROCESSORS), required=True, help=f"one of {known}")
    parser.add_argument("--into", required=True, help="folder of the cache, for --kernel-cache")
    options, others = parser.parse_known_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    config = settings.read_config(ExecutorConfig, others, lambda text: report_error(text, "compile_ahead"))
    if config is None:
        return 2
    use_kernel_cache(options.into)
    began = time.monotonic()
    try:
        compile_ahead(config, options.arch)
    except StartError as error:
        report_error(str(error), "compile_ahead")
        return 1
    print(f"sm_{options.arch}: {COMPILED}; {time.monotonic() - began:.1f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
