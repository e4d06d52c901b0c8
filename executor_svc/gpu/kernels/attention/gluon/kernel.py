"""Attention of prompts on a Hopper GPU, in Gluon: a warp copies, two warpgroups multiply, each beside its own softmax.

As in FlashAttention-3 (Shah et al., 2024): a warpgroup computes the softmax of one tile of keys while its product of
the tile before runs, and the other warpgroup's products fill what is left. Sums have the order of `tile.weigh`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from executor_svc.gpu.kernels.attention.tile import (
    capped,
    divided,
    on_border,
    row_places,
    sink_exponents,
    visible,
    weights_of,
    with_sink,
)
from executor_svc.gpu.kernels.attention.work import UNSPECIALIZED, first_row_of, keys_of, prompt_of, seen_values


@gluon.jit
def _keys_there(bars, stage, STAGES: gl.constexpr):
    return bars.index(stage)


@gluon.jit
def _keys_free(bars, stage, STAGES: gl.constexpr):
    return bars.index(STAGES + stage)


@gluon.jit
def _values_there(bars, stage, STAGES: gl.constexpr):
    return bars.index(2 * STAGES + stage)


@gluon.jit
def _values_free(bars, stage, STAGES: gl.constexpr):
    return bars.index(3 * STAGES + stage)


@gluon.jit
def _last_values(bars, STAGES: gl.constexpr):
    """The barrier of copied values that are not all seen: consumers wait for what the producer makes of them."""
    return bars.index(4 * STAGES)


@gluon.jit
def _rows_of(tile, table, high, head, block_rows, TILE: gl.constexpr, BLOCK: gl.constexpr):
    """Return the pool's first row of each block of a tile of keys: read at once, as each takes long."""
    rows = ()
    for part in gl.static_range(TILE // BLOCK):
        row = first_row_of(tile * (TILE // BLOCK) + part, table, high, head, block_rows, BLOCK)
        # Gluon unpacks nothing into a tuple.
        rows = rows + (row,)  # type: ignore[assignment]  # noqa: RUF005
    return rows


@gluon.jit
def _copy(pool, bar, into, rows, further, TILE: gl.constexpr, BLOCK: gl.constexpr):
    """Have the copy engine fetch a tile of keys, or of values `further` rows behind them, block by block."""
    mbarrier.expect(bar, TILE // BLOCK * pool.block_type.nbytes)
    for part in gl.static_range(TILE // BLOCK):
        tma.async_copy_global_to_shared(pool, [rows[part] + further, 0], bar, into.slice(part * BLOCK, BLOCK))


@gluon.jit
def _clear_unseen(values, first_key, high, TILE: gl.constexpr, HEAD_SIZE: gl.constexpr):
    """Write zeros in the place of values of keys from `high` on."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_SIZE, HEAD_SIZE // 8], [1, 1], [1, 0])
    for part in gl.static_range(TILE // 8):
        if first_key + (part + 1) * 8 > high:
            some = values.slice(part * 8, 8)
            keys = first_key + part * 8 + gl.arange(0, 8, gl.SliceLayout(1, layout))
            some.store(seen_values(some.load(layout), keys[:, None], high))
    fence_async_shared()


@gluon.jit
def _produce(
    pool, keys, values, bars, table, high, head, block_rows, value_rows, TILE: gl.constexpr, BLOCK: gl.constexpr,
    HEAD_SIZE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Have all tiles fetched, in order, each into a stage that both consumers have left."""
    num_tiles = gl.cdiv(high, TILE)
    for tile in range(num_tiles):
        stage = tile % STAGES
        before = tile // STAGES & 1 ^ 1
        rows = _rows_of(tile, table, high, head, block_rows, TILE, BLOCK)
        mbarrier.wait(_keys_free(bars, stage, STAGES), before)
        _copy(pool, _keys_there(bars, stage, STAGES), keys.index(stage), rows, 0, TILE, BLOCK)
        mbarrier.wait(_values_free(bars, stage, STAGES), before)
        into = values.index(stage)
        if (tile + 1) * TILE <= high:
            _copy(pool, _values_there(bars, stage, STAGES), into, rows, value_rows, TILE, BLOCK)
        else:
            last = _last_values(bars, STAGES)
            _copy(pool, last, into, rows, value_rows, TILE, BLOCK)
            mbarrier.wait(last, 0)
            _clear_unseen(into, tile * TILE, high, TILE, HEAD_SIZE)
            mbarrier.arrive(_values_there(bars, stage, STAGES), count=1)


@gluon.jit
def _scores(query, keys, bars, tile, TILE: gl.constexpr, STAGES: gl.constexpr, layout: gl.constexpr):
    """Begin the product of queries and a tile of keys, once that is there."""
    stage = tile % STAGES
    mbarrier.wait(_keys_there(bars, stage, STAGES), tile // STAGES & 1)
    rows: gl.constexpr = query.shape[0]
    nothing = gl.zeros([rows, TILE], gl.float32, layout)
    return warpgroup_mma(query, keys.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _seen(
    scores, tile, positions, inner, clear_to, TILE: gl.constexpr, HAS_SOFTCAP: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """Return a tile's scores, capped and masked."""
    if HAS_SOFTCAP:
        scores = capped(scores, inner)
    if on_border(tile, 0, clear_to):
        keys = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(0, layout))
        scores = visible(scores, keys[None, :], positions[:, None], 0, False)
    return scores


@gluon.jit
def _attend(
    query, keys, values, bars, num_tiles, positions, inner, outer, clear_to, dtype: gl.constexpr,
    TILE: gl.constexpr, HEAD_SIZE: gl.constexpr, STAGES: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    of_scores: gl.constexpr, of_sums: gl.constexpr,
):  # fmt: skip
    """Return weighted values, greatest scores and sums of weights of a consumer's rows, over one tile or more.

    The last two are in the layout of the first one's rows.
    """
    of_rows: gl.constexpr = gl.SliceLayout(1, of_sums)
    operand: gl.constexpr = gl.DotOperandLayout(0, of_sums, 2)
    rows: gl.constexpr = query.shape[0]
    acc = gl.zeros([rows, HEAD_SIZE], gl.float32, of_sums)
    greatest = gl.full([rows], float("-inf"), gl.float32, gl.SliceLayout(1, of_scores))
    total = gl.zeros([rows], gl.float32, gl.SliceLayout(1, of_scores))
    if num_tiles > 0:
        scores = warpgroup_mma_wait(0, deps=[_scores(query, keys, bars, 0, TILE, STAGES, of_scores)])
        mbarrier.arrive(_keys_free(bars, 0, STAGES), count=1)
        scores = _seen(scores, 0, positions, inner, clear_to, TILE, HAS_SOFTCAP, of_scores)
        weights, shrink, greatest, total = weights_of(scores, greatest, total, outer)
        weights = gl.convert_layout(weights.to(dtype), operand)
        mbarrier.wait(_values_there(bars, 0, STAGES), 0)
        for tile in range(1, num_tiles):
            stage = tile % STAGES
            former = (tile - 1) % STAGES
            product = _scores(query, keys, bars, tile, TILE, STAGES, of_scores)
            sums = warpgroup_mma(weights, values.index(former), acc, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[product])
            mbarrier.arrive(_keys_free(bars, stage, STAGES), count=1)
            scores = _seen(scores, tile, positions, inner, clear_to, TILE, HAS_SOFTCAP, of_scores)
            added, shrink, greatest, total = weights_of(scores, greatest, total, outer)
            # This wait keeps ptxas from moving the one for the sums before the softmax, which is to run beside them.
            mbarrier.wait(_values_there(bars, stage, STAGES), tile // STAGES & 1)
            acc = warpgroup_mma_wait(0, deps=[sums])
            mbarrier.arrive(_values_free(bars, former, STAGES), count=1)
            acc = acc * gl.convert_layout(shrink, of_rows)[:, None]
            weights = gl.convert_layout(added.to(dtype), operand)
        sums = warpgroup_mma(weights, values.index((num_tiles - 1) % STAGES), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[sums])
    return acc, gl.convert_layout(greatest, of_rows), gl.convert_layout(total, of_rows)


@gluon.jit
def _consume(
    part: gl.constexpr, q, out, sinks, queries, keys, values, bars, head, first_token, count, position, high,
    clear_to, q_stride, out_stride, group, scale, softcap, TILE: gl.constexpr, HEAD_SIZE: gl.constexpr,
    STAGES: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_SINKS: gl.constexpr,
):  # fmt: skip
    """Compute a consumer's rows of the query tile: a warpgroup's, by their part."""
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    of_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_SIZE, 16])
    of_lines: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_SIZE, HEAD_SIZE // 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = queries.shape[1]
    query = queries.index(part)
    rows = part * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, of_lines))
    token = rows // group
    there = (token < count)[:, None]
    columns = gl.arange(0, HEAD_SIZE, gl.SliceLayout(0, of_lines))[None, :]
    places = row_places(q, rows, token, columns, head, first_token, q_stride, group, HEAD_SIZE)
    query.store(gl.load(places, there, 0.0))
    fence_async_shared()
    score_rows = part * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, of_scores))
    outer = gl.full([ROWS], softcap if HAS_SOFTCAP else scale, gl.float32, gl.SliceLayout(1, of_scores))
    acc, greatest, total = _attend(
        query, keys, values, bars, gl.cdiv(high, TILE), position + score_rows // group, scale, outer, clear_to,
        q.dtype.element_ty, TILE, HEAD_SIZE, STAGES, HAS_SOFTCAP, of_scores, of_sums,
    )  # fmt: skip
    if HAS_SINKS:
        sum_rows = part * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, of_sums))
        exponents = sink_exponents(sinks, sum_rows, head, group, softcap, HAS_SOFTCAP)
        acc, total = with_sink(acc, greatest * (softcap if HAS_SOFTCAP else scale), total, exponents)
    # Through the memory of the queries, which are no longer needed: whole lines are written then.
    query.store(divided(acc, total, head, None, False).to(out.dtype.element_ty))
    places = row_places(out, rows, token, columns, head, first_token, out_stride, group, HEAD_SIZE)
    gl.store(places, query.load(of_lines), there)


