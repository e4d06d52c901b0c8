"""The manifests in deploy/: options, and what refers to what. test_kubernetes_rollouts.py runs them."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from cadenza_common.settings.service import ServiceSettings, read_config
from executor_svc.config import ExecutorConfig
from executor_svc.ranks.connected import difference, introduction
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.executors.addresses import ExecutorEntries, executor_entries
from scheduler_svc.metrics.definitions import DEFINITIONS
from tests.helpers.compose import last_instruction, read_dockerfile
from tests.helpers.manifest_schemas import validate
from tests.helpers.manifests import (
    KUBECTL,
    OVERLAYS,
    Manifest,
    PodTemplate,
    build,
    environment_of,
    matches,
    named,
    needs_kubectl,
    of_kind,
    pod_templates,
    worker_template,
)
from tests.helpers.paths import ROOT

pytestmark = needs_kubectl
CONFIGS: dict[str, type[ServiceSettings]] = {"scheduler": SchedulerConfig, "executor": ExecutorConfig}
PODS = {(overlay, pod.name): pod for overlay in OVERLAYS for pod in pod_templates(overlay)} if KUBECTL else {}
every_overlay = pytest.mark.parametrize("overlay", OVERLAYS)
every_pod = pytest.mark.parametrize(("overlay", "name"), PODS)


def options_of(overlay: str, pod: PodTemplate, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The pod's options as its service reads them; every variable of the maps must be one."""
    environment = environment_of(overlay, pod)
    for name in [name for name in os.environ if name.startswith("CADENZA_")]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    config = CONFIGS[pod.party]
    problems: list[str] = []
    made = read_config(config, pod.container["args"], problems.append)
    assert made is not None, problems
    known = {f"CADENZA_{field.upper()}" for field in config.model_fields}
    assert {name for name in environment if name.startswith("CADENZA_")} <= known
    return made


def own_entries(config: SchedulerConfig) -> ExecutorEntries:
    return executor_entries(config.executor)


# ---------------------------------------------------------------- options


