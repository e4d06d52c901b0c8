"""LoRA beside a table of embeddings: y += scale * (a[token] @ b.T), with the same `expand` as linears.

a has a row for each token of the vocabulary, and few adapters have one: it stays in pinned memory of the host, where
the kernel reads the ranks of a step's tokens through the address at the adapter's place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.device.adapters import EmbeddingPair
from executor_svc.gpu.kernels.lora.expand import expand
from executor_svc.gpu.kernels.lora.places import (
    RANKS,
    LoraPair,
    LoraPlaces,
    LoraShape,
    PackedPairs,
    Taker,
    piece_bytes,
)
from executor_svc.gpu.kernels.lora.tables import TILE_ROWS, TILE_WORDS, RowTable, num_tiles, tile_rows
from executor_svc.gpu.kernels.rows import DTYPES, check, check_rows
from executor_svc.gpu.kernels.variant import Variant

_TILE_WORDS = tl.constexpr(TILE_WORDS)
_WARPS = 4


@dataclass(frozen=True, slots=True)
class PackedEmbedding:
    """The pair of an adapter, in the host's memory."""

    products: PackedPairs
    a: Tensor
    """[vocabulary, r], which steps read where it is."""
    address: Tensor
    """[1] int64: of a."""


class EmbeddingMatrices:
    """The matrices of the adapters of a table of embeddings."""

    def __init__(self, hidden: int, max_loras: int, max_rank: int, dtype: torch.dtype, device: torch.device) -> None:
        """Take the memory of all b, and of addresses. Raises ValueError naming the argument."""
        self.dtype = dtype
        self.products = LoraPlaces.empty(LoraShape(0, hidden, (0,)), max_loras, max_rank, dtype, device)
        self.addresses = torch.zeros(max_loras, dtype=torch.int64, device=device)
        """[max_loras]: of each a [vocabulary, r]; without meaning where the rank is 0."""

    def packed_bytes(self, pair: EmbeddingPair) -> int:
        """Return the memory that `pack` takes; raises ValueError for matrices that do not fit."""
        self.products.check([_pair(pair)])
        return self.bytes_of_rank(*pair.a.shape)

    def bytes_of_rank(self, vocabulary: int, rank: int) -> int:
        """Return the memory that `pack` takes of a pair of this rank for a table of so many rows."""
        pieces = ((self.dtype, (vocabulary, rank)), (torch.int64, (1,)))
        return self.products.packed_bytes([rank]) + sum(piece_bytes(dtype, *shape) for dtype, shape in pieces)

    def pack(self, pair: EmbeddingPair, memory: Taker) -> PackedEmbedding:
        """Copy a pair to memory, rounded to the dtype of the places; the memory of a is read by steps."""
        products = self.products.pack([_pair(pair)], memory)
        a = memory.take(self.dtype, *pair.a.shape).copy_(pair.a)
        return PackedEmbedding(products, a, memory.take(torch.int64, 1).fill_(a.data_ptr()))

    def set(self, place: int, packed: PackedEmbedding | None) -> None:
        """Enqueue the copy of an adapter to a place, as `LoraPlaces.set`. Its a must live until no step reads it."""
        self.products.set(place, None if packed is None else packed.products)
        if packed is not None:
            self.addresses[place : place + 1].copy_(packed.address, non_blocking=True)


def _pair(pair: EmbeddingPair) -> LoraPair:
    """Return a pair as one part of a linear of no inputs; raises ValueError for different ranks."""
    if pair.a.dim() != 2 or pair.a.shape[1] != pair.b.shape[1]:
        raise ValueError(f"a {list(pair.a.shape)}, b {list(pair.b.shape)}: a must be [vocabulary, r], b [hidden, r]")
    return LoraPair(pair.a.new_empty(pair.a.shape[1], 0), pair.b, pair.scale, 0)


