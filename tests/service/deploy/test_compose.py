"""docker-compose.yml and the Dockerfile: what they promise, and their commands, environment and health checks run here.

Where there is an engine, test_compose_engine.py builds the images and runs the containers.
"""

from __future__ import annotations

import glob
import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cadenza import Client, SamplingParams
from executor_svc.config import ExecutorConfig
from gateway_svc.config import GatewayConfig
from scheduler_svc.config import SchedulerConfig
from tests.helpers.compose import (
    COMPOSE_FILE,
    DOCKERFILE,
    METRICS_PORT,
    ROOT,
    LocalStack,
    last_instruction,
    local_stack,
    read_compose,
    read_dockerfile,
    start_order,
)
from tests.helpers.paths import PACKAGES

CONFIGS = {"executor": ExecutorConfig, "scheduler": SchedulerConfig, "gateway": GatewayConfig}
COMPOSE = read_compose({})
SERVICES: dict[str, dict[str, Any]] = {name: each for name, each in COMPOSE["services"].items() if "build" in each}
"""Those of this project."""
WATCHERS: dict[str, dict[str, Any]] = {name: each for name, each in COMPOSE["services"].items() if "build" not in each}
"""Images of others, for --profile watch."""
PORTS = {"scheduler": 50051, "scheduler-gpu": 50051, "gateway": 8000}
"""What clients of this machine reach."""
GREEDY = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)

# Of docker-compose 1.29.2's schema (compose_spec.json): what this project may need. It refuses a file with other keys.
SERVICE_KEYS = set(
    "build cap_drop command cpus cpuset depends_on deploy environment healthcheck image init logging mem_limit "
    "networks pids_limit ports profiles read_only restart security_opt shm_size stop_grace_period stop_signal tmpfs "
    "user volumes working_dir".split()
)
BUILD_KEYS = set("args cache_from context dockerfile labels network target".split())
HEALTH_KEYS = set("disable interval retries start_period test timeout".split())
# The instructions of the classic builder that are of use here.
INSTRUCTIONS = set("ARG CMD COPY ENTRYPOINT ENV EXPOSE FROM LABEL RUN SHELL STOPSIGNAL USER VOLUME WORKDIR".split())

every_service = pytest.mark.parametrize("name", SERVICES)


# ---------------------------------------------------------------- what the files say


@every_service
def test_a_container_is_confined(name: str) -> None:
    service = SERVICES[name]
    assert service["init"] is True
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["tmpfs"] == ["/tmp"]
    assert service["restart"] == "unless-stopped"
    from_host = [mount for mount in service["volumes"] if mount.startswith((".", "/"))]
    assert from_host == ["./models/cadenza-demo:/model:ro"], "in all, for CADENZA_CONFIG=/model/…"
    # The file must not take back what the image says: its user (tested next) and its entry point.
    assert not {"user", "privileged", "cap_add", "entrypoint"} & set(service)


def test_named_volumes_are_folders_of_the_images_user() -> None:
    """Docker makes a new volume with the owner of the image's folder; where there is none, root's."""
    made = next(line for word, line in read_dockerfile()["runtime"].instructions if "install -d" in line)
    volumes = [mount.split(":") for name in SERVICES for mount in SERVICES[name]["volumes"] if mount[0] not in "./"]
    assert {folder for _, folder in volumes} <= set(made.split())
    assert [each for each in volumes if each[1] == "/data"] == [["data", "/data"], ["data-gpu", "/data"]]


@every_service
def test_an_image_runs_as_a_user_without_rights(name: str) -> None:
    user = last_instruction(read_dockerfile(), SERVICES[name]["build"]["target"], "USER")
    assert [int(part) > 0 for part in user.split(":")] == [True, True]


@every_service
def test_clients_reach_schedulers_and_gateway_alone_and_from_this_machine(name: str) -> None:
    ports = SERVICES[name].get("ports", [])
    assert len(ports) == (1 if name in PORTS else 0)
    assert "--insecure" in SERVICES[name]["command"], "so nothing may reach it from elsewhere"
    for port in ports:
        assert re.fullmatch(rf"127\.0\.0\.1:\d+:{PORTS[name]}", port)


