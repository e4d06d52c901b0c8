"""How many pages a pool has, as options say it: blocks of all layers and, for recurrent models, states beside them."""

from __future__ import annotations

from executor_svc.config import ExecutorConfig
from executor_svc.device.kv_layout import KVLayout


def chosen_pages(layout: KVLayout, config: ExecutorConfig) -> int | None:
    """Return the pages of `--num-gpu-blocks`: so many blocks of all layers, and a state for each of --max-num-seqs.

    None where the option is not given. With `config.pool_pages`, those.
    """
    if config.pool_pages is not None:
        return config.pool_pages[0]
    if config.num_gpu_blocks is None:
        return None
    return config.num_gpu_blocks * layout.num_tables + config.max_num_seqs * layout.pages_per_state


def least_of(layout: KVLayout) -> str:
    """Return what a pool must have room for, in words."""
    block = f"one KV block of {layout.bytes_per_block} bytes"
    if not layout.pages_per_state:
        return block
    return f"{block} and one recurrent state of {layout.pages_per_state * layout.page_bytes} bytes"


def with_states(layout: KVLayout, config: ExecutorConfig) -> str:
    """Return what bytes of a pool include beside blocks, for the middle of a message; empty without states."""
    if not layout.pages_per_state:
        return ""
    size = layout.pages_per_state * layout.page_bytes
    return f" with a recurrent state of {size} bytes for each of --max-num-seqs {config.max_num_seqs}"
