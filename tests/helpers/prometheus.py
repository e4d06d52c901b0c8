"""A real Prometheus, Debian's, that scrapes services of a test and answers queries."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.machine.loopback import new_address
from tests.helpers.paths import ROOT

WATCH = ROOT / "docs" / "watch"
_DEADLINE_S = 20
_INTERVAL = "500ms"
_SETTLED_S = 1.0
"""A scrape that began so long ago has ended, or failed."""
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="Debian's package prometheus is not installed (tests/service/debian-packages.txt)",
)


class Prometheus:
    """A running one."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._at: float | None = None
        """When queries are evaluated, in seconds since 1970; None: now."""

    def get(self, path: str, **parameters: str) -> Any:
        """The data of an API call; fails with the server's error."""
        url = f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as exc:
            raise AssertionError(f"{parameters}: {exc.read().decode()}") from exc
        assert answer["status"] == "success", answer
        return answer["data"]

    def series(self, query: str) -> list[tuple[dict[str, str], float]]:
        """Labels and values that a query gives now, or at the moment of `hold`."""
        moment = {} if self._at is None else {"time": f"{self._at:.3f}"}
        result = self.get("query", query=query, **moment)["result"]
        return [(each["metric"], float(each["value"][1])) for each in result]

    def value(self, query: str) -> float:
        """The value of a query that gives one; 0 if it gives none."""
        found = self.series(query)
        assert len(found) <= 1, found
        return found[0][1] if found else 0.0

    def by(self, label: str, query: str) -> dict[str, float]:
        """The values of a query by a label, without zeros."""
        return {labels.get(label, ""): value for labels, value in self.series(query) if value}

    def until(self, query: str, expected: float) -> None:
        """Ask again and again until a query gives this value; each look is a call, so this does not spin."""
        deadline = time.monotonic() + _DEADLINE_S
        while (found := self.value(query)) != expected:
            self._check(deadline, f"{query}: {found}, not {expected}")

    def hold(self, expected: Mapping[str, float]) -> None:
        """Wait until queries give these values at one moment, at which all later ones are evaluated.

        Later, a service that a busy machine does not let answer a scrape in time would have no series.
        """
        deadline = time.monotonic() + _DEADLINE_S
        while True:
            self._at = time.time() - _SETTLED_S
            found = {query: self.value(query) for query in expected}
            if found == expected:
                return
            self._check(deadline, f"{found}, not {dict(expected)}")

    def _check(self, deadline: float, problem: str) -> None:
        if time.monotonic() > deadline:
            errors = {each["scrapeUrl"]: each["lastError"] for each in self.get("targets")["activeTargets"]}
            raise AssertionError(f"{problem}; {errors}")


@contextmanager
def prometheus(folder: Path, targets: Mapping[str, list[str]], **labels: str) -> Iterator[Prometheus]:
    """Scrape these addresses by job, twice a second, with the rules of docs/watch; killed at the end.

    labels: of all targets, besides job and instance.
    """
    config = {
        "global": {"scrape_interval": _INTERVAL, "scrape_timeout": _INTERVAL, "evaluation_interval": _INTERVAL},
        "rule_files": [str(WATCH / "alerts.yml")],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": addresses, "labels": labels}]}
            for job, addresses in targets.items()
        ],
    }
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    address = f"{new_address()}:9090"
    command = ["prometheus", f"--config.file={path}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        running = Prometheus(address)
        _wait_ready(address, process, folder)
        yield running
    finally:
        process.kill()
        process.wait()


def _wait_ready(address: str, process: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while True:
        try:
            with urllib.request.urlopen(f"http://{address}/-/ready", timeout=5):
                return
        except OSError:
            assert process.poll() is None, (folder / "prometheus.log").read_text()
            assert time.monotonic() < deadline, (folder / "prometheus.log").read_text()
            _give_time(process)


def _give_time(process: subprocess.Popen[bytes]) -> None:
    """Give the process 20 ms, or less if it ends."""
    try:
        process.wait(0.02)
    except subprocess.TimeoutExpired:
        return
