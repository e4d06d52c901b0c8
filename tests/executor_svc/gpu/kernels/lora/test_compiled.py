"""LoRA's kernels as they are compiled for a GPU: one product for both tiles, and few compiles for steps of all sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.executor_svc.gpu import test_launches
from tests.helpers.paths import ROOT

stub = test_launches.stub


def lines_of(module: str, *arguments: str, **environment: str) -> str:
    """Return what a module prints in a process without Triton's interpreter."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    path = os.pathsep.join([str(ROOT), str(ROOT / "client")])
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False,
        env={**inherited, "PYTHONPATH": path, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_no_product_uses_wgmma() -> None:
    """A row has the same bits in tiles of 16 and of 32 rows because both multiply with the same mma."""
    modules = [f"--module=executor_svc.gpu.kernels.lora.{product}" for product in ("shrink", "expand")]
    printed = lines_of("executor_svc.gpu.kernels.compile", *modules, "--only=bf16 rows32", "--json")
    wgmma = {build["name"]: build["wgmma"] for build in json.loads(printed)["builds"] if build["arch"] == 90}
    assert {f"lora_{product} bf16 rows32" for product in ("shrink", "expand")} <= wgmma.keys()
    assert not any(wgmma.values())


class TestLaunches:
    """By Triton's own launcher."""

    pytestmark = test_launches.pytestmark

    def test_steps_of_all_sizes_take_two_builds_of_each_kernel(self, stub: Path) -> None:
        """One for few rows and one for many, so a start can compile them all; one for tokens and one for logits."""
        cache = str(stub / "cache")
        printed = lines_of(
            "tests.executor_svc.gpu.kernels.lora.stubbed_launches", str(stub),
            TRITON_LIBCUDA_PATH=str(stub), TRITON_CACHE_DIR=cache,
        )  # fmt: skip
        found = Counter(json.loads(printed.splitlines()[-1]))
        assert found == dict.fromkeys(("_sort_rows", "_take_ranks", "_shrink", "_expand"), 2)
