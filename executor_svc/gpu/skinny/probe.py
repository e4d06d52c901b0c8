"""Whether fused layers compute the same on the GPU at hand, and sooner: measured at a start, by sizes of steps."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from executor_svc.gpu.graphs import CudaGraphs
from executor_svc.gpu.kernels.skinny.tiles import ROWS
from executor_svc.gpu.kernels.slots.slots import StepInputs, StepSizes
from executor_svc.gpu.skinny.recording import PROBED, Either, EitherKernels

_log = logging.getLogger(__name__)

_CONTEXT = 1024
"""Tokens of the sequences, if there is room for so many."""
_REPLAYS = 9
_MOST_ERROR = {torch.bfloat16: 2**-5, torch.float16: 2**-8}
"""Of hidden states behind all layers, beside those of the other way: relative, by the L2 norm of a row. Both round each
intermediate result, so they may differ by as much as two orders of summation do."""

Seconds = Callable[[Callable[[], None]], float]


@torch.inference_mode()
def probe_choices(
    kernels: EitherKernels,
    hidden: Tensor,
    inputs_of: Callable[[int], StepInputs],
    run: Callable[[int], None],
    kv_layers: Sequence[Tensor],
    max_num_seqs: int,
    max_model_len: int,
    seconds: Seconds | None = None,
) -> None:
    """Let decodes of a recorded model be computed by fused layers in the sizes in which this GPU is faster so.

    To be called before any block holds KV: it writes to them.

    Args:
        kernels: that have recorded the model.
        hidden: [max_tokens, hidden]: where the model's steps leave hidden states.
        inputs_of: returns the tensors of a decode of so many sequences.
        run: enqueues keys, values and hidden states of a decode of so many sequences, from these tensors.
        kv_layers: the cache of each layer.
        max_num_seqs: of a step.
        max_model_len: of a sequence.
        seconds: measures what is enqueued; None: by graphs, on a GPU.
    """
    choices = [choice for choice in kernels.choices if choice.result.data_ptr() == hidden.data_ptr()]
    if kernels.skinny_gemms != "auto" or not choices or (seconds is None and hidden.device.type != "cuda"):
        return
    faster = []
    for rows in (size for size in PROBED if size <= min(ROWS, max_num_seqs)):
        inputs = inputs_of(rows)
        if _fill(inputs, kv_layers, max_model_len):
            ratio = _ratio(choices, hidden[:rows], lambda rows=rows: run(rows), seconds or _by_graph)  # type: ignore[misc]
            if ratio is None:
                _log.warning("steps of %d rows by fused layers have other results on this GPU", rows)
            else:
                _log.info("steps of %d rows by fused layers take %.2f of the time", rows, ratio)
            if ratio is not None and ratio < 1.0:
                faster.append(rows)
            inputs.slot_mapping.fill_(-1)
    _use(choices, faster)


def _use(choices: Sequence[Either], sizes: Sequence[int]) -> None:
    for choice in choices:
        choice.sizes = tuple(sizes)


def _fill(inputs: StepInputs, kv_layers: Sequence[Tensor], max_model_len: int) -> bool:
    """Set a decode of sequences with random keys and values in blocks of their own; return whether there are enough."""
    rows, (num_blocks, _, _, block_size, _) = len(inputs.seq_lens), kv_layers[0].shape
    tables = inputs.block_tables.view(rows, -1, inputs.block_tables.shape[-1])
    each = min(num_blocks // (rows * tables.shape[1]), tables.shape[2], -(-_CONTEXT // block_size))
    length = min(each * block_size, max_model_len)
    if length < 1:
        return False
    generator = torch.Generator(kv_layers[0].device).manual_seed(rows)
    for layer in kv_layers:
        layer[: rows * tables.shape[1] * each].normal_(generator=generator)
    blocks = torch.arange(rows * tables.shape[1] * each, dtype=torch.int32, device=tables.device)
    tables[:, :, :each] = blocks.view(rows, tables.shape[1], each)
    last = tables[:, :, (length - 1) // block_size].long() * block_size + (length - 1) % block_size
    inputs.slot_mapping.view(-1, inputs.slot_mapping.shape[-1])[:, :rows] = last.t()
    inputs.token_ids.copy_(torch.arange(rows))
    inputs.positions.fill_(length - 1)
    inputs.rope_lens.fill_(length)
    inputs.query_start_loc.copy_(torch.arange(rows + 1))
    inputs.seq_lens.fill_(length)
    return True


def _ratio(choices: Sequence[Either], hidden: Tensor, run: Callable[[], None], seconds: Seconds) -> float | None:
    """Return the time of fused layers over that of others; None if their results are not the same."""
    results, times = [], []
    for sizes in ((), PROBED):
        _use(choices, sizes)
        run()
        results.append(hidden.float())
        times.append(seconds(run))
    apart, fused = results
    error = (fused - apart).norm(dim=1) / apart.norm(dim=1)
    # Not for NaN, either.
    return times[1] / times[0] if bool((error <= _MOST_ERROR[hidden.dtype]).all()) else None


def _by_graph(run: Callable[[], None]) -> float:
    """Return the seconds of a graph of what is enqueued, the median of some replays."""
    sizes = StepSizes.decode(1)
    graphs, times = CudaGraphs([sizes], lambda _: run()), []
    for _ in range(_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graphs.replay(sizes)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return float(statistics.median(times))
