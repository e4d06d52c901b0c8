"""`python -m executor_svc --model … --listen HOST:PORT`, or `--simulate …`: reads its options, then serves."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

# grpc logs a refused port in its own words, beside our line; it reads this when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# OpenMP's threads spin at barriers by default, for ever it seems when another process has their core; not at all, and a
# machine of one's own loses half its speed. A short spin is the middle way (docs/log.md). Read when torch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import logging

try:
    import uvloop

    from cadenza.settings import service as settings
    from cadenza.transport import EXECUTOR_PORT, parse_address
    from executor_svc.config import ExecutorConfig
except ModuleNotFoundError as missing:
    sys.exit(f"error: {missing.name} is not installed: pip install 'cadenza[executor]'")


_LOG = logging.getLogger("executor_svc")


def fail(message: str) -> None:
    """Say on stderr what is wrong, in one line."""
    print(f"error: {message}", file=sys.stderr, flush=True)


def _leave(_number: int, _frame: FrameType | None) -> None:
    os._exit(0)


def read_config(arguments: list[str]) -> ExecutorConfig | None:
    """The options; None if they are wrong, which has then been said on stderr."""
    config = settings.read_config(ExecutorConfig, arguments, fail)
    try:
        if config is not None:
            parse_address(config.listen, default_port=EXECUTOR_PORT)
    except ValueError as exc:
        fail(f"--listen: {exc}")
        return None
    return config


def main() -> int:
    """Exit codes: 0 stopped by a signal, 1 could not serve, 2 wrong options."""
    config = read_config(sys.argv[1:])
    if config is None:
        return 2
    # Until the event loop takes the signals over, there is nothing to clean up.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    logging.basicConfig(
        level=config.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for warning in settings.ignored_settings(config, os.environ):
        _LOG.warning(warning)
    # Here, so that wrong options and --help are answered before torch is loaded.
    from executor_svc.app import serve

    code, ended = uvloop.run(serve(config, fail))
    if not ended:
        # A step or the loading still runs on the device thread, and Python would wait for it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
