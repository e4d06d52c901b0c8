"""Two ranks that a test starts with torchrun's variables, over loopback: tokens of transformers, and failures."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path

import psutil
import pytest

from cadenza import AsyncClient, SamplingParams
from tests.checkpoints import make_checkpoint
from tests.helpers.external_ranks import PORT, ExternalRanks, external_ranks
from tests.helpers.machine.loopback import new_address
from tests.helpers.marks import short_and_long
from tests.helpers.models.golden import random_prompts, transformers_greedy, transformers_model
from tests.helpers.models.peft_adapters import save_peft_adapter
from tests.helpers.scheduler.rolling import ClientLoad
from tests.helpers.services import scheduler_service

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NEW_TOKENS = 16
LOAD = 150, 4
"""Most tokens of a request, and requests."""
SIZES = ("--num-gpu-blocks", "600", "--max-num-seqs", "16", "--max-num-batched-tokens", "64", "--max-loras", "2")
PARAMS = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)


def ranks_of(model: Path, *options: str) -> ExternalRanks:
    address = new_address()
    return ExternalRanks(str(model), address, f"{address}:50052", ("--dtype", "float32", *SIZES, *options))


@pytest.mark.parametrize("killed", short_and_long([0, 1], [0]))
async def test_tokens_are_those_of_transformers_and_a_lost_group_costs_none(tmp_path: Path, killed: int) -> None:
    """With adapters and drafts, beside strangers; then a rank is killed under a load."""
    model = make_checkpoint(tmp_path / "model", "qwen3", vocab_size=131, max_position_embeddings=1024)
    reference = save_peft_adapter(model, tmp_path / "adapter", seed=3, r=8, target_modules="all-linear", lora_alpha=2)
    prompts = [*random_prompts(131, (1, 40)), [9, 8, 7, 6] * 8]
    expected = {
        name: [transformers_greedy(found, prompt, NEW_TOKENS).tokens for prompt in prompts]
        for name, found in ((None, transformers_model(model)), ("adapter", reference))
    }
    async with (
        external_ranks(ranks_of(model, "--speculative", "ngram")) as group,
        scheduler_service(
            group.running[0].address, one_session=False, lora=[f"adapter={tmp_path / 'adapter'}"],
            skip_tokenizer_init=True, max_num_seqs=8,
        ) as scheduler,
        AsyncClient(scheduler.target) as client,
    ):  # fmt: skip
        for name, tokens in expected.items():
            found = await client.generate(prompts, PARAMS, adapter=name)
            assert [output.outputs[0].token_ids for output in found] == tokens
        undisturbed = await ClientLoad(scheduler.target, *LOAD).finished()
        await strangers_come_and_go(group)
        load = ClientLoad(scheduler.target, *LOAD)
        await load.more(50)
        group.send(killed, signal.SIGKILL)
        _, codes = await group.ended(10)
        assert codes == [-signal.SIGKILL if each == killed else 5 for each in range(2)]
        others_words = f"rank 0 at {group.master}:{PORT} is gone", "rank 1 ended: at 127.0.0.1, "
        assert others_words[killed] in "\n".join(group.running[1 - killed].lines)
        await group.start()
        assert await load.finished() == undisturbed
        await stops_in_order(group)


async def strangers_come_and_go(group: ExternalRanks) -> None:
    """Garbage at the port of ranks, and a second rank 1."""
    with socket.create_connection((group.master, PORT)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n" * 20)
        await group.running[0].logged(
            "dropped a connection from 127.0.0.1 to the port of ranks: it is no rank of Cadenza"
        )
    second = await group.start_rank(1)
    assert await second.process.wait() == 1
    await second.end()
    assert "it refuses this rank: RANK=1 is there already, from 127.0.0.1" in "\n".join(second.lines)


async def stops_in_order(group: ExternalRanks) -> None:
    """A signal to the whole group, as torchrun and Kubernetes send it: rank 0 decides when all stop."""
    for rank in (1, 0):
        group.send(rank, signal.SIGTERM)
    _, codes = await group.ended(10)
    assert codes == [0, 0]
    assert "rank 0 has stopped" in group.running[1].lines[-1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama", max_position_embeddings=1024)


@pytest.mark.parametrize("again", short_and_long([False, True], [False]))
@pytest.mark.long
async def test_torchrun_starts_ranks_and_starts_them_again(model: Path, again: bool) -> None:
    """With its own store at MASTER_PORT. Of a rank that is killed it makes a new group, and the load goes on."""
    address = new_address()
    command = (
        *("torchrun", "--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.1"),
        *("--master-addr", address, "--master-port", str(free_port()), "--no-python", sys.executable, "-m"),
        *(
            "executor_svc",
            "--model",
            str(model),
            "--device",
            "cpu",
            "--num-threads",
            "1",
            "--listen",
            f"{address}:50052",
        ),
        *("--distributed-executor-backend", "external", *SIZES),
    )
    torchrun = await asyncio.create_subprocess_exec(
        Path(sys.executable).with_name(command[0]), *command[1:], stdout=PIPE, stderr=DEVNULL
    )
    assert torchrun.stdout is not None
    try:
        assert (await torchrun.stdout.readline()).startswith(b"ready ")
        async with scheduler_service(f"{address}:50052", one_session=False, skip_tokenizer_init=True) as scheduler:
            expected = await ClientLoad(scheduler.target, *LOAD).finished()
            assert expected
            if not again:
                return
            load = ClientLoad(scheduler.target, *LOAD)
            await load.more(50)
            (rank_1,) = (
                each for each in psutil.Process(torchrun.pid).children() if each.environ()["RANK"] == "1"
            )  # fmt: skip
            rank_1.kill()
            assert (await torchrun.stdout.readline()).startswith(b"ready ")
            assert await load.finished() == expected
    finally:
        ranks = psutil.Process(torchrun.pid).children()
        torchrun.terminate()
        await torchrun.wait()
        for each in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


async def test_other_options_end_both_ranks_with_their_names(model: Path) -> None:
    group = ranks_of(model)
    group.running = [await group.start_rank(0), await group.start_rank(1, "--block-size", "32")]
    _, codes = await group.ended(60)
    assert codes == [1, 1]
    wrong = "--block-size is 32 there and 16 at rank 0: all ranks need the same options"
    assert group.running[0].lines[-1] == f"error: rank 1 at 127.0.0.1: {wrong}"
    assert group.running[1].lines[-1] == f"error: rank 0: {wrong}"


async def test_variables_that_are_wrong_end_a_rank_at_once(model: Path) -> None:
    group = ranks_of(model)
    cases = {
        "error: WORLD_SIZE=3 is not --tensor-parallel-size 2": {"WORLD_SIZE": "3"},
        "error: RANK=2: must be a number from 0 to 1": {"RANK": "2"},
    }
    for message, variables in cases.items():
        process = await group.start_rank(1, **variables)
        assert await process.process.wait() == 2
        await process.end()
        assert process.lines == [message]


async def test_a_rank_that_does_not_come_and_one_without_a_secret(model: Path, tmp_path: Path) -> None:
    group = ranks_of(model, "--rank-connect-timeout-s", "4")
    (tmp_path / "secret").write_text("sixteen bytes, at least\n")
    secret = "--rank-secret-file", str(tmp_path / "secret")
    group.running = [await group.start_rank(0, *secret), await group.start_rank(1)]
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(group.running[1].process.wait(), 30)
    assert "it does not know the secret of --rank-secret-file here" in "\n".join(
        [*group.running[1].lines, await group.running[1].logged("error: ")]
    )
    _, codes = await group.ended(30)
    assert codes == [1, 1]
    lines = "\n".join(group.running[0].lines)
    assert "as rank 1 it does not accept the secret of --rank-secret-file here" in lines
    assert "no connection from rank 1 at" in lines
