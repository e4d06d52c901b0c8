"""The executor service with drafts from a recorded run: `python -m benchmarks.speculative.oracle_executor OPTIONS`.

All options are the executor's, and all code but the source of drafts. The environment names the file of the run and the
seed of the wrong drafts.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.speculative.oracle import OracleSource
from executor_svc.__main__ import main

TEXTS, SEED = "BENCHMARK_ORACLE_TEXTS", "BENCHMARK_ORACLE_SEED"

if __name__ == "__main__":
    sys.exit(main(OracleSource(Path(os.environ[TEXTS]), int(os.environ[SEED]))))