@every_pod
def test_options_are_those_of_the_service(overlay: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pod = PODS[overlay, name]
    config = options_of(overlay, pod, monkeypatch)
    ports = {port["name"]: port["containerPort"] for port in pod.container["ports"]}
    assert config.listen == f"0.0.0.0:{ports['grpc']}"
    assert config.metrics_port == ports["metrics"]
    assert config.insecure is (not of_kind(overlay, "Certificate"))


@every_pod
def test_a_pod_has_time_to_drain(overlay: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pod = PODS[overlay, name]
    before = pod.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    config = options_of(overlay, pod, monkeypatch)
    assert pod.spec["terminationGracePeriodSeconds"] >= before + config.drain_timeout_s + 5


@every_overlay
def test_a_rollout_may_last_as_long_as_a_model_loads(overlay: str) -> None:
    """Half an hour; the scheduler is not ready before an executor is."""
    pods = pod_templates(overlay)
    starts = [pod.container["startupProbe"] for pod in pods if pod.party == "executor"]
    assert {probe["periodSeconds"] * probe["failureThreshold"] for probe in starts} == {1800}
    for pod in pods:
        if pod.owner["kind"] == "Deployment":
            spec = pod.owner["spec"]
            assert spec["progressDeadlineSeconds"] > 1800 + spec.get("minReadySeconds", 0)


@every_overlay
def test_executors_are_found_where_their_service_is(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By DNS, or by EndpointSlices, which the scheduler's account may then list and watch, and no other may."""
    schedulers = [pod for pod in pod_templates(overlay) if pod.party == "scheduler"]
    for pod in schedulers:
        entries = own_entries(options_of(overlay, pod, monkeypatch))
        assert not entries.addresses
        targets = [*(host for host, _ in entries.names), *(service.name for service in entries.services)]
        (target,) = targets
        service = named(overlay, "Service", target)
        assert service["spec"]["clusterIP"] == "None"
        ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
        assert all(port == ports["grpc"] for _, port in entries.names)
        found = [each for each in pod_templates(overlay) if service["spec"]["selector"].items() <= each.labels.items()]
        assert [each.party for each in found] == ["executor"]
        assert all(each.namespace == service["metadata"]["namespace"] for each in entries.services)
        assert pod.spec["automountServiceAccountToken"] is bool(entries.services)
        accounts = [each["name"] for binding in of_kind(overlay, "RoleBinding") for each in binding["subjects"]]
        assert accounts == ([pod.spec["serviceAccountName"]] if entries.services else [])
    for role in of_kind(overlay, "Role"):
        (rule,) = role["rules"]
        assert rule == {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
    assert len(schedulers) == (2 if overlay == "pool" else 1)


@every_overlay
def test_certificates_have_the_names_that_the_parties_ask_for(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    certificates = {each["spec"]["secretName"]: each["spec"] for each in of_kind(overlay, "Certificate")}
    pods = pod_templates(overlay)
    for pod in pods if certificates else []:
        (secret,) = (volume["secret"]["secretName"] for volume in pod.spec["volumes"] if "secret" in volume)
        names, config = certificates[secret]["dnsNames"], options_of(overlay, pod, monkeypatch)
        assert {"server auth", "client auth"} <= set(certificates[secret]["usages"])
        for probe in ("readinessProbe", "startupProbe"):
            command = pod.container[probe].get("exec", {}).get("command")
            assert command is None or command[command.index("--tls-server-name") + 1] in names
        assert "exec" in pod.container["readinessProbe"], "Kubernetes' own gRPC probe speaks no TLS"
        of_others = [options_of(overlay, each, monkeypatch) for each in pods if each.party != pod.party]
        asked = {"scheduler": "tls_scheduler_name", "executor": "executor_server_name"}[pod.party]
        assert all(getattr(each, asked) in names for each in of_others)
        assert config.tls_client_ca
    services = [each["metadata"]["name"] for each in of_kind(overlay, "Service")]
    if certificates:
        assert certificates["cadenza-scheduler-tls"]["dnsNames"][0] in services


# ---------------------------------------------------------------- what refers to what


@every_pod
def test_a_pod_is_confined(overlay: str, name: str) -> None:
    spec, container = PODS[overlay, name].spec, PODS[overlay, name].container
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    target = container["image"].partition(":")[0].removeprefix("cadenza-")
    user, group = last_instruction(read_dockerfile(), target, "USER").split(":")
    assert (spec["securityContext"]["runAsUser"], spec["securityContext"]["fsGroup"]) == (int(user), int(group))
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["resources"]["limits"]["memory"]


@every_pod
def test_volumes_paths_and_accounts_are_there(overlay: str, name: str) -> None:
    pod = PODS[overlay, name]
    volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
    mounts = pod.container["volumeMounts"]
    assert {mount["name"] for mount in mounts} == set(volumes)
    named(overlay, "ServiceAccount", pod.spec["serviceAccountName"])
    secrets = {each["spec"]["secretName"] for each in of_kind(overlay, "Certificate")}
    for volume in volumes.values():
        if "persistentVolumeClaim" in volume:
            named(overlay, "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"])
        assert "secret" not in volume or volume["secret"]["secretName"] in secrets
    values = [*environment_of(overlay, pod).values(), *(each.partition("=")[2] for each in pod.container["args"])]
    paths = [value for value in values if value.startswith("/")]
    places = tuple(mount["mountPath"] + "/" for mount in mounts)
    assert paths
    assert all(path.startswith(places) for path in paths)


@every_overlay
def test_services_budgets_monitors_and_scalers_select_what_is_there(overlay: str) -> None:
    pods = pod_templates(overlay)
    for service in of_kind(overlay, "Service"):
        selected = [pod for pod in pods if service["spec"]["selector"].items() <= pod.labels.items()]
        assert len(selected) == 1
        assert {port["targetPort"] for port in service["spec"]["ports"]} == {
            port["name"] for port in selected[0].container["ports"]
        }
    budgets = of_kind(overlay, "PodDisruptionBudget")
    for pod in pods:
        assert sum(matches(budget["spec"]["selector"], pod.labels) for budget in budgets) == 1
    for monitor in of_kind(overlay, "ServiceMonitor"):
        chosen = [
            s for s in of_kind(overlay, "Service") if matches(monitor["spec"]["selector"], s["metadata"]["labels"])
        ]
        assert len(chosen) == 2
        for endpoint in monitor["spec"]["endpoints"]:
            assert all(endpoint["port"] in {port["name"] for port in s["spec"]["ports"]} for s in chosen)
    for scaler in of_kind(overlay, "ScaledObject"):
        target = scaler["spec"]["scaleTargetRef"]
        owner = named(overlay, target["kind"], target["name"])
        assert owner["apiVersion"] == target["apiVersion"]
        assert "replicas" not in owner["spec"], "applying the manifests would undo the scaler's work"
        (trigger,) = scaler["spec"]["triggers"]
        metrics = set(re.findall(r"[\w:]+(?=\{)", trigger["metadata"]["query"]))
        assert metrics == {"vllm:num_requests_running", "vllm:num_requests_waiting"}
        assert metrics <= {definition.name for definition in DEFINITIONS}
    for pool in of_kind(overlay, "InferencePool"):
        chosen_pods = [pod for pod in pods if matches(pool["spec"]["selector"], pod.labels)]
        assert [pod.party for pod in chosen_pods] == ["scheduler", "scheduler"]
        (port,) = pool["spec"]["targetPorts"]
        assert all(pod.container["ports"][0]["containerPort"] == port["number"] for pod in chosen_pods)


@pytest.mark.parametrize(
    ("component", "kind", "name"),
    [("deployment", "Deployment", "cadenza-executor"), ("group", "LeaderWorkerSet", "cadenza-group")],
)
def test_the_hpa_scales_as_keda_does(component: str, kind: str, name: str, tmp_path: Path) -> None:
    """No overlay has it: a component in place of keda."""
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    overlay = tmp_path / "deploy" / "overlays" / "hpa"
    overlay.mkdir()
    content: Manifest = {
        "namespace": "cadenza",
        "resources": ["../../shared", "../../base"],
        "components": [f"../../components/{each}" for each in (component, "hpa")],
    }
    if component == "group":
        (patch,) = (
            each
            for each in yaml.safe_load((overlay.parent / "ranks" / "kustomization.yaml").read_text())["patches"]
            if each["target"]["kind"] == "ScaledObject"
        )
        content["patches"] = [{**patch, "target": {**patch["target"], "kind": "HorizontalPodAutoscaler"}}]
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(content))
    made = {(each["kind"], each["metadata"]["name"]): each for each in build(overlay)}
    scaler, owner = made["HorizontalPodAutoscaler", "cadenza-executor"], made[kind, name]
    validate(scaler)
    target = scaler["spec"]["scaleTargetRef"]
    assert target == {"apiVersion": owner["apiVersion"], "kind": kind, "name": name}
    assert "replicas" not in owner["spec"], "applying the manifests would undo the scaler's work"
    (keda,) = of_kind("ranks", "ScaledObject")
    assert scaler["spec"]["behavior"] == keda["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    (metric,) = scaler["spec"]["metrics"]
    assert metric["external"]["target"]["averageValue"] == keda["spec"]["triggers"][0]["metadata"]["threshold"]


def test_one_scheduler_at_a_time_has_a_journal() -> None:
    for (overlay, name), pod in PODS.items():
        if pod.party == "scheduler":
            owner = named(overlay, "Deployment", name)["spec"]
            assert (owner["replicas"], owner["strategy"]) == (1, {"type": "Recreate"})
    claims = [
        volume["persistentVolumeClaim"]["claimName"]
        for pod in pod_templates("pool")
        for volume in pod.spec["volumes"]
        if volume["name"] == "journal"
    ]
    assert sorted(claims) == ["cadenza-journal-a", "cadenza-journal-b"]


def test_executors_of_groups_are_those_of_deployments() -> None:
    deployed, grouped = PODS["gpu", "cadenza-executor"].spec, PODS["ranks", "cadenza-group"].spec

    def common(spec: Manifest) -> Manifest:
        (container,) = spec["containers"]
        left_out = {"resources", "image", "env", "envFrom"}
        kept = {key: value for key, value in container.items() if key not in left_out}
        return {**spec, "tolerations": None, "containers": [kept]}

    assert common(deployed) == common(grouped)


def test_the_other_ranks_of_a_group_are_as_their_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same pod, but for what serves the scheduler; and the options that ranks compare are the same."""
    leader, worker = PODS["ranks", "cadenza-group"], worker_template("ranks")
    assert worker is not None
    served = {"args", "ports", "startupProbe", "readinessProbe", "livenessProbe"}
    alike = {key: value for key, value in leader.container.items() if key not in served}
    assert worker.spec == {**leader.spec, "containers": [alike]}
    first, other = (
        options_of("ranks", replace(pod, spec={**pod.spec, "containers": [{"args": [], **pod.container}]}), monkeypatch)
        for pod in (leader, worker)
    )
    assert difference(introduction(first, 4), introduction(other, 4)) is None
    assert first.distributed_executor_backend == "external"
    assert (first.tls_cert, first.tls_client_ca) == (other.tls_cert, other.tls_client_ca) != (None, None)
    assert first.tensor_parallel_size == 1  # by the group's size
    (budget,) = (
        each for each in of_kind("ranks", "PodDisruptionBudget") if matches(each["spec"]["selector"], leader.labels)
    )
    assert matches(budget["spec"]["selector"], worker.labels), "a group ends with any of its pods"


# ---------------------------------------------------------------- network policies


def admits(
    overlay: str, pod: PodTemplate, direction: str, peer: dict[str, str] | None, port: int, **namespace: str
) -> bool:
    """Whether the policies of an overlay let this connection pass, at one of its ends; the peer's labels, or none."""
    policies = [
        each["spec"]
        for each in of_kind(overlay, "NetworkPolicy")
        if direction in each["spec"]["policyTypes"] and matches(each["spec"]["podSelector"], pod.labels)
    ]
    assert policies, "without a policy everything is let in"
    place = "from" if direction == "Ingress" else "to"
    rules = [rule for policy in policies for rule in policy.get(direction.lower(), [])]
    return any(
        port in {each["port"] for each in rule["ports"]}
        and (place not in rule or any(_is_peer(each, peer, namespace) for each in rule[place]))
        for rule in rules
    )


def _is_peer(rule: Manifest, peer: dict[str, str] | None, namespace: dict[str, str]) -> bool:
    if "namespaceSelector" in rule:
        assert "podSelector" not in rule
        return matches(rule["namespaceSelector"], {key.replace("__", "/"): value for key, value in namespace.items()})
    return peer is not None and not namespace and matches(rule["podSelector"], peer)


@every_overlay
def test_a_scheduler_reaches_its_own_executors_alone_and_clients_reach_schedulers(overlay: str) -> None:
    pods = pod_templates(overlay)
    client = {"cadenza.dev/client": "true"}
    for pod in pods:
        for other in pods:
            is_own = pod.labels.get("cadenza.dev/cell") == other.labels.get("cadenza.dev/cell")
            may = pod.party == "executor" and other.party == "scheduler" and is_own
            assert admits(overlay, pod, "Ingress", other.labels, 50052) is may
            assert admits(overlay, other, "Egress", pod.labels, 50052) is may
            assert not admits(overlay, pod, "Ingress", other.labels, 50051)
        is_scheduler = pod.party == "scheduler"
        assert admits(overlay, pod, "Ingress", client, 50051) is is_scheduler
        assert admits(overlay, pod, "Ingress", None, 50051, **{"cadenza.dev/client": "true"}) is is_scheduler
        assert not admits(overlay, pod, "Ingress", {"app": "any"}, 50051)
        assert not admits(overlay, pod, "Ingress", {"app": "any"}, 9464)
        scrapers = {"kubernetes.io/metadata.name": "monitoring"}
        assert admits(overlay, pod, "Ingress", None, 9464, **scrapers)
        assert not admits(overlay, pod, "Ingress", None, 50051, **scrapers)
        assert admits(overlay, pod, "Egress", None, 53, **{"kubernetes.io/metadata.name": "kube-system"})
        watches = is_scheduler and bool(of_kind(overlay, "Role"))
        assert admits(overlay, pod, "Egress", None, 443, place="outside") is watches


def test_ranks_reach_their_leader_alone() -> None:
    leader, worker = PODS["ranks", "cadenza-group"], worker_template("ranks")
    assert worker is not None
    assert admits("ranks", leader, "Ingress", worker.labels, 50053)
    assert admits("ranks", worker, "Egress", leader.labels, 50053)
    for pod in pod_templates("ranks"):
        assert not admits("ranks", worker, "Ingress", pod.labels, 50053)
        assert not admits("ranks", worker, "Ingress", pod.labels, 50052)
        assert not admits("ranks", leader, "Ingress", pod.labels, 50053)
    assert not admits("ranks", worker, "Egress", leader.labels, 50052)
    assert not admits("ranks", leader, "Ingress", worker.labels, 50052)