@every_service
def test_every_option_is_there_once(name: str) -> None:
    """What `command` settles and what `environment` passes on are the options of that service, all and no others."""
    all_named = dict.fromkeys(re.findall(r"CADENZA_\w+", COMPOSE_FILE.read_text()), "set")
    service = read_compose(all_named)["services"][name]
    settled = [part.removeprefix("--") for part in service["command"] if part.startswith("--")]
    passed = [each.removeprefix("CADENZA_").lower() for each in service["environment"] if each.startswith("CADENZA_")]
    options = CONFIGS[service["build"]["target"]].model_fields
    # A client's CADENZA_TLS_CERT in the shell would name a file that is not there in the container.
    others = [each for each in options if not re.match("tls_|executor_", each)]
    assert name != "gateway" or service["environment"]["no_grpc_proxy"] == "scheduler"
    assert sorted([*(each.replace("-", "_") for each in settled), *passed]) == sorted(others)


def test_options_and_folders_come_from_the_shell() -> None:
    shell = {
        "CADENZA_MAX_NUM_SEQS": "3",
        "CADENZA_MODEL": "org/name",
        "MODEL_DIR": "/data/m",
        "SCHEDULER_PORT": "7000",
        "HTTP_HOST": "0.0.0.0",
        "CADENZA_EXECUTOR": "dns:///executor:50052",
    }
    services = read_compose(shell)["services"]
    for name in SERVICES.keys() - {"gateway"}:
        service = services[name]
        assert service["environment"]["CADENZA_MAX_NUM_SEQS"] == "3", name
        assert "/data/m:/model:ro" in service["volumes"], name
    assert services["executor"]["environment"]["CADENZA_MODEL"] == "org/name"
    assert SERVICES["executor"]["environment"] == {"CADENZA_MODEL": "/model"}
    assert services["scheduler"]["ports"] == ["127.0.0.1:7000:50051"]
    assert services["gateway"]["ports"] == ["0.0.0.0:8000:8000"]
    assert services["scheduler"]["command"][-2:] == ["--executor", "dns:///executor:50052"]
    assert SERVICES["scheduler"]["command"][-2:] == ["--executor", "executor:50052"], "one executor by default"
    assert services["scheduler-gpu"]["command"][-1] == "executor-gpu:50052"
    assert set(SERVICES["scheduler"]["environment"]) == {"no_grpc_proxy"}


def test_a_scheduler_waits_until_its_executor_is_healthy() -> None:
    for name, executor in (("scheduler", "executor"), ("scheduler-gpu", "executor-gpu")):
        assert SERVICES[name]["depends_on"] == {executor: {"condition": "service_healthy"}}
        assert f"{executor}:50052" in SERVICES[name]["command"]
        assert executor in SERVICES[name]["environment"]["no_grpc_proxy"].split(",")
    assert SERVICES["gateway"]["depends_on"] == {"scheduler": {"condition": "service_healthy"}}
    assert start_order(SERVICES) == ["executor", "scheduler", "gateway", "executor-gpu", "scheduler-gpu"]


