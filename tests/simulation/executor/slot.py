"""A batch slot of the plan runner."""

from __future__ import annotations

from dataclasses import dataclass, field

from cadenza_common.plan.sampling import SequenceSampling


@dataclass(slots=True, eq=False)
class Slot:
    """One batch slot."""

    number: int
    tokens: list[int]
    kv: list[int]
    """By position: what a block must hold there once it is computed."""
    num_prompt: int
    num_computed: int
    sampling: SequenceSampling
    sample_index: int
    held: bool
    adapter_index: int = 0
    content: int = 0
    """Of its adapter; 0: it has none."""
    max_drafts: int = 0
    max_len: int = 0
    """With drafts: the length at which the slot stops."""
    stopped: bool = False
    tables: list[list[tuple[int, ...]]] = field(default_factory=list)
    """By KV group, the pages of each block; none of those before its window."""
    state_pages: tuple[int, ...] = ()

    @property
    def num_blocks(self) -> int:
        """Of its shortest table."""
        return min(map(len, self.tables))

    @property
    def num_left(self) -> int:
        return len(self.tokens) - self.num_computed

    def ends_with(self, token_id: int) -> bool:
        """Whether it stops with this token, its last."""
        enough = len(self.tokens) - self.num_prompt >= self.sampling.min_tokens
        at_its_end = self.max_drafts > 0 and len(self.tokens) >= self.max_len
        return at_its_end or (enough and token_id in self.sampling.stop_token_ids)

    def append(self, token_id: int) -> None:
        self.kv.append(hash((self.kv[-1], token_id)))
        self.tokens.append(token_id)
