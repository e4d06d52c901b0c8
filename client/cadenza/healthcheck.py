"""`python -m cadenza.healthcheck HOST:PORT`: exit code 0 if a service is serving, else 1 and the reason in one line.

For the health checks of containers and process supervisors. It calls grpc.health.v1, which both services implement, and
needs only grpcio and protobuf.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence

import grpc
from google.protobuf import wrappers_pb2

from cadenza_common.wire.tls import TLS
from cadenza_common.wire.tls_reason import tls_reason
from cadenza_common.wire.transport import SCHEDULER_PORT, format_address, health_reason, parse_address, sync_channel

_CHECK = "/grpc.health.v1.Health/Check"
_STATES = ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")  # grpc.health.v1.HealthCheckResponse.ServingStatus
_SERVING = _STATES.index("SERVING")


def check(target: str, service: str = "", *, timeout_s: float = 3.0, tls: TLS | None = None) -> str | None:
    """Check the health of `service`; "" means the whole server. Returns None if it is serving, else the reason.

    Raises ValueError if `target` is not HOST:PORT, `timeout_s` is not over 0, or a file of `tls` cannot be used.
    """
    if not 0 < timeout_s < math.inf:
        raise ValueError(f"the timeout must be a number of seconds above 0, not {timeout_s:g}")
    address = format_address(*parse_address(target, default_port=SCHEDULER_PORT))
    with sync_channel(address, tls) as channel:
        # Request and response have one field each, numbered 1, a string and an enum: on the wire they equal these #
        # wrappers. The real messages come with grpcio-health-checking, which the light client does not need.
        call = channel.unary_unary(
            _CHECK,
            request_serializer=wrappers_pb2.StringValue.SerializeToString,
            response_deserializer=wrappers_pb2.Int32Value.FromString,
        )
        try:
            answer, ended = call.with_call(wrappers_pb2.StringValue(value=service), timeout=timeout_s)
        except grpc.RpcError as error:
            reason = ""
            if error.code() is grpc.StatusCode.UNAVAILABLE:  # at once; after a timeout there is no time left
                reason = tls_reason(address, tls, default_port=SCHEDULER_PORT, timeout_s=1.0)
            return f"{error.code().name}: {reason or error.details()}"
    if (state := answer.value) == _SERVING:
        return None
    name = _STATES[state] if 0 <= state < len(_STATES) else f"state {state}"
    why = health_reason(ended.trailing_metadata())
    return f"{name}: {why}" if why else name


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 serving, 1 not serving or no answer, 2 wrong options."""
    parser = argparse.ArgumentParser(prog="python -m cadenza.healthcheck", description="Is a Cadenza service serving?")
    parser.add_argument("target", metavar="HOST:PORT")
    parser.add_argument("--service", default="", metavar="NAME", help="check one gRPC service (default: the server)")
    parser.add_argument("--timeout-s", type=float, default=3.0, metavar="SECONDS", help="how long to wait (default: 3)")
    for name in ("ca", "cert", "key"):
        parser.add_argument(f"--tls-{name}", metavar="FILE", help=f"as CADENZA_TLS_{name.upper()}")
    parser.add_argument("--tls-server-name", metavar="NAME", help="the name that the certificate must have")
    options = parser.parse_args(arguments)
    given = {name.removeprefix("tls_"): value for name, value in vars(options).items() if name.startswith("tls_")}
    try:
        tls = TLS(**given) if any(given.values()) else TLS.from_environment()
        reason = check(options.target, options.service, timeout_s=options.timeout_s, tls=tls)
    except ValueError as error:
        parser.error(str(error))
    print(f"{options.target}: {reason or 'SERVING'}", file=sys.stderr if reason else sys.stdout)
    return 1 if reason else 0


if __name__ == "__main__":
    sys.exit(main())
