"""What the processes of an executor run: one, or a rank on each of several places."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from cadenza_common.wire.transport import format_address, parse_address
from cadenza_launcher.on_ray.orders import Order
from cadenza_launcher.on_ray.replica import Orders

_SECRET = "rank-secret"
_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class RayLaunch:
    """How executors are started where Ray has placed them."""

    program: Sequence[str]
    arguments: Sequence[str]
    """Those of all executors; `{files}` is the folder of the files."""
    num_actors: int
    """1: one process is the executor, and starts its ranks if it has several; else each is a rank."""
    files: Mapping[str, str] = field(default_factory=dict)
    listen: str | None = None
    """Where rank 0 listens for its scheduler; None: at any port of its machine."""

    def orders(self, name: str) -> Orders:
        """Return what gives the orders of an executor; each call makes a new secret of its ranks."""
        return partial(self._orders, name)

    def _orders(self, name: str, places: Sequence[str]) -> Sequence[Order]:
        hosts = [parse_address(place, default_port=0) for place in places]
        listen = self.listen or format_address(hosts[0][0], 0)
        first = [*self.arguments, f"--listen={listen}"]
        if self.num_actors == 1:
            return [Order(name, self.program, first, files=self.files)]
        ranks = ["--distributed-executor-backend=external", f"--rank-port={hosts[0][1]}"]
        ranks.append(f"--rank-secret-file={{files}}/{_SECRET}")
        files = {**self.files, _SECRET: secrets.token_hex(_SECRET_BYTES)}
        own = [first, *[list(self.arguments)] * (self.num_actors - 1)]
        return [
            Order(f"{name} rank {rank}", self.program, [*own[rank], *ranks], variables, files)
            for rank, variables in enumerate(rank_variables([host for host, _ in hosts]))
        ]


def rank_variables(hosts: Sequence[str]) -> list[dict[str, str]]:
    """Return torchrun's variables for ranks on these machines."""
    on_machine, seen = Counter(hosts), Counter[str]()
    made = []
    for rank, host in enumerate(hosts):
        made.append(
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(hosts)),
                "LOCAL_RANK": str(seen[host]),
                "LOCAL_WORLD_SIZE": str(on_machine[host]),
                "MASTER_ADDR": hosts[0],
            }
        )
        seen[host] += 1
    return made
