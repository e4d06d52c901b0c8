"""Both links over TLS, with certificates made as `cadenza certs` makes them: who is refused, how, and rotation."""

from __future__ import annotations

import asyncio
import datetime
import logging
import re
import shutil
import ssl
import time
import urllib.request
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cadenza import LLM, AsyncClient, Client, OptionError, SamplingParams, UnavailableError
from cadenza.healthcheck import check
from cadenza.v1 import execution_pb2 as pb
from cadenza.v1 import execution_pb2_grpc, generation_pb2
from cadenza_common.metrics.common import LISTENER_DEFINITIONS, add_expiries
from cadenza_common.metrics.families import Scrape
from cadenza_common.wire.tls import TLS
from cadenza_common.wire.tls.files import PemFile, first_expiries
from cadenza_common.wire.transport import aio_channel, bind
from scheduler_svc.app import Service
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.executors.client import GrpcExecutor
from scheduler_svc.links import executor_files, front_files
from scheduler_svc.plan_loop.ports import ExecutorLostError
from tests.helpers.certificates import Certificates, certificates
from tests.helpers.service_process import service_process
from tests.helpers.services import executor_service, scheduler_service

LONG = SamplingParams(max_tokens=400, ignore_eos=True, detokenize=False)


@pytest.fixture
def certs(tmp_path) -> Certificates:
    return certificates(tmp_path / "certs")


def executor(certs: Certificates, **options):
    return executor_service("", simulate="instant", **certs.listener("executor"), **options)


def scheduler(certs: Certificates, address: str, **options):
    tls = certs.of("client")
    return scheduler_service(
        address, tls=tls, skip_tokenizer_init=True, **certs.listener("scheduler"), **certs.executor_link(), **options
    )


async def failure(target: str, tls) -> str:
    async with AsyncClient(target, tls=tls) as client:
        with pytest.raises(UnavailableError) as caught:
            await client.model_info()
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    return caught.value.message


async def test_clients_without_the_right_certificate_are_refused_and_told_why(certs, tmp_path) -> None:
    other, old = certificates(tmp_path / "other"), Certificates(tmp_path / "old")
    shutil.copytree(certs.folder, old.folder)
    old.renew(days=-1)  # by the same CA
    async with executor(certs) as address, scheduler(certs, address) as running:
        async with AsyncClient(running.target, tls=certs.of("client")) as client:
            assert (await client.generate([[5, 6]], SamplingParams(max_tokens=3, detokenize=False)))[0].finished
        ca, theirs = certs.of("client").ca, other.of("client")
        expired = old.of("client")
        cases = {
            "it requires a certificate of its clients": TLS(ca),
            "which is not of a CA that it trusts": TLS(ca, theirs.cert, theirs.key),
            "which has expired": TLS(ca, expired.cert, expired.key),
            "its certificate is not valid here: unable to get local issuer certificate": theirs,
            "certificate is not valid for 'elsewhere'": TLS(ca, expired.cert, expired.key, "elsewhere"),
            "it speaks TLS: --tls-ca FILE names the CA": False,
        }
        for text, tls in cases.items():
            message = await failure(running.target, tls)
            assert message.startswith(f"no TLS connection to {running.target}: "), message
            assert text in message
        assert await asyncio.to_thread(check, running.target, tls=certs.of("client")) is None
        assert "it requires a certificate" in str(await asyncio.to_thread(check, running.target, tls=TLS(ca)))
        for name in ("scheduler.pem", "scheduler-key.pem"):
            (old.folder / "scheduler" / name).rename(certs.folder / "scheduler" / name)
        assert "certificate has expired" in await failure(running.target, certs.of("client"))


async def test_a_client_over_tls_is_told_that_the_server_speaks_plain_text(certs) -> None:
    async with (
        executor_service("", simulate="instant") as address,
        scheduler_service(address, skip_tokenizer_init=True) as running,
    ):
        assert "it does not speak TLS" in await failure(running.target, certs.of("client"))