def test_the_gpu_profile_differs_in_what_a_gpu_needs_and_no_more() -> None:
    """The CPU services have no profile, so that `docker-compose up` starts them; the others only with `gpu`."""

    def differing(service: str) -> set[str]:
        cpu, gpu = SERVICES[service], SERVICES[f"{service}-gpu"]
        return {key for key in cpu.keys() | gpu.keys() if cpu.get(key) != gpu.get(key)}

    gpu = SERVICES["executor-gpu"]
    assert differing("executor") == {"profiles", "image", "build", "command", "environment", "deploy"}
    assert differing("scheduler") == {"profiles", "command", "volumes", "ports", "depends_on"}
    assert gpu["profiles"] == SERVICES["scheduler-gpu"]["profiles"] == ["gpu"]
    assert gpu["command"] == [{"cpu": "cuda"}.get(part, part) for part in SERVICES["executor"]["command"]]
    assert gpu["build"]["args"]["TORCH_BUILD"] == gpu["build"]["args"]["TORCH_INDEX"] == ""
    (device,) = gpu["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]


def test_docker_compose_1_29_knows_every_key() -> None:
    assert {key for key in COMPOSE if not key.startswith("x-")} == {"services", "volumes"}
    for service in WATCHERS.values():
        assert set(service) <= SERVICE_KEYS
    for service in SERVICES.values():
        assert set(service) <= SERVICE_KEYS
        assert set(service["build"]) <= BUILD_KEYS
        assert set(service["healthcheck"]) <= HEALTH_KEYS
        for needed in service.get("depends_on", {}).values():
            assert set(needed) == {"condition"}


def test_the_watch_profile_scrapes_what_the_services_export_and_loads_the_dashboard() -> None:
    assert set(WATCHERS) == {"prometheus", "grafana"}
    for name, service in WATCHERS.items():
        assert service["profiles"] == ["watch"], "docker-compose up alone must not start it"
        assert re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", service["image"]), "pinned"
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        named = [mount.split(":")[0] for mount in service["volumes"] if not mount.startswith(".")]
        assert set(named) <= set(COMPOSE["volumes"]), name
    mounted = {
        target: ROOT / source
        for service in WATCHERS.values()
        for source, target, *rest in (mount.split(":") for mount in service["volumes"])
        if source.startswith(".") and rest == ["ro"]
    }
    assert all(path.exists() for path in mounted.values())
    assert f"--config.file={_place_of(mounted, 'prometheus.yml')}" in WATCHERS["prometheus"]["command"]
    config = yaml.safe_load(mounted[_place_of(mounted, "prometheus.yml")].read_text())
    rules = Path(_place_of(mounted, "prometheus.yml")).parent / config["rule_files"][0]
    assert str(rules) == _place_of(mounted, "alerts.yml")
    found = [each for job in config["scrape_configs"] for each in job["dns_sd_configs"]]
    scraped = {name: each["port"] for each in found for name in each["names"]}
    assert scraped == {**dict.fromkeys(SERVICES, int(METRICS_PORT)), "gateway": 8000}
    for name, service in SERVICES.items():
        if name == "gateway":
            continue  # at its own port
        options = service["command"]
        assert options[options.index("--metrics-port") + 1] == METRICS_PORT, name
        assert options[options.index("--metrics-host") + 1] == "0.0.0.0", name
    provisioning = {kind: mounted[f"/etc/grafana/provisioning/{kind}"] for kind in ("datasources", "dashboards")}
    (source,) = yaml.safe_load((provisioning["datasources"] / "cadenza.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((provisioning["dashboards"] / "cadenza.yml").read_text())["providers"]
    dashboard = provider["options"]["path"] + "/cadenza.json"
    assert mounted[dashboard] == ROOT / "docs" / "watch" / "dashboard.json"
    assert WATCHERS["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == dashboard


def _place_of(mounted: dict[str, Path], name: str) -> str:
    """Where a file is in its container."""
    (place,) = (place for place in mounted if place.endswith("/" + name))
    return place


# ---------------------------------------------------------------- the images


def test_the_dockerfile_is_plain() -> None:
    """The classic builder of Docker 20.10 reads it: no mounts, no heredocs, no flags of COPY but --from and --chown."""
    assert not re.search(r"^#\s*(syntax|escape)\s*=", DOCKERFILE.read_text(), re.MULTILINE | re.IGNORECASE)
    for name, stage in read_dockerfile().items():
        for instruction, rest in stage.instructions:
            assert instruction in INSTRUCTIONS, name
            flags = re.match(r"(?:--\S+\s+)*", rest)[0].split()
            assert all(flag.startswith(("--from=", "--chown=")) for flag in flags), (name, rest)
            assert instruction == "COPY" or not flags, (name, rest)
            assert "<<" not in rest, (name, rest)


def test_stages_are_built_from_stages_above_them() -> None:
    """The classic builder runs a file from its top to the target, so the scheduler is built without torch."""
    stages = read_dockerfile()
    seen: list[str] = []
    for name, stage in stages.items():
        sources = re.findall(r"--from=(\S+)", "\n".join(rest for _, rest in stage.instructions))
        assert stage.parent in seen or stage.parent == "${PYTHON_IMAGE}", name
        assert set(sources) <= set(seen), name
        seen.append(name)
    above = "\n".join(rest for name in seen[: seen.index("scheduler")] for _, rest in stages[name].instructions)
    assert "TORCH" not in above
    assert {service["build"]["target"] for service in SERVICES.values()} == set(CONFIGS) <= set(stages)


def test_what_is_copied_is_in_the_context_and_in_a_fresh_clone() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {
        source.rstrip("/")
        for stage in read_dockerfile().values()
        for instruction, rest in stage.instructions
        if instruction == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    }
    assert copied == {"LICENSE", "README.md", "constraints.txt", "pyproject.toml", "wheels", "client"} | (
        set(PACKAGES) - {"cadenza"}
    )
    assert copied == {name for pattern in allowed for name in (glob.glob(pattern, root_dir=ROOT))}
    for source in copied - {"wheels"}:
        assert (ROOT / source).exists(), source
    assert _git_ignores("wheels/any.whl")
    assert not _git_ignores("wheels/README.md"), "without it the folder is missing in a clone, and COPY fails"
    assert (ROOT / "wheels" / "README.md").is_file()


def test_constraints_pin_the_torch_that_the_dockerfile_installs() -> None:
    pins = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert len(pins) == 1
    assert "+" not in pins[0], "TORCH_BUILD is appended to it"


TRITON_OF = {"2.11.0": "3.6.0", "2.13.0": "3.7.1"}
"""What PyTorch's builds for CUDA require, by their own metadata."""


def test_builds_for_cuda_require_the_triton_of_the_constraints() -> None:
    """pip finds no way otherwise; and launches are repeated with that version alone."""
    (triton,) = re.findall(r"^triton==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    found = {
        name: re.findall(rf"^{pattern}(\S+)$", (ROOT / name).read_text(), re.MULTILINE)
        for name, pattern in (("Makefile", "CUDA_TORCH := "), ("Dockerfile", "ARG CUDA_TORCH="))
    }
    assert found["Makefile"] == found["Dockerfile"]
    (torch,) = found["Makefile"]
    assert TRITON_OF[torch] == triton


def _git_ignores(path: str) -> bool:
    answer = subprocess.run(["git", "check-ignore", "-q", "--no-index", path], cwd=ROOT, check=False)
    assert answer.returncode in (0, 1), "git check-ignore failed"
    return answer.returncode == 0


# ---------------------------------------------------------------- commands, environment, health checks as processes


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[LocalStack]:
    """What `CADENZA_MAX_NUM_SEQS=5 docker-compose up` starts, each service healthy."""
    with local_stack(tmp_path, {"CADENZA_MAX_NUM_SEQS": "5", "CADENZA_NUM_GPU_BLOCKS": "700"}) as running:
        yield running


@pytest.mark.slow
def test_up_answers_survives_a_killed_executor_and_stops_at_once(stack: LocalStack) -> None:
    check_answers(stack)
    check_a_killed_executor_is_seen_and_its_restart_loses_nothing(stack)
    for name in reversed(start_order(stack.services)):
        assert stack.stop(name) == 0, stack.log(name)
        assert stack.check(name).returncode == 1


def check_answers(stack: LocalStack) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "cadenza", "generate", "--target", stack.address(50051), "What is 27 + 48?"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip()
    with Client(stack.address(50051)) as client:
        info = client.server_info()
    assert info.options["max_num_seqs"] == "5", "the scheduler's environment"
    assert info.load.num_device_blocks == 700, "the executor's environment"
    urls = {name: f"http://{stack.host}:{stack.metrics_port(name)}" for name in stack.services}
    urls["gateway"] = f"http://{stack.address(8000)}"
    for name, url in urls.items():
        with urllib.request.urlopen(f"{url}/metrics") as response:
            assert b"cadenza_event_loop_lag_seconds_count" in response.read(), name
    body = json.dumps({"messages": [{"role": "user", "content": "What is 27 + 48?"}], "max_tokens": 30}).encode()
    asked = urllib.request.Request(f"{urls['gateway']}/v1/chat/completions", body)
    with urllib.request.urlopen(asked) as response:
        assert json.load(response)["choices"][0]["message"]["content"]


def check_a_killed_executor_is_seen_and_its_restart_loses_nothing(stack: LocalStack) -> None:
    with Client(stack.address(50051)) as client:
        expected = client.generate(["Tell me a story."], GREEDY)[0].outputs[0].token_ids
        stream = client.stream("Tell me a story.", GREEDY)
        tokens = list(next(stream).outputs[0].token_ids)
        stack.processes["executor"].send_signal(signal.SIGKILL)
        stack.processes["executor"].wait()
        assert stack.check("executor").returncode == 1
        check = stack.check("scheduler")
        assert (check.returncode, check.stderr.split(": ")[-1].strip()) == (1, "no executor takes requests")
        stack.start("executor")
        for delta in stream:
            tokens += delta.outputs[0].token_ids
        assert tokens == expected
    stack.wait_healthy("scheduler")
