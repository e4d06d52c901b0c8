"""The options of metrics: ports of `cadenza up`, and who may read them."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from pydantic import ValidationError

from cadenza.errors import OptionError
from cadenza_launcher.services.options import Setting
from cadenza_launcher.services.ports import metrics_ports
from executor_svc.config import ExecutorConfig
from scheduler_svc.config import SchedulerConfig

EXECUTORS = ["executor 0", "executor 1"]


def ports_of(value: int | None) -> dict[str, int]:
    settings = {} if value is None else {"metrics_port": Setting(value, "a file")}
    with contextlib.ExitStack() as kept:
        return metrics_ports(settings, EXECUTORS, kept)


def test_the_scheduler_has_the_port_and_executors_the_next_ones() -> None:
    assert ports_of(None) == {}
    assert ports_of(9464) == {"scheduler": 9464, "executor 0": 9465, "executor 1": 9466}


def test_port_0_gives_each_a_free_one_that_it_keeps() -> None:
    ports = ports_of(0)
    assert set(ports) == {"scheduler", *EXECUTORS}
    assert len(set(ports.values())) == 3
    assert min(ports.values()) > 0


def test_ports_beyond_the_last_one_are_an_error() -> None:
    message = "a file: option metrics_port: the scheduler and 2 executors need 3 ports from 65534 on"
    with pytest.raises(OptionError, match=message):
        ports_of(65534)


@pytest.mark.parametrize("config", [SchedulerConfig, ExecutorConfig])
@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.7", "::", "example.org"])
def test_metrics_beyond_loopback_need_a_token_or_a_word(config: Any, host: str) -> None:
    with pytest.raises(ValidationError, match="is beyond loopback: give --metrics-token-file, or --metrics-insecure"):
        config(**{"model": "m"} if config is ExecutorConfig else {}, metrics_port=0, metrics_host=host)


def test_what_is_allowed() -> None:
    for host in ("127.0.0.1", "127.9.9.9", "localhost", "::1", "[::1]"):
        assert SchedulerConfig(metrics_port=0, metrics_host=host).metrics_host == host
    assert SchedulerConfig(metrics_port=0, metrics_host="0.0.0.0", metrics_token_file="t").metrics_port == 0
    assert SchedulerConfig(metrics_port=0, metrics_host="0.0.0.0", metrics_insecure=True).metrics_port == 0
    assert SchedulerConfig(metrics_host="0.0.0.0").metrics_port is None, "nothing listens"