async def test_an_executor_takes_its_schedulers_certificate_alone(certs, caplog) -> None:
    async with executor(certs) as address:
        refused = []
        for party in ("client", "executor"):
            async with aio_channel(address, certs.of(party)) as channel:
                stub = execution_pb2_grpc.ExecutionServiceStub(channel)
                # No message: a write may find the stream refused already, and the client's own error comes first then.
                refused.append(await stub.Execute().code())
                with pytest.raises(grpc.aio.AioRpcError, match=f"not that of cadenza-{party}") as caught:
                    await stub.Describe(pb.DescribeRequest())
                refused.append(caught.value.code())
                health = health_pb2_grpc.HealthStub(channel)
                assert (await health.Check(health_pb2.HealthCheckRequest())).status == 1, "open to all of the CA"
        assert set(refused) == {grpc.StatusCode.PERMISSION_DENIED}
        assert caplog.text.count("refused a call of ipv4:127.0.0.1: wrong_certificate") == 1, "once a minute"
        async with aio_channel(address, certs.of("scheduler")) as channel:
            stub = execution_pb2_grpc.ExecutionServiceStub(channel)
            assert (await stub.Describe(pb.DescribeRequest())).protocol_version == 1


async def test_a_scheduler_with_the_wrong_credentials_says_so(certs, tmp_path) -> None:
    other = certificates(tmp_path / "other")
    wrong = {
        "cadenza-client": certs.executor_link("client"),
        "unable to get local issuer certificate": other.executor_link(),
        "it speaks TLS: --executor-ca FILE": {},
    }

    async def reason(address: str, options: dict[str, str]) -> str:
        config = SchedulerConfig(executor=[address], listen="127.0.0.1:0", **options)
        port = GrpcExecutor(address, "x", tls=executor_files(config))
        try:
            with pytest.raises(ExecutorLostError) as caught:
                async with asyncio.timeout(20):
                    await port.describe()
            return str(caught.value)
        finally:
            await port.aclose()

    async with executor(certs) as address:
        found = await asyncio.gather(*(reason(address, options) for options in wrong.values()))
    for text, message in zip(wrong, found, strict=True):
        assert text in message


async def test_certificates_are_replaced_under_load_and_no_stream_is_lost(certs, caplog) -> None:
    """New certificates, and a new CA beside the old one and in its place, while streams run and new ones begin."""
    caplog.set_level(logging.WARNING)
    async with executor(certs) as address, scheduler(certs, address) as running:
        async with AsyncClient(running.target, tls=certs.of("client")) as client:
            rotated = asyncio.Event()
            finished: list[int] = []

            async def read(index: int) -> None:
                tokens = 0
                async for delta in client.stream([5 + index], LONG):
                    tokens += len(delta.outputs[0].token_ids)
                    if not rotated.is_set() and tokens > 20:
                        await rotated.wait()
                finished.append(tokens)

            async with asyncio.TaskGroup() as group:
                early = [group.create_task(read(index)) for index in range(8)]
                for options in ({}, {"new_ca": True}, {}):
                    certs.renew(**options)
                    group.create_task(read(20))
                    assert (await client.generate([[9]], LONG))[0].finished
                    async with AsyncClient(running.target, tls=certs.of("client")) as another:
                        await another.model_info()
                drop_old_authorities(certs)
                assert (await client.generate([[9]], LONG))[0].finished
                assert not any(each.done() for each in early)
                rotated.set()
            assert finished == [400] * 11
        info = await running.generation.GetServerInfo(generation_pb2.GetServerInfoRequest())
        assert info.executors[0].epoch == 1, "the plan stream has lived through it"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def drop_old_authorities(certs: Certificates) -> None:
    for party in ("ca", "scheduler", "executor", "client"):
        path = certs.folder / party / "ca.pem"
        newest = path.read_text().split("-----END CERTIFICATE-----")[0] + "-----END CERTIFICATE-----\n"
        new = path.with_suffix(".new")
        new.write_text(newest)
        new.replace(path)


