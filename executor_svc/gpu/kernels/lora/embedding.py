"""LoRA beside a table of embeddings: y += scale * (a[token] @ b.T), with the same `expand` as linears.

a has a row for each token of the vocabulary. Its memory is taken when an adapter is loaded, as few adapters change the
table: the kernel reads its address at the adapter's place.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.gpu.kernels.lora.expand import expand
from executor_svc.gpu.kernels.lora.places import RANKS, LoraPlaces, LoraShape, Pair
from executor_svc.gpu.kernels.lora.tables import TILE_ROWS, TILE_WORDS, RowTable, num_tiles, tile_rows
from executor_svc.gpu.kernels.rows import DTYPES, check, check_rows
from executor_svc.gpu.kernels.variant import Variant

_TILE_WORDS = tl.constexpr(TILE_WORDS)
_WARPS = 4


class EmbeddingPlaces:
    """The matrices of the adapters of a table of embeddings."""

    def __init__(
        self, vocabulary: int, hidden: int, max_loras: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Take the memory of all b, and of addresses. Raises ValueError naming the argument."""
        self.vocabulary, self.dtype = vocabulary, dtype
        self.products = LoraPlaces.empty(LoraShape(0, hidden, (0,)), max_loras, max_rank, dtype, device)
        self.addresses = torch.zeros(max_loras, dtype=torch.int64, device=device)
        """[max_loras]: of each a [vocabulary, r]; without meaning where the rank is 0."""
        self._held: dict[int, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Memory of all b, and of the a of the adapters that are loaded."""
        return self.products.num_bytes + sum(each.nbytes for each in self._held.values())

    def load(self, place: int, a: Tensor, b: Tensor, scale: float) -> None:
        """Put a [vocabulary, r] and b [hidden, r] in a place, rounded to its dtype; conditions as in `LoraPlaces.load`.

        Raises ValueError, before anything is written, for matrices that do not fit.
        """
        if a.dim() != 2 or a.shape[0] != self.vocabulary or a.shape[1] != b.shape[1]:
            raise ValueError(f"a {list(a.shape)}, b {list(b.shape)}: a must be [{self.vocabulary}, r]")
        self.products.load(place, [Pair(a.new_empty(a.shape[1], 0), b, scale, 0)])
        kept = a.to(self.addresses.device, self.dtype, copy=True, memory_format=torch.contiguous_format)
        self._held[place] = kept
        self.addresses[place].fill_(kept.data_ptr())

    def clear(self, place: int) -> None:
        """Take the adapter out of a place, and free its a.

        Steps that were enqueued before still read it: PyTorch gives freed memory to later work of its stream only.
        """
        self.products.clear(place)
        self._held.pop(place, None)


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
    token_ids: Tensor, places: EmbeddingPlaces, table: RowTable, workspace: Tensor, y: Tensor
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