@triton.jit(do_not_specialize=["blocks"], do_not_specialize_on_alignment=["token_ids"])
def _take_ranks(
    token_ids, addresses, ranks, rows, tiles, sums, blocks, NUMBER: tl.constexpr, ROWS: tl.constexpr,
    RANKS: tl.constexpr,
):  # fmt: skip
    """Copy 16 ranks of a of the tokens of a tile of rows; NUMBER: the type of a."""
    tile = tiles + tl.program_id(0) * _TILE_WORDS
    place = tl.load(tile)
    first = tl.load(tile + 1)
    count = tl.load(tile + 2)
    rank = tl.load(ranks + place)
    start = tl.program_id(1) * RANKS
    if (count > 0) & (start < rank):
        lane = tl.arange(0, ROWS)
        which = start + tl.arange(0, RANKS)
        row = tl.load(rows + first + lane, lane < count, other=0)
        token = tl.load(token_ids + row, lane < count, other=-1)
        a = tl.load(addresses + place).to(tl.pointer_type(NUMBER))
        inside = (token >= 0)[:, None] & (which < rank)[None, :]
        some = tl.load(a + token[:, None] * rank + which[None, :], inside, other=0.0)
        at = (first + lane).to(tl.int64) * (blocks * RANKS)
        tl.store(sums + at[:, None] + which[None, :], some.to(tl.float32), (lane < count)[:, None])


def embedding_workspace_size(max_rank: int, max_rows: int) -> int:
    """Return the float32 numbers that `add_embedding_lora` needs as workspace."""
    return max_rows * -(-max_rank // RANKS) * RANKS


def add_embedding_lora(
    token_ids: Tensor, places: EmbeddingMatrices, table: RowTable, workspace: Tensor, y: Tensor
) -> None:
    """Add scale * (a[token] @ b.T) of each row's adapter to y, summed in float32 and rounded once.

    Rows and their bits as in `lora.add_lora`; nothing is added to the row of token -1.

    Args:
        token_ids: [R] int64, below the size of the vocabulary.
        places: of the table.
        table: of these R rows, sorted for exactly as many.
        workspace: float32, `embedding_workspace_size` or more numbers, with any content.
        y: [R, hidden] in the dtype of the places or float32, columns adjacent.

    Raises ValueError naming the argument.
    """
    num_rows, products = len(y), places.products
    check("token_ids", token_ids, (num_rows,), torch.int64)
    check_rows("y", y, places.dtype, torch.float32)
    if y.shape[1] != products.shape.out_features:
        raise ValueError(f"y {list(y.shape)}: must be [R, {products.shape.out_features}]")
    products.check_table(table, num_rows)
    needed = num_rows * products.blocks * RANKS
    check("workspace", workspace, (max(needed, workspace.numel()),), torch.float32)
    if num_rows:
        rows = tile_rows(num_rows)
        _take_ranks[(num_tiles(num_rows, table.max_loras), products.blocks)](
            token_ids, places.addresses, products.ranks, table.rows, table.tiles, workspace, products.blocks,
            **_constants(DTYPES[places.dtype], rows), num_warps=_WARPS, num_stages=1, enable_fp_fusion=False,
        )  # fmt: skip
        expand(workspace, 1, products, table, y)


_NUMBERS = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}


def _constants(dtype: str, rows: int) -> dict[str, Any]:
    return {"NUMBER": _NUMBERS[dtype], "ROWS": rows, "RANKS": RANKS}


def variants() -> list[Variant]:
    """Return each dtype with each tile."""
    return [_variant(dtype, rows) for dtype in DTYPES.values() for rows in TILE_ROWS]


def _variant(dtype: str, rows: int) -> Variant:
    words = dict.fromkeys(("ranks", "rows", "tiles"), "*i32")
    pointers = {"token_ids": "*i64", "addresses": "*i64", **words, "sums": "*fp32"}
    constants = _constants(dtype, rows)
    return Variant(
        name=f"lora_embedding {dtype} rows{rows}",
        kernel=_take_ranks,
        signature={**pointers, "blocks": "i32", **dict.fromkeys(constants, "constexpr")},
        constants=constants,
        divisible=tuple(name for name in pointers if name != "token_ids"),
        num_warps=_WARPS,
        num_stages=1,
        fp_fusion=False,
        no_spills=True,
        quick=(dtype, rows) == ("bf16", 16),
    )