async def test_an_expired_certificate_of_the_scheduler_heals_without_a_restart(certs, caplog) -> None:
    """Its connection to an executor cannot be made, until new files are there."""
    certs.renew(days=-1)
    async with asyncio.timeout(30):
        listener = certs.listener("executor")
        files = executor_files(SchedulerConfig(executor=["127.0.0.1:1"], **certs.executor_link()))
        assert "has expired" in caplog.text
        async with executor_service("", simulate="instant", **listener) as address:
            port = GrpcExecutor(address, "x", tls=files)
            with pytest.raises(ExecutorLostError, match="certificate has expired"):
                await port.describe()
            certs.renew()
            assert (await port.describe()).name == "simulated"
            await port.aclose()


def test_of_authorities_the_last_one_counts(tmp_path) -> None:
    """While a new one replaces an old one, a file holds both, and is of use until the new one expires."""
    authorities = {}
    for name, days in (("old", -400), ("new", 0)):
        made = certificates(tmp_path / name, now=datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days))
        authorities[name] = Path(made.executor_link()["executor_ca"]).read_bytes()

    def expiry(option: str, content: bytes) -> float:
        return first_expiries({PemFile(option, "x"): content})[option]

    alone = {name: expiry("--executor-ca", content) for name, content in authorities.items()}
    both = authorities["new"] + authorities["old"]
    assert alone["old"] < alone["new"] == expiry("--executor-ca", both)
    assert expiry("--tls-cert", both) == alone["old"]


async def test_the_metrics_have_when_certificates_expire_also_after_they_were_renewed(certs) -> None:
    """A scrape that reads a new file must not keep it from the next handshake."""
    certs.renew(days=5)
    config = SchedulerConfig(executor=["127.0.0.1:1"], **certs.listener("scheduler"), **certs.executor_link())
    files, links = front_files(config), executor_files(config)

    def days(link: str, option: str) -> int:
        scrape = Scrape(LISTENER_DEFINITIONS)
        add_expiries(scrape, {"listener": files, "executors": links, "plain": None})
        family = next(each for each in scrape.families() if "certificate_expiry" in each.name)
        samples = {(each.labels["link"], each.labels["option"]): each.value for each in family.samples}
        assert set(samples) == {
            *(("listener", name) for name in ("--tls-cert", "--tls-client-ca")),
            *(("executors", name) for name in ("--executor-ca", "--executor-cert")),
        }
        return round((samples[link, option] - time.time()) / 86400)

    server = grpc.aio.server()
    address = bind(server, "127.0.0.1:0", default_port=0, credentials=files.credentials())
    await server.start()
    host, port = address.split(":")
    try:
        assert [days("listener", "--tls-cert"), days("executors", "--executor-cert")] == [5, 5]
        assert days("listener", "--tls-client-ca") > 90
        old = await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)))
        certs.renew(days=30)
        assert [days("listener", "--tls-cert"), days("executors", "--executor-cert")] == [30, 30]
        new = await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)))
        assert new != old
        (certs.folder / "scheduler" / "scheduler-key.pem").write_text("no key")
        certs.renew(days=60)
        (certs.folder / "scheduler" / "scheduler-key.pem").write_text("no key")
        assert days("listener", "--tls-cert") == 30, "of the certificate in use"
    finally:
        await server.stop(0)


async def scraped(log_line: str) -> set[tuple[str, str]]:
    """The link and the option of each time of expiry in the metrics, whose address is in the log."""
    found = re.search(r"http://\S+/metrics", log_line)
    assert found is not None
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(found[0], timeout=10).read().decode())
    return set(re.findall(r'^cadenza_tls_certificate_expiry_seconds{link="(\w+)",option="(.+?)"} \d', text, re.M))


async def test_processes_export_when_the_certificates_of_each_link_expire(certs) -> None:
    """Beside the files of its listener, a scheduler has those of its link to executors."""
    own = [f"--{name.replace('_', '-')}={value}" for name, value in certs.listener("executor").items()]
    link = [f"--{name.replace('_', '-')}={value}" for name, value in certs.executor_link().items()]
    front = [f"--{name.replace('_', '-')}={value}" for name, value in certs.listener("scheduler").items()]
    at = "127.0.0.1:0"  # the certificates' address
    async with service_process("executor_svc", "--simulate=instant", "--metrics-port=0", *own, listen=at) as executor:
        to = [f"--executor={executor.address}", "--skip-tokenizer-init"]
        async with service_process("scheduler_svc", *to, "--metrics-port=0", *link, *front, listen=at) as running:
            listener = {("listener", "--tls-cert"), ("listener", "--tls-client-ca")}
            assert await scraped(await executor.logged("metrics at")) == listener
            executors = {("executors", "--executor-ca"), ("executors", "--executor-cert")}
            assert await scraped(await running.logged("metrics at")) == listener | executors


