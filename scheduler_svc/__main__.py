"""`python -m scheduler_svc --executor HOST:PORT --listen HOST:PORT`: reads the options, then serves."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import cast

from cadenza_common.serving.first_signals import end_on_signals

if __name__ == "__main__":
    end_on_signals()

# grpc logs a refused port in addition to our own line; it reads this variable on import.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# transformers loads torch if it is installed: 3 s and 260 MB (measured) that tokenizers do not need.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

import logging

try:
    from cadenza_common.settings import service as settings
    from cadenza_common.telemetry import logs
    from cadenza_common.wire.transport import SCHEDULER_PORT, parse_address
    from scheduler_svc.config import SchedulerConfig
    from scheduler_svc.executors.addresses import executor_entries
except ModuleNotFoundError as missing:
    from cadenza_common.settings.extras import install_command

    sys.exit(f"error: {missing.name} is not installed: {install_command('scheduler')}")


_LOG = logging.getLogger("scheduler_svc")


def fail(message: str) -> None:
    """Write an error to stderr, in one line."""
    logs.report_error(message, "scheduler_svc")


def read_config(arguments: list[str]) -> SchedulerConfig | None:
    """The options; None if they are invalid, after an error on stderr."""
    config = settings.read_config(SchedulerConfig, arguments, fail)
    return config if config is not None and _check_addresses(config) else None


def main() -> int:
    """Exit codes: 0 stopped by a signal, 1 could not serve, 2 wrong options, 3 fenced by another scheduler."""
    config = read_config(sys.argv[1:])
    if config is None:
        return 2
    end_on_signals()
    logs.configure(config.log_level, config.log_format, "scheduler_svc")
    for warning in settings.ignored_settings(config, os.environ):
        _LOG.warning(warning)
    sys.modules.setdefault("torch", cast(ModuleType, None))
    # Imported here, so that --help and errors in options need not wait for grpc to load.
    import uvloop

    from scheduler_svc.app import serve

    # Without a file to read again, SIGHUP ends the process, as when its terminal is closed.
    files = (config.config, config.tenants)
    has_files = any(files) or bool(executor_entries(config.executor).files)
    reread = (lambda: read_config(sys.argv[1:])) if has_files else None
    code = uvloop.run(serve(config, fail, reread))
    # A thread may still be importing or tokenizing, and a normal exit would wait for it.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _check_addresses(config: SchedulerConfig) -> bool:
    option = "--executor"
    try:
        executor_entries(config.executor)
        option = "--listen"
        parse_address(config.listen, default_port=SCHEDULER_PORT)
    except ValueError as exc:
        fail(f"{option}: {exc}")
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
