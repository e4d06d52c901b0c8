"""The exchanges of a rank, for its device."""

from __future__ import annotations

from executor_svc.config import ExecutorConfig
from executor_svc.cpu.kernels.cpu_kernels import CpuKernels
from executor_svc.cpu.kernels.ranks.launches import CpuRanks
from executor_svc.cpu.kernels.ranks.linked import LinkedRanks
from executor_svc.cpu.kernels.ranks.memory import ExchangeMemory, ExchangeSizes
from executor_svc.device.interface import Device
from executor_svc.device.ranks import RankKernels, Share
from executor_svc.models.spec import DecoderSpec
from executor_svc.ranks.members import Exchanges


def sizes_of(config: ExecutorConfig, spec: DecoderSpec) -> ExchangeSizes:
    """Return what the exchanges of a model's steps need."""
    most = config.max_num_batched_tokens, spec.hidden_size, config.max_num_seqs, spec.vocab_size
    return ExchangeSizes(config.tensor_parallel_size, *most)


def make_ranks(device: Device, rank: int, sizes: ExchangeSizes, exchanges: Exchanges) -> RankKernels:
    """Return the exchanges of a rank on the CPU: through memory that all ranks share, or over connections."""
    kernels, share = device.kernels, Share(rank, sizes.num_ranks)
    assert isinstance(kernels, CpuKernels)
    if callable(exchanges):
        return CpuRanks(share, kernels, ExchangeMemory(exchanges(sizes.num_bytes), sizes))
    return LinkedRanks(share, kernels, exchanges, sizes)
