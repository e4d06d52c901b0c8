"""Keys of compiled kernels that hang on no order of launches.

Triton 3.6 leaves the constants of a called function out of a kernel's key if that kernel is the first to name the
function. So a start that compares kernels would have other keys than the next one, which does not.
"""

from __future__ import annotations

from triton.runtime.jit import JITFunction

from executor_svc.gpu.kernels import copy_pages, rank_rows
from executor_svc.gpu.kernels.lora import tables
from executor_svc.gpu.kernels.sampling import (
    arithmetic,
    draw,
    edits,
    floors,
    logits,
    logprobs,
    noise,
    penalties,
    search,
)
from executor_svc.gpu.kernels.slots import commit, draft_layout, ngram_drafts, slot_updates, step_inputs
from executor_svc.gpu.kernels.states import step

_MODULES = (
    arithmetic, noise, search, floors, edits, draw, logits, logprobs, penalties, slot_updates, step_inputs,
    draft_layout, ngram_drafts, commit, tables, step, copy_pages, rank_rows,
)  # fmt: skip
"""Of what surrounds a model in steps; a model's own operations have one order, that of the model."""


def settle_keys() -> None:
    """Let Triton work out all of their keys in one order; nothing under its interpreter, which compiles nothing."""
    for module in _MODULES:
        for each in list(vars(module).values()):
            if isinstance(each, JITFunction):
                _ = each.cache_key
