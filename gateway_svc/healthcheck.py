"""`python -m gateway_svc.healthcheck HOST:PORT`: exit code 0 if a gateway serves, else 1 and the reason.

For the health checks of containers and process supervisors.
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from collections.abc import Sequence

_TIMEOUT_S = 3.0


def main(arguments: Sequence[str]) -> int:
    """Exit codes: 0 serving, 1 not serving or no answer, 2 wrong options."""
    if len(arguments) != 1:
        print("usage: python -m gateway_svc.healthcheck HOST:PORT", file=sys.stderr)
        return 2
    # A proxy of the environment is for the web, and not for this.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{arguments[0]}/health", timeout=_TIMEOUT_S):
            return 0
    except urllib.error.HTTPError as error:
        print(f"{arguments[0]}: {error.code}: {error.read(1000).decode(errors='replace')}", file=sys.stderr)
    except (OSError, ValueError) as error:
        print(f"{arguments[0]}: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
