"""The machine code of both tiles multiplies alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT


@pytest.mark.slow
def test_no_product_uses_wgmma() -> None:
    """A row has the same bits in tiles of 16 and of 32 rows because both multiply with the same mma."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    modules = [f"--module=executor_svc.gpu.kernels.lora.{product}" for product in ("shrink", "expand")]
    command = [sys.executable, "-m", "executor_svc.gpu.kernels.compile", *modules, "--only=bf16 rows", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    wgmma = {build["name"]: build["wgmma"] for build in json.loads(done.stdout)["builds"] if build["arch"] == 90}
    assert {f"lora_{product} bf16 rows{rows}" for product in ("shrink", "expand") for rows in (16, 32)} <= wgmma.keys()
    assert not any(wgmma.values())
