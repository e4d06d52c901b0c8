"""The exchanges of a rank, for its device."""

from __future__ import annotations

from collections.abc import Callable

from executor_svc.config import ExecutorConfig
from executor_svc.cpu.kernels.cpu_kernels import CpuKernels
from executor_svc.cpu.kernels.ranks.launches import CpuRanks
from executor_svc.cpu.kernels.ranks.linked import LinkedRanks
from executor_svc.cpu.kernels.ranks.memory import ExchangeMemory, ExchangeSizes
from executor_svc.device.interface import Device
from executor_svc.device.ranks import RankKernels, Share
from executor_svc.models.base import ModelConfigError
from executor_svc.models.parallel.recurrent import groups_in_parts
from executor_svc.models.specs.spec import DecoderSpec
from executor_svc.ranks.members import Exchanges, SharedMemory


def sizes_of(config: ExecutorConfig, spec: DecoderSpec) -> ExchangeSizes:
    """Return what the exchanges of a model's steps need."""
    most = config.max_num_batched_tokens, spec.hidden_size, config.max_num_seqs, spec.vocab_size
    return ExchangeSizes(config.tensor_parallel_size, *most)


def make_ranks(
    device: Device,
    rank: int,
    config: ExecutorConfig,
    spec: DecoderSpec,
    exchanges: Exchanges,
    meet: Callable[[int], None],
) -> RankKernels:
    """Return the exchanges of a rank: on the CPU through memory that all ranks share, or over connections.

    meet: called with the bytes of that memory, before it is mapped. Raises StartError.
    """
    share = Share(rank, config.tensor_parallel_size)
    if device.name != "cpu":
        if spec.has_experts:
            raise ModelConfigError("mixtures of experts are not divided among GPUs so far")
        if spec.head_norms == "all heads":
            raise ModelConfigError("q_norm and k_norm normalize all heads together, which GPUs have parts of")
        if (groups := groups_in_parts(spec, share.size)) is not None:
            raise ModelConfigError(
                f"mamba_n_groups {groups}: each group has a norm, of which {share.size} GPUs would have parts: that is "
                "not supported so far"
            )
        assert isinstance(exchanges, SharedMemory)
        return ranks_on_gpus(device, share, exchanges.descriptor)
    kernels, sizes = device.kernels, sizes_of(config, spec)
    assert isinstance(kernels, CpuKernels)
    meet(sizes.num_bytes)
    if isinstance(exchanges, SharedMemory):
        return CpuRanks(share, kernels, ExchangeMemory(exchanges.map(sizes.num_bytes), sizes))
    return LinkedRanks(share, kernels, exchanges, sizes)


def ranks_on_gpus(device: Device, share: Share, memory: int) -> RankKernels:
    """Return the exchanges of a rank on a GPU, once all ranks of this machine are there.

    memory: a descriptor of memory that all of them have. Under Triton's interpreter gloo stands for NCCL.
    """
    from executor_svc.gpu.kernels.gpu_kernels import GpuKernels
    from executor_svc.gpu.ranks import GpuRanks, join_group

    join_group(share, memory, "nccl" if device.torch_device.type == "cuda" else "gloo")
    kernels = device.kernels
    assert isinstance(kernels, GpuKernels)
    return GpuRanks(share, kernels)
