"""The manifests of deploy/overlays/ray-service, by Ray Serve's own schema and our own options."""

from __future__ import annotations

import importlib.util
from copy import deepcopy
from typing import Any

import pytest
import yaml

from cadenza_launcher.services.options import route_options
from tests.helpers.manifests import (
    RAY,
    RAY_SERVICE,
    admits,
    container_of,
    named,
    needs_kubectl,
    ray_cluster,
    ray_groups,
)

pytestmark = needs_kubectl
needs_serve = pytest.mark.skipif(
    importlib.util.find_spec("starlette") is None, reason="Ray Serve is not installed: the extra ray-serve"
)


def spec() -> dict[str, Any]:
    return named(RAY_SERVICE, "RayService", "cadenza")["spec"]


def serve_config() -> dict[str, Any]:
    return yaml.safe_load(spec()["serveConfigV2"])


def application() -> dict[str, Any]:
    (only,) = serve_config()["applications"]
    return only


def head_ports() -> dict[str, int]:
    return {each["name"]: each["containerPort"] for each in container_of(ray_groups(RAY_SERVICE)["head"])["ports"]}


def wrong_names(model: Any, schema: Any, at: str = "") -> list[str]:
    """Keys that are no fields of a pydantic model, which ignores them."""
    if isinstance(schema, list):
        return [name for index, each in enumerate(schema) for name in wrong_names(model[index], each, f"{at}[{index}]")]
    if not isinstance(schema, dict) or not hasattr(type(model), "model_fields"):
        return []
    fields = type(model).model_fields
    wrong = [f"{at}.{name}" for name in schema if name not in fields]
    known = [name for name in schema if name in fields]
    return wrong + [each for name in known for each in wrong_names(getattr(model, name), schema[name], f"{at}.{name}")]


@needs_serve
@pytest.mark.slow
def test_the_configuration_is_one_of_ray_serve() -> None:
    """Serve ignores keys that it does not know: here each is one of its own, and the deployment is ours."""
    from ray.serve.schema import ServeDeploySchema

    from cadenza_launcher.ray_serve import app

    config = serve_config()
    assert wrong_names(ServeDeploySchema.model_validate(config), config) == []
    misspelled = {**config, "http_options": {"prt": 8000}}
    assert wrong_names(ServeDeploySchema.model_validate(misspelled), misspelled) == [".http_options.prt"]
    assert application()["import_path"] == f"{app.__name__}:{app.application.__name__}"
    assert [each["name"] for each in application()["deployments"]] == [app.deployment.name]
    app.application(application()["args"])


def test_options_are_those_of_cadenza_up_and_fit_the_workers() -> None:
    """There is room for as many executors as there may be, of which each has a worker's processors."""
    given = dict(application()["args"])
    places = {name: given.pop(name) for name in ("model", "host", "port")}
    arguments = route_options(places["model"], {**given, "distributed_executor_backend": "ray"}, environment={})
    workers, head = ray_groups(RAY_SERVICE)["executors"], container_of(ray_groups(RAY_SERVICE)["head"])
    assert arguments.values["max_executors"] == workers["replicas"] == workers["maxReplicas"]
    assert arguments.values["num_threads"] == int(container_of(workers)["resources"]["limits"]["cpu"])
    assert places["model"].startswith("/models/")
    assert any(given["journal"].startswith(f"{mount['mountPath']}/") for mount in head["volumeMounts"])


def test_ports_are_those_of_the_head() -> None:
    """The service is by the port's name: workers, which have no proxy, must not have a port of that name."""
    ports, args = head_ports(), application()["args"]
    assert (ports["grpc"], ports["metrics"]) == (args["port"], args["metrics_port"])
    assert ports["serve"] == serve_config()["http_options"]["port"]
    (port,) = spec()["serveService"]["spec"]["ports"]
    assert port == {"name": "serve", "port": ports["serve"], "targetPort": "serve"}
    assert "serve" not in {each["name"] for each in container_of(ray_groups(RAY_SERVICE)["executors"])["ports"]}
    assert {spec()["serveService"]["metadata"]["name"]} == {name.partition(".")[0] for name in args["page_host"]}


def test_clients_reach_the_proxy_and_the_operator_the_dashboard() -> None:
    head, worker = (each["template"]["metadata"]["labels"] for each in ray_groups(RAY_SERVICE).values())
    client, operator = {"cadenza.dev/client": "true"}, {"app.kubernetes.io/component": "kuberay-operator"}
    assert admits(RAY_SERVICE, head, client, head_ports()["serve"])
    for port in ("serve", "dashboard"):
        assert admits(RAY_SERVICE, head, operator, head_ports()[port])
    for port in (6379, 6380, 50051):
        assert not admits(RAY_SERVICE, head, operator, port)
        assert not admits(RAY_SERVICE, worker, operator, port)


def test_the_cluster_is_that_of_the_overlay_ray_but_for_the_head() -> None:
    """KubeRay submits the application once the head is ready, so readiness must not wait for the application."""
    workers, others = (deepcopy(ray_cluster(overlay)["workerGroupSpecs"]) for overlay in (RAY_SERVICE, RAY))
    for group in (*workers, *others):
        del container_of(group)["image"]
    assert workers == others
    head = container_of(ray_groups(RAY_SERVICE)["head"])
    assert not {"startupProbe", "readinessProbe", "livenessProbe"} & set(head)
