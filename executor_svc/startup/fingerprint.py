"""The numerics fingerprint: in exact mode, executors with equal fingerprints produce identical tokens."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from cadenza_common.grammar.table import GrammarEngine
from executor_svc.device.interface import Device
from executor_svc.device.kv_cache import KVCache
from executor_svc.plan.description import Fingerprint

if TYPE_CHECKING:
    from executor_svc.models.loading import LoadedModel


def fingerprint(
    loaded: LoadedModel, device: Device, kv_cache: KVCache, grammar: GrammarEngine | None = None
) -> Fingerprint:
    """Return the fingerprint of a loaded model. grammar: what follows grammars, if anything does.

    `load_model` must have probed the device: a probe may choose kernels.
    """
    isa = device.isa if loaded.recordable else device.isa_of_libraries
    kv_dtype = str(kv_cache.dtype).removeprefix("torch.")
    parts: tuple[object, ...] = (
        device.numerics,
        loaded.weights_digest.hex(),
        loaded.spec_digest.hex(),
        loaded.geometry.dtype,
        kv_dtype,
        device.kernels.name,
        isa,
        device.num_threads,
        device.versions,
    )
    if loaded.ranks is not None:
        parts += (f"{loaded.ranks.share.size} ranks",)
    if device.few_bits.forms:
        parts += (device.few_bits.forms,)
    if device.few_bits.ways:
        parts += (device.few_bits.ways,)
    versions = device.versions
    if grammar is not None:
        versions = (*versions, grammar.library)
        parts += (grammar.library, grammar.table_digest.hex())
    return Fingerprint(
        mode=device.numerics,
        weights_digest=loaded.weights_digest,
        dtype=loaded.geometry.dtype,
        kv_dtype=kv_dtype,
        kernels=device.kernels.name,
        isa=isa,
        num_threads=device.num_threads,
        versions=versions,
        digest=hashlib.sha256(repr(parts).encode()).digest(),
    )
