"""k8s://NAMESPACE/SERVICE: endpoints by an API server over TLS, and what the list of executors makes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scheduler_svc.executors import kubernetes
from scheduler_svc.executors.addresses import ServiceName, executor_entries
from scheduler_svc.executors.discovery import RESOLVE_S, Discovery
from scheduler_svc.executors.kubernetes import Endpoints, KubernetesApi, ready_endpoints
from tests.helpers.certificates import certificates
from tests.helpers.kubernetes_api import FakeKubernetes, endpoint_slice, kubernetes_api
from tests.scheduler_svc.executors.test_discovery import FakeExecutors, settle

SERVICE = ServiceName("cadenza", "cadenza-executor")
ENTRY = "k8s://cadenza/cadenza-executor"


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKubernetes]:
    monkeypatch.setattr(kubernetes, "_SETTLE_S", 0.01)
    with kubernetes_api(tmp_path) as running:
        yield running


async def eventually(condition: Callable[[], object]) -> None:
    """Return once it is true; other threads bring it about."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    assert condition()


# ---------------------------------------------------------------- what slices say


def test_ready_endpoints_of_all_slices_are_addresses() -> None:
    unknown = {"addresses": ["10.0.0.3"], "conditions": {}}
    leaving = {"addresses": ["10.0.0.4"], "conditions": {"ready": False, "serving": True, "terminating": True}}
    slices = [
        endpoint_slice([unknown, leaving]),
        endpoint_slice([{"addresses": ["10.0.0.1"]}]),
        {"addressType": "IPv4", "endpoints": None, "ports": None},
        endpoint_slice([{"addresses": ["fd00::1"]}], family="IPv6"),
    ]
    found = ready_endpoints({"metadata": {"resourceVersion": "7"}, "items": slices})
    assert found == Endpoints(("10.0.0.1:50052", "10.0.0.3:50052"), "7"), "IPv4 alone: IPv6 leads to the same pods"
    found = ready_endpoints({"metadata": {"resourceVersion": "8"}, "items": slices[3:]})
    assert found == Endpoints(("[fd00::1]:50052",), "8")


def test_the_port_is_that_named_grpc_or_the_only_one() -> None:
    def addresses(*ports: dict[str, object]) -> tuple[str, ...]:
        items = [{"addressType": "IPv4", "endpoints": [{"addresses": ["10.0.0.1"]}], "ports": list(ports)}]
        return ready_endpoints({"metadata": {"resourceVersion": "1"}, "items": items}).addresses

    assert addresses({"name": "web", "port": 1}, {"name": "grpc", "port": 2}) == ("10.0.0.1:2",)
    assert addresses({"name": "web", "port": 1}) == ("10.0.0.1:1",)
    with pytest.raises(ValueError, match=r"the service has the ports admin, web; that of the executors must be grpc"):
        addresses({"name": "web", "port": 1}, {"name": "admin", "port": 2})


@pytest.mark.parametrize("wrong", [{}, {"items": [{}], "metadata": {}}, {"items": 5, "metadata": {}}])
def test_what_is_no_list_of_slices_is_an_error(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"it is no list of slices"):
        ready_endpoints(wrong)


# ---------------------------------------------------------------- the API server


async def test_a_watch_returns_when_something_changes(api: FakeKubernetes) -> None:
    api.publish({"10.0.0.1": True, "10.0.0.2": False, "10.0.0.3": True})
    first = await api.cluster.endpoints(SERVICE, "")
    assert first.addresses == ("10.0.0.1:50052", "10.0.0.3:50052")
    watching = asyncio.create_task(api.cluster.endpoints(SERVICE, first.version))
    await eventually(lambda: "watch" in api.seen[-1])
    assert not watching.done()
    api.publish({"10.0.0.1": True, "10.0.0.2": True})
    assert (await watching).addresses == ("10.0.0.1:50052", "10.0.0.2:50052")
    assert api.seen[1]["resourceVersion"] == first.version


async def test_a_version_that_the_server_has_forgotten_is_listed_anew(api: FakeKubernetes) -> None:
    api.publish({"10.0.0.1": True})
    api.oldest = 100
    assert (await api.cluster.endpoints(SERVICE, "1")).addresses == ("10.0.0.1:50052",)


async def test_the_token_is_read_anew(api: FakeKubernetes) -> None:
    api.publish({"10.0.0.1": True})
    await api.cluster.endpoints(SERVICE, "")
    api.set_token("second")
    assert (await api.cluster.endpoints(SERVICE, "")).addresses


