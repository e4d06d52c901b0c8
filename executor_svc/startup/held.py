"""What each rank of a divided model has room for, and what all of them hold: the least of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import psutil

from executor_svc.config import ExecutorConfig
from executor_svc.device.interface import Device
from executor_svc.device.kv_cache import DraftLayers, KVCache
from executor_svc.device.kv_layout import LayerKV
from executor_svc.errors import StartError
from executor_svc.models.loading import LoadedModel
from executor_svc.startup.adapters import held_on_cpu
from executor_svc.worker.model_adapters import ModelAdapterLoader

_EQUAL = {
    "model": "another config.json than rank 0 in --model (digest %s, not %s)",
    "isa": "the instruction set %s, and rank 0 %s: --cpu-isa gives all the same",
    "versions": "the libraries %s, and rank 0 %s",
    "pages": "blocks of %s pages, a state's last, and rank 0 of %s",
}
"""What must be the same at all ranks, and how a difference is told."""


@dataclass(frozen=True, slots=True)
class Held:
    """What all ranks hold."""

    num_device_blocks: int
    num_host_blocks: int
    bytes_per_block: int
    """Of all ranks together."""
    weights_digest: bytes
    max_loaded: int
    """Adapters at most."""
    weight_bytes: int
    """Of all ranks together."""

    def of_all(self, loaded: LoadedModel) -> LoadedModel:
        """Return rank 0's model with the weights of all ranks."""
        geometry = replace(loaded.geometry, weight_bytes=self.weight_bytes)
        return replace(loaded, geometry=geometry, weights_digest=self.weights_digest)


def held_by(loaded: LoadedModel, pools: KVCache, adapters: ModelAdapterLoader | None, device: Device) -> dict[str, Any]:
    """Return what one rank holds, for `least`."""
    return {
        "model": loaded.spec_digest.hex(),
        "isa": device.isa,
        "versions": list(device.versions),
        "pages": [*pools.layout.pages_per_block, pools.pages_per_state],
        "device": pools.num_device_blocks,
        "host": pools.num_host_blocks,
        "bytes": pools.bytes_per_block,
        "weights": loaded.weights_digest.hex(),
        "weight_bytes": loaded.own_geometry.weight_bytes,
        "adapters": 0 if adapters is None else adapters.max_loaded,
    }


def least(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what all ranks hold, for `read_held`; ranks: in their order.

    Raises StartError for a rank whose results would have other bits than rank 0's.
    """
    for rank, each in enumerate(ranks):
        for name, what in _EQUAL.items():
            if each[name] != ranks[0][name]:
                raise StartError(f"rank {rank} has {what % (each[name], ranks[0][name])}")
    digests = b"".join(bytes.fromhex(each["weights"]) for each in ranks)
    return {
        "device": min(each["device"] for each in ranks),
        "host": min(each["host"] for each in ranks),
        "bytes": sum(each["bytes"] for each in ranks),
        "weights": hashlib.sha256(digests).hexdigest(),
        "adapters": min(each["adapters"] for each in ranks),
        "weight_bytes": sum(each["weight_bytes"] for each in ranks),
    }


def read_held(decided: dict[str, Any]) -> Held:
    """Return what `least` has decided."""
    digest = bytes.fromhex(decided["weights"])
    counts = decided["device"], decided["host"], decided["bytes"]
    return Held(*counts, digest, decided["adapters"], decided["weight_bytes"])


def new_pools(
    loaded: LoadedModel,
    device: Device,
    config: ExecutorConfig,
    adapters: ModelAdapterLoader | None,
    on_host: int,
    draft: DraftLayers | None = None,
) -> KVCache:
    """Return the pools of one rank: of its KV heads, in its share of this machine's free memory.

    on_host: ranks of this machine.
    """
    others = device.free_memory_bytes() - own_memory(device, on_host)
    return device.new_kv_cache(loaded.own_geometry, config, others + held_on_cpu(adapters, device), draft)


def draft_layers_message(draft: DraftLayers | None) -> bytes:
    """Return the message that `layers_beside` reads."""
    return json.dumps([asdict(each) for each in (() if draft is None else draft.layers)]).encode()


def layers_beside(loaded: LoadedModel, message: bytes) -> DraftLayers | None:
    """Return the layers of rank 0's draft that another rank lays out, too, though it has none: None if it needs not.

    Pages of layers with windows or states are as large as all of it asks for, and must be as many on all ranks. Where
    all layers keep the same, a block is one page, whatever lies in it.
    """
    geometry, layers = loaded.own_geometry, [LayerKV(**each) for each in json.loads(message)]
    alike = not any(geometry.windows) and not any(geometry.layer_states)
    return None if alike or not layers else DraftLayers(tuple(layers), 0)


def own_memory(device: Device, on_host: int) -> int:
    """Return the share of this machine's free memory, not of a GPU's, that one of so many ranks has."""
    free = device.free_memory_bytes() if device.name == "cpu" else int(psutil.virtual_memory().available)
    return free // on_host


def fewest_blocks(
    pools: KVCache,
    held: Held,
    loaded: LoadedModel,
    device: Device,
    config: ExecutorConfig,
    draft: DraftLayers | None = None,
) -> KVCache:
    """Return the pools, or smaller ones if another rank has room for fewer blocks."""
    if pools.num_device_blocks == held.num_device_blocks:
        return pools
    return device.new_kv_cache(loaded.own_geometry, config, 0, draft, held.num_device_blocks)


def limit_adapters(adapters: ModelAdapterLoader | None, held: Held) -> None:
    """Let a rank load no more adapters than the others can."""
    if adapters is not None:
        adapters.max_loaded = held.max_loaded
