"""`python -m benchmarks.gpu [PART] [options]`, also `make bench-gpu`: tests, kernels and serving on a GPU.

Exit codes: 0 all passed, 1 a test or a measurement failed, 2 no GPU or wrong options.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.common.rows import ROOT
from benchmarks.gpu.options import PARTS, parse

_MIN_CAPABILITY = (8, 0)


def gpu_problem() -> str:
    """Why nothing can run here; empty if there is a usable GPU."""
    try:
        import torch
    except ImportError as error:
        return f"PyTorch cannot be imported: {error}"
    if not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} sees no GPU"
    if (capability := torch.cuda.get_device_capability(0)) < _MIN_CAPABILITY:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, less than 8.0"
    return ""


def main(arguments: Sequence[str]) -> int:
    """Run one part in this process, or each of them in a process of its own."""
    options = parse(arguments)
    if not options.trial and (problem := gpu_problem()):
        print(f"error: {problem}; this needs one of compute capability 8.0 or more", file=sys.stderr)
        return 2
    # Checkpoints are random: nothing is fetched.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if options.part is None:
        codes = [
            subprocess.run([sys.executable, "-m", "benchmarks.gpu", part, *arguments], cwd=ROOT, check=False).returncode
            for part in PARTS
        ]
        return int(any(codes))
    if options.trial and options.part == "kernels":
        os.environ["TRITON_INTERPRET"] = "1"
    if options.part == "tests":
        from benchmarks.gpu.testing.part import run
    elif options.part == "kernels":
        from benchmarks.gpu.kernels.part import run
    else:
        from benchmarks.gpu.serving.part import run
    return run(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
