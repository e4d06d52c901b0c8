"""Norms, rotation, activation and sampling in an 8B model's sizes: bytes moved per second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu.cases import Bench, Case, Group, Metrics
from benchmarks.gpu.kernels.attention.attention_launch import Sizes, kernels_of
from executor_svc.device.kernels import HeadNorms, Rope

_EPS = 1e-5
_MAX_POSITION = 4096
_HISTORY = 1024


@dataclass(frozen=True, slots=True)
class Widths:
    """Sizes of a model."""

    hidden: int = 4096
    intermediate: int = 14336
    vocab: int = 128256
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128

    @property
    def qkv(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_size


_8B = Widths()
_TINY = Widths(64, 96, 512, 4, 1, 64)
Work = tuple[Callable[[], None], int]
"""The measured launch, and the bytes that it has to move."""


def cases(tiny: bool) -> Sequence[Case]:
    """Decode batches and a long prompt; kernels that work on logits get decode batches only."""
    widths = _TINY if tiny else _8B
    tokens, rows = ((3,), (3,)) if tiny else ((64, 256, 8192), (1, 64, 256))
    of_tokens = {"add_rms_norm": _norm, "rope_write_kv": _rope, "rope_write_kv normed": _normed_rope, "silu_mul": _silu}
    of_rows = {
        "argmax": _argmax, "sample greedy": _greedy, "sample temperature": _random_sample,
        "sample top-k top-p": _filtered, "sample penalties": _penalized,
    }  # fmt: skip
    return [
        _case(name, make, count, widths)
        for makers, counts in ((of_tokens, tokens), (of_rows, rows))
        for count in counts
        for name, make in makers.items()
    ]


def _case(name: str, make: Callable[[Bench, int, Widths], Work], rows: int, widths: Widths) -> Case:
    def run(bench: Bench) -> Metrics:
        work, size = make(bench, rows, widths)
        seconds = bench.clock.seconds(work)
        return {
            "us": 1e6 * seconds,
            "gb_per_s": size / seconds / 1e9,
            "percent_of_copy": 100 * size / seconds / bench.ceilings.copy,
        }

    return Case(f"{name}, {rows} rows", {"kernel": name, "rows": rows}, run, 4.0)


def _random(bench: Bench, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=bench.device).to(torch.bfloat16)


def _norm(bench: Bench, rows: int, widths: Widths) -> Work:
    x, residual, weight = (_random(bench, *shape) for shape in ((rows, widths.hidden),) * 2 + ((widths.hidden,),))
    kernels = kernels_of(bench)
    with kernels.recording() as recording:
        kernels.add_rms_norm(x, residual, weight, _EPS)
        program = recording.program()
    return lambda: program.run(rows=rows), 4 * 2 * x.numel()


def _silu(bench: Bench, rows: int, widths: Widths) -> Work:
    gate_up, kernels = _random(bench, rows, 2 * widths.intermediate), kernels_of(bench)
    with kernels.recording() as recording:
        kernels.silu_mul(gate_up)
        program = recording.program()
    return lambda: program.run(rows=rows), 3 * 2 * rows * widths.intermediate


def _rope(bench: Bench, rows: int, widths: Widths) -> Work:
    return _rotation(bench, rows, widths, None)


def _normed_rope(bench: Bench, rows: int, widths: Widths) -> Work:
    q, k = (_random(bench, widths.head_size) for _ in range(2))
    return _rotation(bench, rows, widths, HeadNorms(q, k, _EPS))


def _rotation(bench: Bench, rows: int, widths: Widths, norms: HeadNorms | None) -> Work:
    """Reads queries, keys and values; writes queries in place, keys and values to a slot of a block each."""
    sizes = Sizes(
        rows, 1, num_kv_heads=widths.num_kv_heads, group=widths.num_heads // widths.num_kv_heads,
        head_size=widths.head_size,
    )  # fmt: skip
    kernels, shape = kernels_of(bench), sizes.shape
    qkv = _random(bench, rows, widths.qkv)
    angles = 6.28 * torch.rand(_MAX_POSITION, widths.head_size, device=bench.device)
    rope = Rope(
        angles.cos().to(qkv.dtype),
        angles.sin().to(qkv.dtype),
        torch.randint(_MAX_POSITION, (rows,), device=bench.device),
    )
    num_blocks = -(-rows // sizes.block_size)
    cache = _random(bench, num_blocks, 2, shape.num_kv_heads, sizes.block_size, shape.head_size)
    plan = kernels.new_attention_plan(shape, sizes.block_size, rows, rows)
    starts, table = torch.arange(rows + 1, dtype=torch.int32), torch.zeros(rows, 1, dtype=torch.int32)
    plan.fill(torch.randperm(rows), starts, torch.ones(rows, dtype=torch.int32), table)
    with kernels.recording() as recording:
        kernels.rope_write_kv(qkv, rope, cache, shape, plan, norms)
        program = recording.program()
    return lambda: program.run(rows=rows), 2 * 2 * qkv.numel()


def _logits(bench: Bench, rows: int, vocab: int) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab, device=bench.device)


def _argmax(bench: Bench, rows: int, widths: Widths) -> Work:
    logits, kernels = _logits(bench, rows, widths.vocab), kernels_of(bench)
    with kernels.recording() as recording:
        kernels.argmax(logits)
        program = recording.program()
    return lambda: program.run(rows=rows), 4 * logits.numel()


def _greedy(bench: Bench, rows: int, widths: Widths) -> Work:
    return _sampling(bench, rows, widths, {}, drawn=False, filtered=False, edited=False)


def _random_sample(bench: Bench, rows: int, widths: Widths) -> Work:
    return _sampling(bench, rows, widths, {"temperature": 0.8}, drawn=True, filtered=False, edited=False)


def _filtered(bench: Bench, rows: int, widths: Widths) -> Work:
    options = {"temperature": 0.8, "top_k": 50, "top_p": 0.9}
    return _sampling(bench, rows, widths, options, drawn=True, filtered=True, edited=False)


def _penalized(bench: Bench, rows: int, widths: Widths) -> Work:
    options = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.1, "frequency_penalty": 0.1}
    return _sampling(bench, rows, widths, options, drawn=True, filtered=True, edited=True)


def _sampling(
    bench: Bench, rows: int, widths: Widths, options: dict[str, float], drawn: bool, filtered: bool, edited: bool
) -> Work:
    """All launches that sample a step; bytes count the logits once, though some launches read them again."""
    from cadenza_common.plan.sampling import SequenceSampling
    from executor_svc.gpu.kernels.sampling.sampling import sample
    from executor_svc.gpu.kernels.sampling.state import SamplingState, SamplingWorkspace
    from executor_svc.gpu.sampling.state import pack_record

    device, vocab = bench.device, widths.vocab
    logits = _logits(bench, rows, vocab)
    state = SamplingState.empty(rows, vocab, _HISTORY, 16, device)
    for row in range(rows):
        record = pack_record(SequenceSampling(seed=row, **options))  # type: ignore[arg-type]
        state.records[row] = torch.from_numpy(record.view("int32")).to(device)
    state.num_tokens.fill_(_HISTORY // 2)
    workspace = SamplingWorkspace.empty(rows, vocab, device)
    every = torch.arange(rows, dtype=torch.int32, device=device)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    errors = torch.empty(rows, dtype=torch.int32, device=device)

    def work() -> None:
        sample(
            logits, every, every, state, workspace, tokens, errors, edited=edited, drawn=drawn, filtered=filtered
        )  # fmt: skip

    work()
    if bool((errors != 0).any()) or bool((tokens < 0).any()):
        raise RuntimeError("sampling reported an error")
    return work, 4 * logits.numel()


GROUP = Group("elementwise", "norms, rotation, activation, sampling", cases, limit_s=60)
