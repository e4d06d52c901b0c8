"""LoRA in steps of many sizes on a driver that computes nothing, as `stubbed_start`; prints the names of all compiles.

Run with the folder of the stub.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import pytest
import torch
from triton.runtime import driver

from executor_svc.gpu.kernels.lora.embedding import EmbeddingMatrices, add_embedding_lora
from executor_svc.gpu.kernels.lora.lora import add_lora, workspace_size
from executor_svc.gpu.kernels.lora.places import LoraPlaces, LoraShape
from executor_svc.gpu.kernels.lora.replaced import ReplacedPlaces, replace_embeddings, replace_logits
from executor_svc.gpu.kernels.lora.tables import FEW_ROWS, RowTable, sort_rows, sort_tokens
from executor_svc.gpu.kernels.slots.slots import StepBuffers, StepSizes
from tests.executor_svc.gpu.stubbed_start import LIBRARY, StubbedDriver, noted_compiles

CPU, DTYPE = torch.device("cpu"), torch.bfloat16
MOST = 2 * FEW_ROWS
SHAPES = (LoraShape(256, 256, (0, 128, 192)), LoraShape(128, 256, (0,)), LoraShape(2560, 16, (0,)))


def main(stub_folder: str) -> None:
    ctypes.CDLL(str(Path(stub_folder, LIBRARY)), mode=ctypes.RTLD_GLOBAL)
    driver.set_active(StubbedDriver())
    with pytest.MonkeyPatch.context() as patch:
        compiled = noted_compiles(patch)
        for max_loras, max_rank in ((1, 1), (5, 64)):
            run_steps(max_loras, max_rank)
    print(json.dumps(compiled))


def run_steps(max_loras: int, max_rank: int) -> None:
    """Run steps of all kinds of sizes: 1, a multiple of 16, odd; few rows and many."""
    buffers = StepBuffers.empty(StepSizes(MOST, MOST, 0, 0), 1, CPU)
    words = torch.full((MOST + 1,), -1, dtype=torch.int32)
    token_places = torch.full((MOST,), -1, dtype=torch.int32)
    tokens, table = torch.zeros(MOST + 1, dtype=torch.int64), RowTable.empty(MOST, max_loras, CPU)
    linears = [LoraPlaces.empty(shape, max_loras, max_rank, DTYPE, CPU) for shape in SHAPES]
    workspace = torch.empty(max(workspace_size(shape, max_rank, MOST) for shape in SHAPES))
    embedding = EmbeddingMatrices(256, max_loras, max_rank, DTYPE, CPU)
    replaced = ReplacedPlaces(256, 48, max_loras, DTYPE, CPU)
    for count in (1, 2, 16, 33, FEW_ROWS, FEW_ROWS + 1, MOST):
        for num_seqs in {1, count}:
            # State of the slots and indexes may begin anywhere.
            for first in (0, 1):
                sort_tokens(buffers, StepSizes(count, num_seqs, 0, 0), words[first:], token_places, table)
        for first in (0, 1):
            sort_rows(token_places, tokens[first : first + count], table)
            y = torch.zeros(count, 256, dtype=DTYPE)
            replace_embeddings(tokens[first : first + count], replaced, table, y)
            add_embedding_lora(tokens[first : first + count], embedding, table, workspace, y)
            replace_logits(y, replaced, table, torch.zeros(count, 48))
        for places in linears:
            x = torch.zeros(count, places.shape.in_features, dtype=DTYPE)
            y = torch.zeros(count, places.shape.out_features, dtype=DTYPE)
            add_lora(x, places, table, workspace, y)


if __name__ == "__main__":
    main(*sys.argv[1:])
