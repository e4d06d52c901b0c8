"""Attention over a paged cache as a model's layer calls it: a batch's sizes, its tensors on the device, its launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks.gpu.cases import Bench
from executor_svc.device.kernels import AttentionShape

if TYPE_CHECKING:
    from executor_svc.gpu.kernels.attention.plan import GpuAttentionPlan
    from executor_svc.gpu.kernels.gpu_kernels import GpuKernels

_HOPPER = 90, 132
_RANDOM_BLOCKS = 4096
"""Blocks with random keys and values; the others repeat them."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Tensors of one layer, and the attention plan of the batch."""

    plan: GpuAttentionPlan
    q: Tensor
    """[T, H, D], a view of rows of queries, keys and values."""
    kv_layer: Tensor
    block_tables: Tensor
    """[S, blocks] int32, on the host."""


def kernels_of(bench: Bench) -> GpuKernels:
    """The device's kernels, made once."""

    def make() -> GpuKernels:
        from executor_svc.gpu.kernels.gpu_kernels import GpuKernels

        return GpuKernels(bench.device, *arch_and_sms(bench.device))

    return bench.cached("kernels", make)


def exact_kernels_of(bench: Bench) -> GpuKernels:
    """The device's kernels in exact mode, made once: for caches in bf16."""

    def make() -> GpuKernels:
        from executor_svc.gpu.kernels.exact.attention_probe import ExactAttention
        from executor_svc.gpu.kernels.gpu_kernels import GpuKernels

        where = bench.device, *arch_and_sms(bench.device)
        return GpuKernels(*where, ExactAttention(*where))

    return bench.cached("exact kernels", make)


def gluon_kernels_of(bench: Bench, block_size: int) -> GpuKernels:
    """The device's kernels with prompts' attention in Gluon, made once: for caches in bf16, in such blocks.

    Raises DeviceError where that does not run.
    """

    def make() -> GpuKernels:
        from executor_svc.gpu.kernels.attention.gluon.backend import PromptBackend
        from executor_svc.gpu.kernels.gpu_kernels import GpuKernels

        arch, num_sms = arch_and_sms(bench.device)
        kernels = GpuKernels(bench.device, arch, num_sms)
        kernels.attend_prompts_by(PromptBackend(bench.device, arch, block_size, exact=False))
        return kernels

    return bench.cached(f"gluon kernels {block_size}", make)


def arch_and_sms(device: torch.device) -> tuple[int, int]:
    """Compute capability (as 90) and number of multiprocessors; a Hopper GPU's under the interpreter."""
    if device.type != "cuda":
        return _HOPPER
    found = torch.cuda.get_device_properties(device)
    return found.major * 10 + found.minor, int(found.multi_processor_count)


def make_inputs(bench: Bench, sizes: Sizes, kernels: GpuKernels | None = None) -> Inputs:
    """Random queries, and a cache with blocks in random order; raises RuntimeError if it does not fit in memory.

    kernels: default: of `kernels_of`.
    """
    from executor_svc.gpu.kernels.attention.plan import GpuAttentionPlan

    cache = _pool(bench, sizes)
    shape, tokens = sizes.shape, sizes.batch * sizes.num_tokens
    plan = (kernels or kernels_of(bench)).new_attention_plan(shape, sizes.context, tokens, sizes.batch)
    assert isinstance(plan, GpuAttentionPlan)
    order = torch.randperm(sizes.batch * sizes.blocks_per_seq, dtype=torch.int32)
    tables = order.view(sizes.batch, sizes.blocks_per_seq)
    starts = torch.arange(sizes.batch + 1, dtype=torch.int32) * sizes.num_tokens
    lens = torch.full((sizes.batch,), sizes.context, dtype=torch.int32)
    plan.fill(torch.full((tokens,), -1), starts, lens, tables)
    width = (shape.num_heads + 2 * shape.num_kv_heads) * sizes.head_size
    qkv = torch.randn(tokens, width, device=bench.device).to(torch.bfloat16)
    q = qkv.view(tokens, -1, sizes.head_size)[:, : shape.num_heads]
    return Inputs(plan, q, cache, tables)


