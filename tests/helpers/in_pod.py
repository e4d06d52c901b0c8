"""`python in_pod.py -m MODULE OPTIONS`: the module as in a pod, whose cluster is TEST_CLUSTER, a file in JSON.

`names`: a file of names and their addresses, which the system's resolver knows besides its own; `api`: host, port and
account of the API server. The time between two resolutions is short, so that tests are.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
from pathlib import Path
from typing import Any

RESOLVE_S = 0.1


def main() -> None:
    cluster = json.loads(Path(os.environ.pop("TEST_CLUSTER")).read_text())
    from scheduler_svc.executors import discovery
    from scheduler_svc.executors.kubernetes import KubernetesApi

    discovery.RESOLVE_S = RESOLVE_S
    host, port, account = cluster["api"]
    discovery.KubernetesApi = lambda: KubernetesApi(host, port, Path(account))  # type: ignore[assignment,misc]
    resolve = socket.getaddrinfo

    def in_cluster(name: Any, port: Any, *args: Any, **named: Any) -> Any:
        found = json.loads(Path(cluster["names"]).read_text()).get(name)
        if found is None:
            return resolve(name, port, *args, **named)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

    socket.getaddrinfo = in_cluster
    assert sys.argv[1] == "-m"
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
