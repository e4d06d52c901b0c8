"""The arguments of the application of Ray Serve."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import pytest

from cadenza.errors import OptionError

pytestmark = [
    pytest.mark.slow,  # to import Ray Serve takes seconds
    pytest.mark.skipif(
        importlib.util.find_spec("starlette") is None, reason="Ray Serve is not installed: the extra ray-serve"
    ),
]
SERVED = {"model": "m", "executors": 2, "max_executors": 3, "unhealthy_after_s": 5}


def test_the_replica_gets_the_options() -> None:
    from cadenza_launcher.ray_serve.app import application

    bound = application(SERVED)._bound_deployment
    options, unhealthy_after_s = bound.init_args
    given = {name: value for name, value in SERVED.items() if name != "unhealthy_after_s"}
    own = {"host": "127.0.0.1", "port": 50051, "distributed_executor_backend": "ray", "config": None}
    assert (options, unhealthy_after_s) == (own | given, 5.0)
    assert application({**SERVED, "port": 7})._bound_deployment.init_args[0]["port"] == 7


def test_the_command_line_of_serve_gives_text() -> None:
    from cadenza_launcher.ray_serve.app import application

    given = {"model": "m", "executors": "2", "port": "7", "unhealthy_after_s": "5"}
    options, unhealthy_after_s = application(given)._bound_deployment.init_args
    assert (options["port"], unhealthy_after_s) == (7, 5.0)


def test_serve_holds_no_request_back_and_has_one_replica_without_processors() -> None:
    from cadenza_launcher.ray_serve.app import deployment

    assert (deployment.num_replicas, deployment.max_queued_requests) == (1, -1)
    assert deployment.max_ongoing_requests >= 1_000_000
    assert deployment.ray_actor_options["num_cpus"] == 0
    assert 0.5 < deployment.ray_actor_options["resources"]["node:__internal_head__"] < 1


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"model": None}, "model: it is missing"),
        ({"executers": 2}, "did you mean executors"),
        ({"executors": "many"}, "executors: input should be a valid integer"),
        ({"executors": 4}, "max_executors: 3 is less than executors 4"),
        ({"http": "8000"}, "http cannot be given here"),
        ({"http_tls_cert": "c.pem"}, "http_tls_cert cannot be given here"),
        ({"ray_address": "127.0.0.1:6379"}, "ray_address cannot be given here"),
        ({"host": "0.0.0.0"}, "without credentials"),
        ({"unhealthy_after_s": "long"}, "unhealthy_after_s: must be a number"),
    ],
)
def test_wrong_arguments_are_refused_by_name(args: Mapping[str, Any], said: str) -> None:
    from cadenza_launcher.ray_serve.app import application

    with pytest.raises(OptionError, match=said):
        application({**SERVED, **args})