def launch(
    bench: Bench, sizes: Sizes, inputs: Inputs, kernels: GpuKernels | None = None
) -> tuple[Callable[[], None], Tensor]:
    """A function that enqueues attention as a recorded layer does, and its output tensor [T, H * D]."""
    kernels, tokens = kernels or kernels_of(bench), inputs.q.shape[0]
    with kernels.recording() as recording:
        out = kernels.attention(inputs.q, inputs.kv_layer, sizes.shape, inputs.plan)
        program = recording.program()
    return lambda: program.run(rows=tokens), out


def check(inputs: Inputs, sizes: Sizes, out: Tensor) -> None:
    """Compare the last token of the last sequence with float64; raises RuntimeError."""
    blocks = inputs.block_tables[-1].long().to(inputs.kv_layer.device)
    # As bytes: PyTorch has few operations on fp8.
    taken = inputs.kv_layer.view(torch.uint8)[blocks].view(sizes.kv_dtype).to(torch.float32).to(torch.float64)
    keys, values = taken.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : sizes.context]
    query = inputs.q[-1].to(torch.float64).view(sizes.num_kv_heads, sizes.group, sizes.head_size)
    weights = torch.softmax(query @ keys.transpose(1, 2) * sizes.shape.scale, -1)
    expected = (weights @ values).flatten()
    error = float((out[-1].to(torch.float64) - expected).norm() / expected.norm())
    if not error < 0.02:
        raise RuntimeError(f"attention is wrong: the last token has a relative error of {error:.3g}")


def _pool(bench: Bench, sizes: Sizes) -> Tensor:
    """A cache with blocks for all sequences, shared by cases: the largest so far; only one exists at a time."""
    num_blocks = sizes.batch * sizes.blocks_per_seq
    key = f"pool {sizes.fp8} {sizes.num_kv_heads} {sizes.head_size} {sizes.block_size}"
    holder: dict[str, Tensor] = bench.cached("pools", dict)
    found = holder.get(key)
    if found is None or found.shape[0] < num_blocks:
        holder.clear()
        found = None
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
            free, needed = torch.cuda.mem_get_info(bench.device)[0], sizes.kv_bytes
            if needed > 0.9 * free:
                raise RuntimeError(f"{needed / 2**30:.0f} GiB of keys and values do not fit in {free / 2**30:.0f}")
        holder[key] = found = _filled(sizes, num_blocks, bench.device)
    return found


def _filled(sizes: Sizes, num_blocks: int, device: torch.device) -> Tensor:
    block = (2, sizes.num_kv_heads, sizes.block_size, sizes.head_size)
    pool = torch.empty(num_blocks, *block, dtype=sizes.kv_dtype, device=device)
    random = torch.randn(min(num_blocks, _RANDOM_BLOCKS), *block, device=device).to(sizes.kv_dtype)
    # As bytes: PyTorch copies fp8 slowly, if at all.
    source, target = random.view(torch.uint8), pool.view(torch.uint8)
    for first in range(0, num_blocks, len(random)):
        part = target[first : first + len(random)]
        part.copy_(source[: len(part)])
    return pool


@dataclass(frozen=True, slots=True)
class Sizes:
    """A batch of sequences of equal length, and the heads of its model."""

    batch: int
    context: int
    """Keys of the last token of a sequence."""
    num_tokens: int = 1
    """Query tokens of each sequence, at the end of its context."""
    num_kv_heads: int = 8
    group: int = 4
    head_size: int = 128
    fp8: bool = False
    block_size: int = 16

    @property
    def kv_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.fp8 else torch.bfloat16

    @property
    def blocks_per_seq(self) -> int:
        return -(-self.context // self.block_size)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values of all sequences."""
        return 2 * self.batch * self.context * self.num_kv_heads * self.head_size * self.kv_dtype.itemsize

    @property
    def shape(self) -> AttentionShape:
        heads = self.num_kv_heads * self.group
        return AttentionShape(heads, self.num_kv_heads, self.head_size, self.head_size, self.head_size**-0.5)