async def test_files_that_cannot_be_used_are_named_with_their_options(certs, tmp_path) -> None:
    (tmp_path / "empty.pem").write_text("nothing")
    key = certs.of("client").key
    for options, message in (
        ({"tls_cert": "missing.pem", "tls_key": str(key)}, "--tls-cert missing.pem: no such file or directory"),
        ({"tls_cert": str(tmp_path / "empty.pem"), "tls_key": str(key)}, "empty.pem: this is not a certificate in PEM"),
        (
            {**certs.listener("scheduler"), "tls_key": str(key)},
            f"--tls-key {key}: this is not the key of --tls-cert {certs.listener('scheduler')['tls_cert']}",
        ),
        (
            {**certs.listener("scheduler"), "tls_client_ca": str(key)},
            f"--tls-client-ca {key}: this is not a certificate",
        ),
        ({"tls_cert": "a.pem"}, "--tls-cert needs --tls-key"),
        ({"tls_client_ca": "a.pem"}, "--tls-client-ca needs --tls-cert and --tls-key"),
    ):
        service = Service(SchedulerConfig(executor=["127.0.0.1:1"], listen="127.0.0.1:0", **options))
        with pytest.raises(ValueError, match=r"^--tls-") as caught:
            await service.start()
        assert message in str(caught.value)
        await service.stop()
    with pytest.raises(OptionError, match=r"^option tls-ca missing\.pem: no such file or directory$"):
        AsyncClient(tls=TLS("missing.pem"))
    with pytest.raises(ValueError, match="cert needs key"):
        TLS(cert="a.pem")


@pytest.mark.parametrize("service", ["scheduler", "executor"])
async def test_nothing_listens_beyond_loopback_without_credentials(service, certs) -> None:
    from cadenza_common.wire.tls_server import listener_files
    from executor_svc.config import ExecutorConfig

    def files(**options):
        if service == "scheduler":
            return front_files(SchedulerConfig(executor=["127.0.0.1:1"], **options))
        return listener_files(ExecutorConfig(simulate="instant", **options), default_port=0)

    for address in ("0.0.0.0:0", "[::]:0", "192.0.2.1:50051", "no-such-host.invalid:1"):
        for options in ({}, certs.listener(service, proof=False)):
            with pytest.raises(ValueError, match=r"--tls-client-ca.* or --insecure"):
                files(listen=address, **options)
        assert files(listen=address, insecure=True) is None
        assert files(listen=address, **certs.listener(service)) is not None
    for address in (":0", "127.0.0.1:0", "127.8.9.1:0", "localhost:0", "[::1]:0"):
        assert files(listen=address) is None


@pytest.mark.slow
def test_services_started_here_serve_other_machines_over_tls(certs, monkeypatch) -> None:
    """The process that starts them connects with the scheduler's own certificate; executors stay on loopback."""
    for name, value in (("CA", "a client's"), ("CERT", "a client's"), ("KEY", "a client's")):
        monkeypatch.setenv(f"CADENZA_TLS_{name}", value)
    options = {"simulate": "instant", "skip_tokenizer_init": True, "use_tqdm_on_load": False, "host": "0.0.0.0"}
    with pytest.raises(OptionError, match=r"^option host: 0\.0\.0\.0: other machines could use the server without"):
        LLM("simulated", **options)
    with LLM("simulated", **options, **certs.listener("scheduler")) as llm:
        assert llm.generate([[5, 6]], SamplingParams(max_tokens=3, detokenize=False), use_tqdm=False)[0].finished
        port = llm.target.rpartition(":")[2]
        with Client(f"localhost:{port}", tls=certs.of("client")) as client:
            assert client.model_info().model == "simulated"
        with Client(f"127.0.0.1:{port}", tls=False) as client, pytest.raises(UnavailableError, match="it speaks TLS"):
            client.model_info()
