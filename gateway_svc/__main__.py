"""`python -m gateway_svc --target HOST:PORT --http HOST:PORT`: reads the options, then serves."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from cadenza_common.serving.first_signals import end_on_signals

if __name__ == "__main__":
    end_on_signals()

# grpc logs each connection that it cannot make, in addition to our own line; it reads this variable on import.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import logging

try:
    from cadenza_common.settings import service as settings
    from cadenza_common.telemetry import logs
    from gateway_svc.config import GatewayConfig
    from gateway_svc.page_starter import PAGE_DEMO, PAGE_TOKEN, ask_to_kill
    from gateway_svc.several.wire import door_place
except ModuleNotFoundError as missing:
    from cadenza_common.settings.extras import install_command

    sys.exit(f"error: {missing.name} is not installed: {install_command('gateway')}")

if TYPE_CHECKING:
    from gateway_svc.page_starter import PageRights

_LOG = logging.getLogger("gateway_svc")


def fail(message: str) -> None:
    """Write an error to stderr, in one line."""
    logs.report_error(message, "gateway_svc")


def main(arguments: list[str]) -> int:
    """Exit codes: 0 stopped by a signal, 1 could not serve, 2 wrong options."""
    config = settings.read_config(GatewayConfig, arguments, fail)
    if config is None:
        return 2
    end_on_signals()
    logs.configure(config.log_level, config.log_format, "gateway_svc")
    for warning in settings.ignored_settings(config, os.environ):
        _LOG.warning(warning)
    # Imported here, so that --help and errors in options need not wait for grpc to load.
    try:
        import uvloop

        from gateway_svc.serve import serve
    except ModuleNotFoundError as missing:
        from cadenza_common.settings.extras import install_command

        fail(f"{missing.name} is not installed: {install_command('gateway')}")
        return 1
    return uvloop.run(serve(config, fail, _page_rights(os.environ), door_place(os.environ)))


def _page_rights(environment: Mapping[str, str]) -> PageRights | None:
    """The rights that `cadenza up` gives: a token, kept over restarts of the gateway, and whether it kills if asked."""
    from gateway_svc.page_starter import PageRights

    token = environment.get(PAGE_TOKEN)
    return None if token is None else PageRights(token, ask_to_kill if environment.get(PAGE_DEMO) else None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
