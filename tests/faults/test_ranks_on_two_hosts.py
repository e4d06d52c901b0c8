"""Two ranks on two hosts, as network namespaces: with a secret, with TLS, and a cable that is pulled under a load."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.helpers.certificates import certificates
from tests.helpers.external_ranks import ExternalRanks, external_ranks
from tests.helpers.machine.two_hosts import TwoHosts, two_hosts_or_skip
from tests.helpers.scheduler.rolling import ClientLoad, Seen
from tests.helpers.service_process import service_process
from tests.helpers.services import scheduler_service

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

OPTIONS = (
    "--num-gpu-blocks", "600", "--max-num-seqs", "16", "--max-num-batched-tokens", "64", "--dtype", "float32",
)  # fmt: skip
LOAD = 90, 4
"""Most tokens of a request, and requests."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama", max_position_embeddings=1024)


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    with two_hosts_or_skip() as found:
        yield found


SHARED_MEMORY: list[dict[int, Seen]] = []


async def shared_memory_tokens(model: Path) -> list[dict[int, Seen]]:
    """What the load's loops see of two ranks with shared memory: computed by the first test that needs it."""
    if SHARED_MEMORY:
        return SHARED_MEMORY
    ranks = "--device", "cpu", "--num-threads", "1", "--tensor-parallel-size", "2"
    async with (
        service_process("executor_svc", "--model", str(model), *ranks, *OPTIONS) as executor,
        scheduler_service(executor.address, skip_tokenizer_init=True) as scheduler,
    ):
        SHARED_MEMORY.extend(await ClientLoad(scheduler.target, *LOAD).finished())
    return SHARED_MEMORY


@pytest.mark.long
async def test_a_cable_is_pulled_under_a_load_and_no_token_is_lost(
    model: Path, hosts: TwoHosts, tmp_path: Path
) -> None:
    """The same tokens as with shared memory, before, within and after."""
    expected = await shared_memory_tokens(model)
    (tmp_path / "secret").write_bytes(b"a secret of 27 bytes or so\n")
    secret = "--rank-secret-file", str(tmp_path / "secret")
    listen = f"{hosts.front}:50052", "--insecure"
    ranks = ExternalRanks(str(model), hosts.master, listen[0], (*OPTIONS, *secret, listen[1]), 2, hosts.prefixes)
    async with (
        external_ranks(ranks),
        scheduler_service(listen[0], one_session=False, skip_tokenizer_init=True) as scheduler,
    ):
        load = ClientLoad(scheduler.target, *LOAD)
        await load.more(40)
        hosts.pull()
        took, codes = await ranks.ended(10)
        assert took < 2.5  # 2 s, and what this machine is late
        assert codes == [5, 5]
        assert "rank 1 ended: at 10." in "\n".join(ranks.running[0].lines)
        assert f"rank 0 at {hosts.master}:50053 is gone" in "\n".join(ranks.running[1].lines)
        hosts.plug()
        await ranks.start()
        assert await load.finished() == expected


@pytest.mark.long
async def test_two_hosts_over_tls(model: Path, hosts: TwoHosts, tmp_path: Path) -> None:
    """The same tokens as with shared memory. A frozen rank is not gone: the rule for hung steps ends it."""
    expected = await shared_memory_tokens(model)
    certs = certificates(tmp_path, hosts=[hosts.front])
    files = [f"--{name.replace('_', '-')}={path}" for name, path in certs.listener("executor").items()]
    options = *OPTIONS, *files, "--step-timeout-s", "2"
    ranks = ExternalRanks(str(model), hosts.master, f"{hosts.front}:50052", options, 2, hosts.prefixes)
    link = certs.executor_link()
    async with (
        external_ranks(ranks),
        scheduler_service(ranks.listen, one_session=False, skip_tokenizer_init=True, **link) as scheduler,
    ):
        assert await ClientLoad(scheduler.target, *LOAD).finished() == expected
        load = ClientLoad(scheduler.target, *LOAD)
        await load.more(40)
        ranks.send(1, signal.SIGSTOP)
        assert await ranks.running[0].process.wait() == 4
        ranks.send(1, signal.SIGCONT)
        _, codes = await ranks.ended(10)
        assert codes == [4, 5]
        await ranks.start()
        assert await load.finished() == expected


@pytest.mark.long
async def test_without_a_secret_or_tls_no_rank_starts(model: Path, hosts: TwoHosts) -> None:
    ranks = ExternalRanks(str(model), hosts.master, "127.0.0.1:0", OPTIONS, 2, hosts.prefixes)
    ranks.running = [await ranks.start_rank(rank) for rank in range(2)]
    _, codes = await ranks.ended(30)
    assert codes == [1, 1]
    for each in ranks.running:
        assert "beyond loopback: ranks need --rank-secret-file, or --tls-cert" in each.lines[-1]
