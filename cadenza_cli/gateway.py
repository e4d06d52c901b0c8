"""`cadenza gateway`: serves other APIs for a scheduler that runs elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import typer

from cadenza_cli.service_args import Config, FieldOption

HELP = """Serve other APIs for a scheduler: OpenAI's and Anthropic's by HTTP, KServe's and vLLM's by gRPC.

\b
Examples:
  cadenza up MODEL                                     (a scheduler at 127.0.0.1:50051)
  cadenza gateway --target 127.0.0.1:50051 --http :8000
  cadenza gateway --kserve :8001 --vllm-grpc :50061      (without HTTP)
  cadenza gateway --kv-events-endpoint tcp://127.0.0.1:5557
  curl http://127.0.0.1:8000/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Hello"}]}'

`cadenza up MODEL --http 8000 --kserve 8001` starts and supervises one beside the services. It needs no model on its
machine, and several may serve one scheduler.

Prints `ready HOST:PORT` on stdout once it listens; its log goes to stderr. SIGTERM lets it finish its requests, for
--drain-timeout-s at most; SIGINT (Ctrl-C) or a second signal stops it at once.

Every option can also be set in the environment, such as CADENZA_HTTP=:8000, or in a TOML file (--config). How the
scheduler is reached with TLS is a client's: CADENZA_TLS_CA and so on.
"""
EPILOG = "Exit codes: 0 stopped by a signal, 1 could not serve, 2 wrong options."
_FIRST = ("target", "http", "kserve", "vllm_grpc")


def gateway(config: Config = None, **options: Any) -> None:
    """Serve until a signal."""
    from cadenza_common.settings.names import to_arguments
    from gateway_svc.__main__ import main

    given = {name: value for name, value in {"config": config, **options}.items() if value is not None}
    code = main(to_arguments(given))
    sys.stdout.flush()
    raise typer.Exit(code)


def gateway_fields() -> Iterator[FieldOption]:
    """The gateway's options, those that name addresses first; none if it is not installed."""
    try:
        from cadenza_common.settings.help import group_of
        from gateway_svc.config import GatewayConfig
    except ImportError:
        return
    fields = {name: field for name, field in GatewayConfig.model_fields.items() if name != "config"}
    for name in _FIRST:
        yield FieldOption(name, fields.pop(name), None)
    for name, field in fields.items():
        yield FieldOption(name, field, group_of(field))
