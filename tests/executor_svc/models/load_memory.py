"""Loads a model and prints the bytes of its weights, the memory that stays, and the peak. For tests only.

Arguments: a checkpoint, --load-format, --numerics and --quantization.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from executor_svc.config import ExecutorConfig
from executor_svc.models.loading import load_model
from executor_svc.startup.executors import make_device


def resident(field: str) -> int:
    """Return a number of bytes of /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def main() -> None:
    model, load_format, numerics, quantization = sys.argv[1:]
    config = ExecutorConfig.model_validate(
        {
            "model": model, "device": "cpu", "num_threads": 2, "max_num_batched_tokens": 16, "max_num_seqs": 16,
            "load_format": load_format, "numerics": numerics, "quantization": quantization,
        }
    )  # fmt: skip
    device = make_device(config)
    if numerics == "fast":
        import transformers.models.gpt2.modeling_gpt2  # noqa: F401 - what it takes is no weight's
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak begins anew
    before = resident("VmRSS")
    loaded = load_model(config, device)
    print(json.dumps([loaded.geometry.weight_bytes, resident("VmRSS") - before, resident("VmHWM") - before]))


if __name__ == "__main__":
    main()
