"""The executor's capacity, and the limits of one plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupShape:
    """A KV group: layers that keep the KV of the same positions."""

    window: int = 0
    """Number of the last positions that a row reads, its own included; 0: all."""
    pages_per_block: int = 1


@dataclass(frozen=True, slots=True)
class Limits:
    """The executor's capacity, and the limits of one plan."""

    num_slots: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    max_logprobs: int
    block_size: int
    num_device_blocks: int
    num_host_blocks: int
    max_inflight_plans: int
    max_drafts: int = 0
    """The most drafts of a slot in one step; 0: no speculative decoding."""
    max_loras: int = 0
    """The most distinct adapters of admitted slots; 0: no adapters."""
    max_cpu_loras: int = 0
    """The most loaded adapters."""
    has_grammars: bool = False
    """Whether sequences may have grammars."""
    kv_groups: tuple[GroupShape, ...] = ()
    """Pools are then counted in pages. Empty: one group of all layers, with one page a block."""
    pages_per_state: int = 0
    """Pages of the recurrent state of a sequence; 0: there is none."""
    adaptive_drafts: bool = False
    """Whether the scheduler chooses the number of drafts by what steps have cost and accepted."""

    @property
    def groups(self) -> tuple[GroupShape, ...]:
        """The KV groups, one of all layers included."""
        return self.kv_groups or (GroupShape(),)

    @property
    def num_tables(self) -> int:
        """The number of a sequence's block tables: one for each strip of each group."""
        return sum(group.pages_per_block for group in self.groups)

    @property
    def state_tail(self) -> int:
        """The number of last tokens that a recurrent state keeps apart from its matrices: one, and all drafts."""
        return 1 + self.max_drafts

    @property
    def max_blocks_per_seq(self) -> int:
        """The number of block table entries of a sequence of max_model_len tokens."""
        return -(-self.max_model_len // self.block_size)
