"""LoRA's kernels as Triton compiles and launches them for an H200, on a stub of CUDA's driver."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.executor_svc.gpu import test_launches
from tests.helpers.paths import ROOT

stub, pytestmark = test_launches.stub, test_launches.pytestmark
_PRODUCT = re.compile(r"(?:wg)?mma\.[\w.]*?m\d+n\d+k\d+")


@pytest.mark.long
def test_steps_of_all_sizes_take_two_builds_that_multiply_alike(stub: Path) -> None:
    """Builds for few rows and for many, so a start can compile them all; of tables, for tokens and for logits.

    A row has the same bits in tiles of 16 and of 32 rows because both multiply with the same instructions.
    """
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("TRITON_")},
        "TRITON_LIBCUDA_PATH": str(stub),
        "TRITON_CACHE_DIR": str(stub / "cache"),
        "CC": str(stub / "cc"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "client")]),
    }
    command = [sys.executable, "-m", "tests.executor_svc.gpu.kernels.lora.stubbed_launches", str(stub)]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    compiled = Counter(json.loads(ended.stdout.splitlines()[-1]))
    tables = ("_take_ranks", "_replace_embeddings", "_replace_logits")
    assert compiled == dict.fromkeys(("_sort_rows", "_shrink", "_expand", *tables), 2)
    wide, narrow = "mma.sync.aligned.m16n8k16", "mma.sync.aligned.m16n8k8"
    for kernel, product in (("_shrink", wide), ("_expand", narrow), ("_replace_logits", wide)):
        builds = [path.read_text(encoding="utf-8") for path in stub.rglob(f"{kernel}.ptx")]
        assert [set(_PRODUCT.findall(build)) for build in builds] == [{product}] * 2
