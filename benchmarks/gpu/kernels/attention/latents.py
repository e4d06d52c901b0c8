"""Latent attention (MLA): decodes by the bytes of latents beside the bandwidth, prompts beside a matmul's rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks.gpu.cases import Bench, Case, Goal, Group, Metrics
from benchmarks.gpu.kernels.attention.attention import bandwidth
from benchmarks.gpu.kernels.attention.attention_launch import arch_and_sms

if TYPE_CHECKING:
    from executor_svc.device.kernels import AttentionShape

_LATENT, _ROPE, _NOPE, _VALUE = 512, 64, 128, 128
"""Columns of DeepSeek V2, V3 and their kin."""
_GOAL = Goal("percent_of_read", at_least=70)


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """A batch of sequences of equal length."""

    batch: int
    context: int
    num_heads: int = 16
    num_tokens: int = 1
    """Query tokens of each sequence, at the end of its context."""
    block_size: int = 16
    fp8: bool = False
    columns: tuple[int, int, int, int] = (_LATENT, _ROPE, _NOPE, _VALUE)
    """Of a latent, of a rotated key, of the rest of a query, of a value."""

    @property
    def kv_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.fp8 else torch.bfloat16

    @property
    def shape(self) -> AttentionShape:
        from executor_svc.device.latent import latent_shape

        latent, rope, nope, _ = self.columns
        return latent_shape(self.num_heads, latent, rope, (nope + rope) ** -0.5)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the rows of all sequences."""
        return self.batch * self.context * self.shape.padded_head_size * self.kv_dtype.itemsize

    @property
    def flops(self) -> int:
        """Operations of scores and weighted values, without masked elements."""
        seen = self.num_tokens * (self.context - self.num_tokens) + self.num_tokens * (self.num_tokens + 1) // 2
        latent, rope, _, _ = self.columns
        return 2 * self.batch * self.num_heads * (2 * latent + rope) * seen


TINY = LatentSizes(2, 40, num_heads=2, columns=(20, 8, 12, 16))


def cases(tiny: bool) -> Sequence[Case]:
    """Decodes of V2-Lite's heads and V3's, then prompts, then decodes with rows in fp8."""
    if tiny:
        return [_case(TINY), _case(LatentSizes(1, 40, 2, 40, columns=TINY.columns))]
    decodes = [LatentSizes(batch, 4096, heads) for heads in (16, 128) for batch in (1, 16, 64)]
    decodes += [LatentSizes(1, 32768), LatentSizes(256, 4096)]
    prompts = [LatentSizes(1, length, heads, length) for heads in (16, 128) for length in (1024, 4096)]
    fp8 = [LatentSizes(batch, 4096, heads, fp8=True) for heads in (16, 128) for batch in (1, 16, 64)]
    return [_case(each) for each in (*decodes, *prompts, *fp8)]


def _case(sizes: LatentSizes) -> Case:
    kv = "fp8" if sizes.fp8 else "bf16"
    params = {
        "batch": sizes.batch, "context": sizes.context, "num_heads": sizes.num_heads, "kv": kv,
        "num_tokens": sizes.num_tokens, "block_size": sizes.block_size,
    }  # fmt: skip
    name = f"{kv} {sizes.num_heads} heads, {sizes.batch} x {sizes.num_tokens} tokens of {sizes.context}"
    return Case(name, params, lambda bench: _time(bench, sizes), 5.0, _GOAL if sizes.num_tokens == 1 else None)


def _time(bench: Bench, sizes: LatentSizes) -> Metrics:
    """Time attention alone, and all between queries and output: `operation_us`."""
    from executor_svc.device.kernels import Rope
    from executor_svc.gpu.latent import GpuLatentKernels

    kernels, shape = GpuLatentKernels(bench.device, *arch_and_sms(bench.device)), sizes.shape
    (latent, rope, nope, value), tokens = sizes.columns, sizes.batch * sizes.num_tokens
    per_seq = -(-sizes.context // sizes.block_size)
    if bench.device.type == "cuda" and sizes.kv_bytes > 0.9 * torch.cuda.mem_get_info(bench.device)[0]:
        raise RuntimeError(f"{sizes.kv_bytes / 2**30:.0f} GiB of latents do not fit")
    pages = torch.randn(sizes.batch * per_seq, 1, 1, sizes.block_size, shape.padded_head_size, device=bench.device)
    pages[..., latent : shape.padded_head_size - rope] = 0
    pool = pages.to(sizes.kv_dtype).expand(-1, 2, -1, -1, -1)
    plan = kernels.new_attention_plan(shape, sizes.context, tokens, sizes.batch)
    tables = torch.randperm(sizes.batch * per_seq, dtype=torch.int32).view(sizes.batch, per_seq)
    starts = torch.arange(sizes.batch + 1, dtype=torch.int32) * sizes.num_tokens
    plan.fill(torch.full((tokens,), -1), starts, torch.full((sizes.batch,), sizes.context, dtype=torch.int32), tables)
    q = _random(bench, tokens, sizes.num_heads, shape.padded_head_size)
    found = q.new_empty(tokens, sizes.num_heads * latent)
    scales = plan.scales(pool)

    def attend() -> None:
        plan.attend(q, pool, found, scales)

    attend()
    _check(q, pool, found, sizes, tables)
    absorb = kernels.head_linear(_random(bench, sizes.num_heads, latent, nope))
    expand = kernels.head_linear(_random(bench, sizes.num_heads, value, latent))
    angles = _random(bench, sizes.context, rope)
    given = Rope(angles, angles, torch.zeros(tokens, dtype=torch.int64, device=bench.device))
    queries = _random(bench, tokens, sizes.num_heads * (nope + rope))
    with kernels.recording() as recording:
        kernels.latent_attention(queries, given, absorb, expand, pool, shape, plan)
        program = recording.program()
    program.run(rows=tokens)
    seconds, whole = bench.clock.seconds(attend), bench.clock.seconds(lambda: program.run(rows=tokens))
    metrics = bandwidth(bench, sizes.kv_bytes, seconds) if sizes.num_tokens == 1 else {"us": 1e6 * seconds}
    rate = sizes.flops / seconds
    metrics |= {"tflop_per_s": rate / 1e12, "percent_of_matmul": 100 * rate / bench.ceilings.matmul}
    return {**metrics, "operation_us": 1e6 * whole}


def _random(bench: Bench, *size: int) -> Tensor:
    return torch.randn(size, device=bench.device).to(torch.bfloat16)


def _check(q: Tensor, pool: Tensor, found: Tensor, sizes: LatentSizes, tables: Tensor) -> None:
    """Compare the last token of the last sequence with float64; raises RuntimeError."""
    latent, shape = sizes.columns[0], sizes.shape
    rows = pool[tables[-1].long().to(pool.device), 0, 0].float().double().flatten(0, 1)[: sizes.context]
    query = q[-1].double()
    query[:, latent : shape.padded_head_size - sizes.columns[1]] = 0
    expected = (torch.softmax(query @ rows.t() * shape.scale, -1) @ rows[:, :latent]).flatten()
    error = float((found[-1].double() - expected).norm() / expected.norm())
    if not error < 0.02:
        raise RuntimeError(f"attention among latents is wrong: the last token has a relative error of {error:.3g}")


GROUP = Group("latents", "latent attention", cases, limit_s=60)
