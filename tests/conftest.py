"""Settings for the whole suite. Fixtures live in the folders that use them; shared helpers are `tests.…` modules."""

from __future__ import annotations

import gc
import importlib.util
import os
import re
import secrets
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.helpers.bytecode import make_bytecode
from tests.helpers.forks import client as forks
from tests.helpers.kept import begin_run, end_run
from tests.helpers.marks import draw_fewer, sample

# Tests pass without a network, so no hub is contacted; and test processes must not fight over two cores.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Cadenza's commands set these as they are imported, which some test does.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
# Ray reads these once, when whatever test imports it first.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(16))

# The same examples on every machine and run, and no deadline, since CI's cores are shared.
# To look for new ones: make test PYTEST_ARGS='--hypothesis-profile=explore'. `make test` runs a third of the examples.
settings.register_profile("cadenza", deadline=None, derandomize=True, max_examples=50, print_blob=True)
settings.register_profile("all", settings.get_profile("cadenza"))
settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # `make test &` in a script; tests send Ctrl-C
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not config.getoption("--hypothesis-profile"):
        settings.load_profile("cadenza")
    if "TEST_NEW_INTERPRETERS" not in os.environ and sys.platform == "linux":
        forks.install()
    begin_run()
    workers = 0 if hasattr(config, "workerinput") else config.getoption("numprocesses", 0)
    if workers:
        make_bytecode(config, workers)


def pytest_unconfigure() -> None:
    forks.end()
    end_run()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    forks.is_on = item.get_closest_marker("interpreter") is None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """While tests are collected next to nothing is garbage, and the collector would search it again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    sample(items)
    draw_fewer(items, all_of_them=bool(config.getoption("--hypothesis-profile")))


def pytest_collection_finish() -> None:
    """Spare the garbage collector the modules of all tests and of what they import: nothing of them is ever garbage."""
    gc.collect()
    gc.freeze()
    forks.keep_variables()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """The same for what a file's tests have imported: transformers' objects cost each later full collection 0.3 s.

    And a test must leave variables as they were, or the processes of all later tests would be new interpreters.
    """
    try:
        result = yield
        forks.check_variables()
        return result
    finally:
        if nextitem is None or nextitem.path != item.path:
            gc.collect()
            gc.freeze()


_HAS_TORCH = importlib.util.find_spec("torch") is not None
_ARGUMENTS = " ".join(["", *sys.argv[1:]])
_STARTS_WORKERS = (
    "PYTEST_XDIST_WORKER" not in os.environ
    and re.search(r" (-n|--numprocesses)[ =]?(?![ =]?0)", _ARGUMENTS) is not None
)
"""This process runs no test itself: it imports no torch, and the workers start seconds earlier."""
if _HAS_TORCH and not _STARTS_WORKERS:
    import torch

    # Before Triton is imported, which transformers does beside a CUDA build of PyTorch: its decorators decide then.
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
_NEEDS_TORCH = re.compile(
    r"^\s*(?:from|import) (?:torch|tests\.checkpoints|tests\.executor_svc\.models|executor_svc(?!\.config)"
    r"|tests\.fuzz\.wire\.(?:floods|run)"
    r"|tests\.chaos\.(?:__main__|run)"
    r"|tests\.helpers\.(?:services|executor_harness|sampling|stepping))\b",
    re.MULTILINE,
)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Without torch (make check-py312) leave out the files that need it."""
    if _HAS_TORCH or collection_path.suffix != ".py":
        return None
    return True if _NEEDS_TORCH.search(collection_path.read_text(encoding="utf-8")) else None
