"""`python -m gateway_svc.healthcheck HOST:PORT`: exit code 0 if a gateway serves, else 1 and the reason.

For the health checks of containers and process supervisors. The gateway may speak HTTP or HTTPS.
"""

from __future__ import annotations

import http.client
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence

_TIMEOUT_S = 3.0
_USAGE = "usage: python -m gateway_svc.healthcheck HOST:PORT"


def main(arguments: Sequence[str]) -> int:
    """Exit codes: 0 serving, 1 not serving or no answer, 2 wrong options."""
    if arguments in (["-h"], ["--help"]):
        print(f"{_USAGE}\n\nExit code 0 if the gateway there serves, by HTTP or HTTPS, else 1 and the reason.")
        return 0
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(_USAGE, file=sys.stderr)
        return 2
    reason = _reason(f"http://{arguments[0]}/health")
    if isinstance(reason, ConnectionError) and not isinstance(reason, ConnectionRefusedError):
        # A listener with TLS closes such a connection without an answer.
        encrypted = _reason(f"https://{arguments[0]}/health")
        reason = reason if isinstance(encrypted, OSError) else encrypted
    if reason is None:
        return 0
    print(f"{arguments[0]}: {reason}", file=sys.stderr)
    return 1


def _reason(url: str) -> Exception | str | None:
    """Why there is no good answer; None: there is one."""
    # The certificate is not checked: this asks whether a process serves, sends no secret, and its name is an address.
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    # A proxy of the environment is for the web, and not for this.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(url, timeout=_TIMEOUT_S):
            return None
    except urllib.error.HTTPError as error:
        return f"{error.code}: {error.read(1000).decode(errors='replace')}"
    except urllib.error.URLError as error:
        return error.reason if isinstance(error.reason, Exception) else str(error.reason)
    except (OSError, ValueError) as error:
        return error
    except http.client.HTTPException:
        return "what listens there speaks no HTTP"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