@gluon.jit(**UNSPECIALIZED)
def prompt_kernel(
    q, cache, query_start_loc, seq_lens, block_tables, out, sinks, q_stride, table_stride, num_seqs, num_tiles,
    num_kv_heads, block_rows, value_rows, heads_at_once, group, scale, softcap, HEAD_SIZE: gl.constexpr,
    ROWS: gl.constexpr, TILE: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    HAS_SINKS: gl.constexpr,
):  # fmt: skip
    """Compute one query tile of one KV head; cache: a descriptor of all rows [BLOCK, HEAD_SIZE] of the pool."""
    head, sequence, first_token, count, position, length = prompt_of(
        gl.program_id(0), query_start_loc, seq_lens, num_seqs, num_tiles, heads_at_once, ROWS // group
    )
    _, seen, _, clear_to = keys_of(position, count, length, 0, TILE, False)
    high = gl.where(count > 0, seen, 0)
    table = block_tables + sequence.to(gl.int64) * table_stride
    element: gl.constexpr = q.dtype.element_ty
    queries = gl.allocate_shared_memory(element, [2, ROWS // 2, HEAD_SIZE], cache.layout)
    keys = gl.allocate_shared_memory(element, [STAGES, TILE, HEAD_SIZE], cache.layout)
    values = gl.allocate_shared_memory(element, [STAGES, TILE, HEAD_SIZE], cache.layout)
    bars = gl.allocate_shared_memory(gl.int64, [4 * STAGES + 1, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(_keys_there(bars, stage, STAGES), count=1)
        mbarrier.init(_keys_free(bars, stage, STAGES), count=2)
        mbarrier.init(_values_there(bars, stage, STAGES), count=1)
        mbarrier.init(_values_free(bars, stage, STAGES), count=2)
    mbarrier.init(_last_values(bars, STAGES), count=1)
    fence_async_shared()
    out_stride = num_kv_heads * group * HEAD_SIZE
    gl.warp_specialize(
        [
            (_consume, (
                gl.constexpr(0), q, out, sinks, queries, keys, values, bars, head, first_token, count, position, high,
                clear_to, q_stride, out_stride, group, scale, softcap, TILE, HEAD_SIZE, STAGES,
                HAS_SOFTCAP, HAS_SINKS,
            )),
            (_consume, (
                gl.constexpr(1), q, out, sinks, queries, keys, values, bars, head, first_token, count, position, high,
                clear_to, q_stride, out_stride, group, scale, softcap, TILE, HEAD_SIZE, STAGES,
                HAS_SOFTCAP, HAS_SINKS,
            )),
            (_produce, (
                cache, keys, values, bars, table, high, head, block_rows, value_rows, TILE, BLOCK, HEAD_SIZE, STAGES,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
