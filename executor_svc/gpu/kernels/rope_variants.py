"""The configurations of the kernel of `rope` that are compiled ahead of time."""

from __future__ import annotations

from itertools import product

from executor_svc.gpu.kernels.rope import launch_options, rope_constants, rope_write_kv_kernel
from executor_svc.gpu.kernels.rows import DTYPES, variant
from executor_svc.gpu.kernels.variant import ALL_ARCHS, Variant

_FP8_ARCHS = (90,)
_SHAPES = (
    # heads, KV heads, head size, rotated columns
    (16, 8, 128, 128),
    (9, 3, 64, 64),
    (14, 2, 64, 64),
    (32, 32, 80, 80),
    (32, 32, 80, 32),
    (32, 32, 96, 96),
    (32, 8, 128, 128),
    (64, 8, 128, 128),
    (8, 4, 256, 256),
    (8, 1, 512, 512),
)
_QUICK = (32, 32, 80, 32)
_BLOCK_SIZE = 16
_AFTER, _WIDE, _MULTIPLIED = " after", " wide angles", " multiplied"
_VALUES, _KEYS, _QUERIES = " values", " keys are values", " queries alone"
_SPECIAL = (_AFTER, _WIDE, _MULTIPLIED)
_GATED = " beside gates"
_QWEN_3_5 = (16, 4, 256, 64)
_GEMMA_4 = ((32, 16, 256, 256), (32, 4, 512, 512), (8, 1, 256, 256), (8, 1, 512, 512))


def variants() -> list[Variant]:
    """Return the variants compiled ahead of time: all options for the first shapes, usual ones for the others.

    Steps write queries in place.
    """
    found = []
    for shape in _SHAPES:
        every = shape in _SHAPES[:2]
        for dtype in DTYPES.values() if every else ("bf16",):
            for weight in dict.fromkeys((None, dtype, "fp32")) if every else (None, dtype):
                for cache in (dtype, "fp8e4nv"):
                    for in_place in (False, True) if every else (True,):
                        found.append(_variant(shape, dtype, weight, cache, in_place))
        for special in _SPECIAL if every else ():
            for dtype in DTYPES.values():
                found.append(_variant(shape, dtype, dtype if special == _AFTER else None, dtype, True, special))
    for shape, special in product(_GEMMA_4, (_VALUES, _KEYS, _QUERIES)):
        found += [_variant(shape, "bf16", "fp32", cache, True, special) for cache in ("bf16", "fp8e4nv")]
    found += [_variant(_QWEN_3_5, "bf16", "fp32", cache, True, _GATED) for cache in ("bf16", "fp8e4nv")]
    return found


def _variant(
    shape: tuple[int, int, int, int], dtype: str, weight: str | None, cache: str, in_place: bool, special: str = ""
) -> Variant:
    num_heads, kv_heads, head_size, rotated = shape
    scaled = cache != dtype
    constants = rope_constants(
        heads=(num_heads, kv_heads),
        head_size=head_size,
        rotated=rotated,
        block_size=_BLOCK_SIZE,
        in_place=in_place,
        by_position=True,
        normed=0 if weight is None else head_size,
        scaled=scaled,
        norms_after=special == _AFTER,
        multiplied=special == _MULTIPLIED,
        kv_parts={_KEYS: 1, _QUERIES: 0}.get(special, 2),
        values_normed=special in (_VALUES, _KEYS),
        heads_between=num_heads if special == _GATED else 0,
    )
    signature = dict.fromkeys(("qkv", "q_out"), f"*{dtype}")
    signature |= dict.fromkeys(("cos", "sin"), "*fp32" if special == _WIDE else f"*{dtype}")
    signature |= {"positions": "*i64", "slots": "*i64", "kv_layer": f"*{cache}"}
    signature |= dict.fromkeys(("q_weight", "k_weight", "v_weight"), f"*{weight or dtype}") | {"eps": "fp32"}
    signature |= dict.fromkeys(("k_scale", "v_scale"), "*fp32" if scaled else f"*{dtype}")
    signature |= {"query_scales": f"*{dtype}", "block_rows": "i32", "value_rows": "i32"}
    norms = "" if weight is None else " norms" if weight == dtype else " wide norms"
    chosen = f"{norms}{special}{' fp8 cache' if scaled else ''}{' in place' if in_place else ''}"
    quick = not special and shape == _QUICK and (dtype, weight, in_place) == ("bf16", "bf16", True)
    name = f"rope_write_kv q{num_heads} kv{kv_heads} head{head_size} rotated{rotated} {dtype}{chosen}"
    archs = _FP8_ARCHS if scaled else ALL_ARCHS
    return variant(
        name, rope_write_kv_kernel, signature, constants, launch_options(constants), quick and not scaled, archs
    )