async def test_errors_say_what_is_wrong(api: FakeKubernetes, tmp_path: Path) -> None:
    api.refusal = (403, 'endpointslices is forbidden: User "cadenza" cannot list resource')
    with pytest.raises(OSError, match=r"the API server says 403 Forbidden: endpointslices is forbidden"):
        await api.cluster.endpoints(SERVICE, "")
    api.refusal, api.raw = None, b"[]"
    with pytest.raises(OSError, match=r"answer cannot be read: it is no list of slices"):
        await api.cluster.endpoints(SERVICE, "")
    api.raw = None
    with pytest.raises(OSError, match=r"404 Not Found"):
        await api.cluster.endpoints(ServiceName("other", "cadenza-executor"), "")
    of_another_ca = tmp_path / "other"
    of_another_ca.mkdir()
    (of_another_ca / "ca.crt").write_bytes((certificates(tmp_path / "certs").folder / "ca" / "ca.pem").read_bytes())
    (of_another_ca / "token").write_text(api.token)
    with pytest.raises(OSError, match=r"certificate verify failed"):
        await KubernetesApi("localhost", api.port, of_another_ca).endpoints(SERVICE, "")
    with pytest.raises(OSError, match=r"missing/ca.crt is missing: this is no pod"):
        await KubernetesApi("localhost", api.port, tmp_path / "missing").endpoints(SERVICE, "")
    api.token = "another"
    with pytest.raises(OSError, match=r"401 Unauthorized"):
        await api.cluster.endpoints(SERVICE, "")


# ---------------------------------------------------------------- the list of executors


async def test_executors_come_and_go_with_the_endpoints(api: FakeKubernetes, caplog: pytest.LogCaptureFixture) -> None:
    """A problem, and a service of which nothing is ready, change nothing; the log says so once."""
    executors = FakeExecutors()
    asked: list[float] = []
    goes_on = asyncio.Event()

    async def sleep(seconds: float) -> None:
        asked.append(seconds)
        await goes_on.wait()
        goes_on.clear()

    api.publish({"10.0.0.1": True, "10.0.0.2": False})
    discovery = Discovery(executors, executor_entries([ENTRY]), watch=api.cluster.endpoints, sleep=sleep)
    discovery.start()
    await eventually(lambda: executors.targets == ["10.0.0.1:50052"])
    api.publish({"10.0.0.1": True, "10.0.0.2": True})
    await eventually(lambda: executors.targets == ["10.0.0.1:50052", "10.0.0.2:50052"])
    api.publish({"10.0.0.1": False, "10.0.0.2": True})
    await eventually(lambda: executors.targets == ["10.0.0.2:50052"])
    api.publish({"10.0.0.2": False})
    await eventually(lambda: "it has no endpoint that is ready" in caplog.text)
    api.refusal = (500, "etcd is away")
    api.publish({"10.0.0.3": True})
    await eventually(lambda: asked == [RESOLVE_S])
    assert executors.targets == ["10.0.0.2:50052"]
    api.refusal = None
    goes_on.set()
    await eventually(lambda: executors.targets == ["10.0.0.3:50052"])
    assert [record.message.partition(": it ")[2] for record in caplog.records] == [
        "has no endpoint that is ready; the executors stay as they are",
        "cannot be read: the API server says 500 Internal Server Error: etcd is away; the executors stay as they are",
    ]
    await discovery.stop()
    await settle()


async def test_a_service_stands_beside_addresses_and_is_followed_after_a_reload(api: FakeKubernetes) -> None:
    executors = FakeExecutors()
    api.publish({"10.0.0.1": True})
    discovery = Discovery(executors, executor_entries(["a:1"]), watch=api.cluster.endpoints)
    discovery.start()
    discovery.reload(executor_entries(["a:1", ENTRY]))
    await eventually(lambda: executors.targets == ["a:1", "10.0.0.1:50052"])
    discovery.reload(executor_entries(["a:1"]))
    await eventually(lambda: executors.targets == ["a:1"])
    await discovery.stop()


@pytest.mark.parametrize(
    "entry", ["k8s://", "k8s://a", "k8s:///a", "k8s://a/b/c", "k8s://A/b", "k8s://a/b?x=1", "k8s://a/-"]
)
def test_an_entry_that_names_no_service_is_refused(entry: str) -> None:
    with pytest.raises(ValueError, match=r"it must be k8s://NAMESPACE/SERVICE"):
        executor_entries([entry])


def test_a_service_is_a_list_that_changes() -> None:
    entries = executor_entries([ENTRY, "a:1"])
    assert entries.services == (SERVICE,)
    assert str(SERVICE) == ENTRY
