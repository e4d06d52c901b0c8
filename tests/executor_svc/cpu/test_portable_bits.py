"""One instruction set gives one fingerprint and one set of tokens, whatever code libraries choose for a processor.

PyTorch, MKL, numpy and the C library are made to choose as they do on lesser processors: each run stands for one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_llama
from tests.executor_svc.cpu.kernels.processors import ISAS
from tests.helpers.paths import ROOT

PROCESSORS: dict[str, dict[str, str]] = {
    "this one": {},
    "without AVX-512": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR X86_V4",
    },
    "without FMA": {
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4,-AVX512F",
        "NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL FMA3 AVX2 X86_V3",
    },
}
needs_avx2 = pytest.mark.skipif("avx2" not in ISAS, reason="this processor has no AVX2")


@needs_avx2
def test_processors_of_one_isa_agree(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "model")
    running = {
        name: subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.executor_svc.cpu.portable_bits", str(folder), "avx2"],
            env={**os.environ, **variables},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name, variables in PROCESSORS.items()
    }
    found: dict[str, Any] = {name: json.loads(process.communicate()[0]) for name, process in running.items()}
    first = found["this one"]
    assert first["own"]["isa"] == "avx2"
    for name, result in found.items():
        assert result["own"] == first["own"], name
    assert len({json.dumps(result["libraries"]) for result in found.values()}) > 1, "these runs differ in nothing"
