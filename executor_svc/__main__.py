"""`python -m executor_svc --model … --listen HOST:PORT`, or `--simulate …`: reads its options, then serves."""

from __future__ import annotations

import os
import sys
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from cadenza_common.serving.first_signals import end_on_signals

if __name__ == "__main__":
    end_on_signals()

# grpc would log a refused port beside our own line; it reads this variable on import.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# OpenMP's threads spin at barriers by default, and do not stop while another process has their core. Without any spin,
# an otherwise idle machine loses half its speed. A short spin is the compromise (docs/log.md). torch reads it on
# import.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import logging

try:
    import uvloop

    from cadenza_common.settings import service as settings
    from cadenza_common.telemetry import logs
    from cadenza_common.wire.transport import EXECUTOR_PORT, parse_address
    from executor_svc.config import ExecutorConfig
    from executor_svc.errors import StartError
    from executor_svc.ranks.hosts.places import PlaceError, RankPlace, read_place
except ModuleNotFoundError as missing:
    from cadenza_common.settings.extras import install_command

    sys.exit(f"error: {missing.name} is not installed: {install_command('executor')}")

if TYPE_CHECKING:
    from executor_svc.speculation.drafts import DraftSource

_LOG = logging.getLogger("executor_svc")


def fail(message: str) -> None:
    """Write an error to stderr, in one line."""
    logs.report_error(message, "executor_svc")


def read_config(arguments: list[str]) -> ExecutorConfig | None:
    """Return the options, or None if they are wrong; the error is then on stderr."""
    config = settings.read_config(ExecutorConfig, arguments, fail)
    try:
        if config is not None:
            parse_address(config.listen, default_port=EXECUTOR_PORT)
    except ValueError as exc:
        fail(f"--listen: {exc}")
        return None
    return config


def _place(config: ExecutorConfig) -> RankPlace | None:
    """Return which rank this process is, if something else starts the ranks. Raises StartError."""
    if config.distributed_executor_backend != "external":
        return None
    if config.simulate is not None:
        raise PlaceError("--distributed-executor-backend external is not possible with --simulate")
    size = config.tensor_parallel_size if "tensor_parallel_size" in config.model_fields_set else None
    return read_place(os.environ, size, config.rank_port)


def _start_elsewhere(config: ExecutorConfig) -> int:
    """Let a backend that starts executors on other machines start this one; returns its exit code.

    The launcher names its backends as entry points: this service does not know it.
    """
    backend = config.distributed_executor_backend
    for found in entry_points(group="cadenza.executor_backends", name=backend):
        code: int = found.load()(config.model_dump(exclude_unset=True, exclude_none=True), fail)
        return code
    fail(f"--distributed-executor-backend {backend}: no installed package has this backend")
    return 2


def _follow(config: ExecutorConfig, place: RankPlace) -> int:
    """Run a rank other than 0; returns its exit code."""
    from executor_svc.startup.external import run_member

    try:
        return run_member(config, place)
    except StartError as error:
        fail(str(error))
        sys.stderr.flush()
        os._exit(1)  # threads may still run


def main(drafts: DraftSource | None = None) -> int:
    """Run the service, or a rank of it. Exit codes: those of `ExecutorConfig.exit_codes`.

    drafts: in place of the source of the options, for benchmarks.
    """
    config = read_config(sys.argv[1:])
    if config is None:
        return 2
    end_on_signals()
    logs.configure(config.log_level, config.log_format, "executor_svc")
    for warning in settings.ignored_settings(config, os.environ):
        _LOG.warning(warning)
    if config.distributed_executor_backend == "ray":
        return _start_elsewhere(config)
    try:
        place = _place(config)
    except StartError as error:
        fail(str(error))
        return 2
    if place is not None:
        config = config.model_copy(update={"tensor_parallel_size": place.size})
        if place.rank:
            return _follow(config, place)
    # Imported here, so that wrong options and --help do not wait for torch.
    from executor_svc.app import serve

    code, ended = uvloop.run(serve(config, fail, drafts, place))
    if not ended:
        # A step or the loading still runs on the device thread; Python would wait for it at exit.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
