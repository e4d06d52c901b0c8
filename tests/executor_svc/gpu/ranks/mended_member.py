"""The process of a rank other than 0, for tests: the kernels of a GPU run under Triton's interpreter."""

from __future__ import annotations

import os
import sys

from executor_svc.startup.member import main
from tests.executor_svc.gpu.interpreter import mended_interpreter

if __name__ == "__main__":
    with mended_interpreter():
        code = main()
        sys.stderr.flush()
        os._exit(code)
