"""Exchanges between ranks: sums in the order of ranks, rows and columns of their owners, and ranks that fail."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from executor_svc.config import ExecutorConfig
from executor_svc.cpu.kernels.cpu_kernels import CpuKernels
from executor_svc.cpu.kernels.ranks.memory import ExchangeSizes
from executor_svc.device.ranks import RankError, Share
from executor_svc.ranks.hosts.credentials import RankCredentials, read_credentials
from tests.executor_svc.cpu.kernels.bits import equal_bits
from tests.helpers.certificates import certificates
from tests.helpers.executor.rank_threads import Connections, Meeting, SharedMemory, on_ranks

ROWS, HIDDEN, VOCABULARY = 40, 37, 101


@pytest.fixture(params=["memory", "connections", "TLS"])
def meeting(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Meeting]:
    found: Meeting
    match request.param:
        case "memory":
            found = SharedMemory()
        case "connections":
            found = Connections(RankCredentials(b"a secret of ranks"))
        case _:
            options = certificates(tmp_path / "certs").listener("executor")
            found = Connections(read_credentials(ExecutorConfig(model="any", **options)))
    yield found
    found.close()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exchanges_in_a_recorded_program(meeting: Meeting, size: int, dtype: torch.dtype) -> None:
    """Many runs, of all rows and of some, with two threads a rank: no rank reads what another has not given."""
    torch.manual_seed(size)
    sizes = ExchangeSizes(size, ROWS, HIDDEN, ROWS, VOCABULARY)
    partials = torch.randn(6, size, ROWS, HIDDEN)
    bias = torch.randn(HIDDEN).to(dtype)
    table, logits = torch.randn(VOCABULARY, HIDDEN).to(dtype), torch.randn(ROWS, VOCABULARY)
    token_ids = torch.randint(0, VOCABULARY, (ROWS,))

    def run(rank: int) -> list[tuple[torch.Tensor, ...]]:
        kernels, share = CpuKernels(2), Share(rank, size)
        ranks = meeting.ranks(share, kernels, sizes)
        tokens = share.of(VOCABULARY)
        own, columns = table[tokens.start : tokens.stop].clone(), logits[:, tokens.start : tokens.stop].clone()
        x, narrow = torch.empty(ROWS, HIDDEN), torch.empty(ROWS, HIDDEN - 1)
        with kernels.recording() as recording:
            embedded = ranks.embed(
                lambda ids, scale: kernels.embed(own, ids, scale), tokens.start, len(tokens), token_ids, 1.0
            )
            total = ranks.sum_partials(x, bias, dtype)
            plain = ranks.sum_partials(narrow, None, torch.float32)
            gathered = ranks.gather_columns(columns, tokens.start, VOCABULARY)
            program = recording.program()
        found = []
        for turn in range(60):
            count = (ROWS, 1, 7, 0)[turn % 4]
            x.copy_(partials[turn % 6, rank])
            narrow.copy_(partials[turn % 6, rank, :, 1:])
            program.run(rows=count)
            ranks.check()
            results = embedded, total, plain, gathered
            found.append(tuple(each[:count].clone() for each in results))
        return found

    for rank, turns in enumerate(on_ranks(size, run)):
        for turn, (embedded, total, plain, gathered) in enumerate(turns):
            count = (ROWS, 1, 7, 0)[turn % 4]
            expected = partials[turn % 6, 0, :count].clone()
            for other in range(1, size):
                expected = expected + partials[turn % 6, other, :count]
            assert equal_bits(plain, expected[:, 1:])
            assert equal_bits(total, (expected + bias.float()).to(dtype))
            assert equal_bits(embedded, table[token_ids[:count]])
            assert rank or equal_bits(gathered, logits[:count])


def test_a_rank_that_fails_releases_the_others_and_all_begin_anew(meeting: Meeting) -> None:
    sizes = ExchangeSizes(2, 4, 8, 4, 9)
    meets = threading.Barrier(2)

    def run(rank: int) -> torch.Tensor:
        kernels = CpuKernels()
        ranks = meeting.ranks(Share(rank, 2), kernels, sizes)
        if rank == 1:
            meets.wait()
            ranks.fail()
        else:
            meets.wait()
            ranks.sum_partials(torch.ones(4, 8), None, torch.float32)  # waits for rank 1
        with pytest.raises(RankError, match="rank 1 failed"):
            ranks.check()
        meets.wait()
        if rank == 0:
            ranks.reset()
        meets.wait()
        if rank == 1:
            ranks.reset()
        return ranks.sum_partials(torch.full((4, 8), rank + 1.0), None, torch.float32)

    for found in on_ranks(2, run):
        assert np.array_equal(found.numpy(), np.full((4, 8), 3.0))
