"""Compares what steps do around a model on the GPU at hand, before anything is served: slots, sampling, moves.

Made-up requests with every parameter of sampling go through some steps in slots of their own, of the sizes of the
model's: the same plans, and the same logits, give the host's slots and sampler what is expected.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from executor_svc.config import ExecutorConfig
from executor_svc.device.interface import Device
from executor_svc.device.kv_cache import DraftLayers, KVCache
from executor_svc.gpu.checks.fallbacks import (
    COPIES,
    HEAD_ROWS,
    HOST,
    KERNEL,
    LOGPROBS,
    NGRAMS,
    NO_DRAFTS,
    PASSES,
    PENALTIES,
    SAMPLING,
    TORCH,
    VOCABULARY,
    Fallbacks,
)
from executor_svc.gpu.checks.steps.chosen import GREEDY, chosen_reason, kinds_of_step, logprobs_reason
from executor_svc.gpu.checks.steps.head_rows import CheckedHeadRows, vocabulary_reason
from executor_svc.gpu.checks.steps.history import CheckedHistory, CheckedStep, DraftsBy
from executor_svc.gpu.checks.steps.moves import COPIED, copies_reason, states_reason, tables_reason
from executor_svc.gpu.checks.steps.passes import CheckedPasses
from executor_svc.gpu.checks.steps.ranks import rank_rows_reason
from executor_svc.gpu.checks.steps.requests import DRAFTED
from executor_svc.gpu.choices.ways import KernelChecks
from executor_svc.gpu.kernels.copy_pages import copy_pages, copy_pages_by_torch
from executor_svc.gpu.kernels.sampling.logprobs import RowLogprobsKernel, row_logprobs
from executor_svc.gpu.sampling.logprobs_by_torch import row_logprobs_by_torch
from executor_svc.gpu.states import GpuStateKernels
from executor_svc.models.decoder import Decoder
from executor_svc.models.heads.head import DraftHead
from executor_svc.models.loading import LoadedModel
from executor_svc.plan.description import limits_of
from executor_svc.plan.limits import Limits

_CHANGES, _INPUTS, _DRAFTED = "slots/slot_updates", "slots/step_inputs", "slots/draft_layout"
_COMMIT, _GREEDY, _TABLES, _STATES = "slots/commit", "sampling/logits", "lora/tables", "states/step"
_ALONE = (KERNEL,)
"""The ways of kernels in whose place nothing stands."""
_OR_NO_DRAFTS = (KERNEL, NO_DRAFTS)
_NOT_COMPARED = (HOST, NO_DRAFTS)
"""Ways that launch nothing."""


class _SlotsAreOffError(Exception):
    """A kernel of slots is off and used all the same: what it leaves behind says nothing of the next."""


@dataclass(frozen=True, slots=True)
class StepCheck:
    """The comparison of what surrounds a model in steps."""

    loaded: LoadedModel
    device: Device
    config: ExecutorConfig
    checks: KernelChecks
    draft: DraftLayers | None = None
    """Layers of a draft model or head in the same cache."""
    draft_model: Decoder | DraftHead | None = None
    """The model or head that drafts on the device."""

    @torch.inference_mode()
    def run(self, fallbacks: Fallbacks) -> None:
        """Compare, unless an earlier start has, and let fall back what is not right. Raises KernelError."""
        limits, pools = self._sizes()
        fallbacks.once(self._key(limits, pools), lambda: _Comparison(self, fallbacks, limits, pools).run())

    @torch.inference_mode()
    def launch(self, fallbacks: Fallbacks) -> None:
        """Launch what `run` compares, for a GPU that is not here: results mean nothing."""
        _Comparison(self, fallbacks, *self._sizes(), compares=False).run()

    @property
    def num_places(self) -> int:
        """Places of adapters."""
        return 0 if self.loaded.adapters is None else self.loaded.adapters.sizes.num_places

    @property
    def head(self) -> DraftHead | None:
        """The head that drafts on the device."""
        return None if isinstance(self.draft_model, Decoder) else self.draft_model

    def drafts_by(self, fallbacks: Fallbacks) -> DraftsBy:
        """Return what makes the drafts of steps, as far as it is known."""
        if self.draft_model is not None and fallbacks.has_passes:
            return "passes"
        return "ngrams" if self.config.speculative == "ngram" and fallbacks.way_of(NGRAMS) == KERNEL else "host"

    def _sizes(self) -> tuple[Limits, KVCache]:
        """Return the executor's limits without numbers of blocks, and a cache of a few pages of the model's size."""
        config = self.config.model_copy(update={"num_gpu_blocks": 2 * COPIED, "num_cpu_blocks": 0, "max_num_seqs": 1})
        pools = self.device.new_kv_cache(self.loaded.own_geometry, config, 0, self.draft)
        limits = limits_of(self.config, self.loaded.geometry, pools)
        return replace(limits, num_device_blocks=0, num_host_blocks=0), pools

    def _key(self, limits: Limits, pools: KVCache) -> str:
        """Return a key: executors with the same key launch the same kernels."""
        device, head = self.device, self.head
        parts = (
            limits, pools.bytes_per_block, device.isa, device.numerics, self.num_places, self.config.speculative,
            None if self.loaded.ranks is None else self.loaded.ranks.share, self.draft_model is not None,
            None if head is None else (head.hidden_size, device.dtype, _vocabulary_of(head)),
        )  # fmt: skip
        return f"steps of {hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}"


class _Comparison:
    """One run of a StepCheck."""

    def __init__(
        self, check: StepCheck, fallbacks: Fallbacks, limits: Limits, pools: KVCache, *, compares: bool = True
    ) -> None:
        self._check, self._fallbacks, self._limits, self._pools = check, fallbacks, limits, pools
        self._compares = compares
        kernels = check.device.kernels
        assert isinstance(kernels, GpuStateKernels)
        of_vocabulary = f" (vocabulary {limits.vocab_size})"
        self._greedy, self._sampling = _GREEDY + of_vocabulary, SAMPLING + of_vocabulary
        self._penalties, self._logprobs = PENALTIES + of_vocabulary, LOGPROBS + of_vocabulary
        # In exact mode a row's bits may not depend on what PyTorch makes of the rows beside it.
        self._ways_of_logprobs = _ALONE if kernels.exact is not None else (KERNEL, TORCH)

    def run(self) -> None:
        """Compare all; what falls back is compared too."""
        pool, copies = self._pools.pool, {KERNEL: copy_pages, TORCH: copy_pages_by_torch}
        label = f"{COPIES} (of {self._pools.bytes_per_block} bytes)"
        self._is_right(label, (KERNEL, TORCH), lambda way: copies_reason(pool, copies[way]))
        if self._check.loaded.ranks is not None:
            geometry, share = self._check.loaded.geometry, self._check.loaded.ranks.share
            width, dtype = geometry.hidden_size, self._check.device.dtype
            device = self._check.device.torch_device
            label = f"rank_rows ({share.size} ranks, x {width} {str(dtype).removeprefix('torch.')})"
            self._is_right(label, _ALONE, _of_one_way(partial(rank_rows_reason, share, width, dtype, device)))
        head = self._check.head
        if head is not None and head.target_ids is not None:
            label = f"{VOCABULARY} ({_vocabulary_of(head)} of {head.vocab_size})"
            self._is_right(label, _OR_NO_DRAFTS, lambda _: vocabulary_reason(head))
        while self._is_again():
            pass

    def _is_again(self) -> bool:
        """Run all steps; return whether they are to run again, as other drafts are made from now on."""
        check, device = self._check, self._check.device
        drafts = check.drafts_by(self._fallbacks)
        history = CheckedHistory(self._limits, device.torch_device, device.functions, drafts)
        try:
            for step in history.steps():
                self._step(step)
                if check.drafts_by(self._fallbacks) != drafts:
                    return True
        except _SlotsAreOffError:
            pass
        return False

    def _step(self, step: CheckedStep) -> None:
        sampling = step.history.sampling
        self._moves(_CHANGES, step.sent)
        if not self._has_drafts(step):
            return
        self._moves(_INPUTS if step.planned.num_drafts is None else _DRAFTED, step.built)
        if self._check.num_places:
            self._moves(_TABLES, partial(tables_reason, step, self._check.num_places))
        if self._limits.pages_per_state:
            self._moves(_STATES, partial(states_reason, step))
        self._counted(step, sampling.count_admitted)
        rows = CheckedHeadRows(step)
        for round in step.rounds:
            if step.number <= DRAFTED:  # later ones are for what drafts
                self._chosen(step, round)
            step.set_tokens(round)
            self._moves(_COMMIT, partial(step.committed, round))
            self._counted(step, partial(sampling.count_taken, step.inputs), is_all=round == step.rounds[-1])
        head, dtype = self._check.head, self._check.device.dtype
        if head is not None and step.history.drafts == "passes":
            label = f"{HEAD_ROWS} (x {head.hidden_size} {str(dtype).removeprefix('torch.')})"
            self._is_right(label, _OR_NO_DRAFTS, lambda _: rows.reason(head.hidden_size, dtype))

    def _has_drafts(self, step: CheckedStep) -> bool:
        """Compare what makes the drafts of a step on the device; return whether it goes on doing so."""
        drafts, has_places = step.history.drafts, step.planned.num_drafts is not None
        if drafts == "ngrams" and has_places:
            return self._drafts(NGRAMS, HOST, step.drafted)
        if drafts == "host" or not (has_places or self._check.head is None):
            return True
        passes = CheckedPasses(step, is_head=self._check.head is not None)
        if not self._drafts(PASSES, NO_DRAFTS, passes.first):
            return False
        for number in passes.numbers:
            passes.sample(number)
            self._counted(step, passes.count, is_all=False)
            if not self._drafts(PASSES, NO_DRAFTS, partial(passes.next, number)):
                return False
        self._counted(step, passes.recount)
        return True

    def _drafts(self, label: str, other: str, compare: Callable[[], str | None]) -> bool:
        """Compare what makes drafts; return False if they are made in the other way from now on.

        Raises _SlotsAreOffError if it is off and used all the same.
        """
        if not self._is_right(label, (KERNEL, other), _of_one_way(compare)):
            raise _SlotsAreOffError
        return self._fallbacks.way_of(label) == KERNEL

    def _chosen(self, step: CheckedStep, round: int) -> None:
        """Compare the choices of a round, and their logprobs."""
        self._is_right(self._greedy, _ALONE, _of_one_way(partial(chosen_reason, step, round, GREEDY)))
        self._reported(step, round, after_sampling=False)
        for kinds in kinds_of_step(step):
            if self._draws_here:
                compare = _of_one_way(partial(chosen_reason, step, round, kinds))
                self._is_right(self._sampling, (KERNEL, HOST), compare)
        if self._draws_here and self._sampling not in self._fallbacks.kept:
            self._reported(step, round, after_sampling=True)

    def _reported(self, step: CheckedStep, round: int, *, after_sampling: bool) -> None:
        kernels: dict[str, RowLogprobsKernel] = {KERNEL: row_logprobs, TORCH: row_logprobs_by_torch}
        self._is_right(
            self._logprobs, self._ways_of_logprobs,
            lambda way: logprobs_reason(step, round, kernels[way], after_sampling=after_sampling),
        )  # fmt: skip

    @property
    def _draws_here(self) -> bool:
        """Whether the device draws, and counts tokens for it."""
        return HOST not in map(self._fallbacks.way_of, (self._sampling, self._penalties))

    def _counted(self, step: CheckedStep, count: Callable[[], None], *, is_all: bool = True) -> None:
        """Count tokens; compare the counts if these are all of the step."""

        def reason() -> str | None:
            count()
            return step.history.counts_reason() if is_all else None

        if self._draws_here:
            self._is_right(self._penalties, (KERNEL, HOST), _of_one_way(reason))

    def _moves(self, label: str, compare: Callable[[], str | None]) -> None:
        """Compare a kernel of slots. Raises KernelError if it is off, _SlotsAreOffError if it is used all the same."""
        if not self._is_right(label, _ALONE, _of_one_way(compare)):
            raise _SlotsAreOffError

    def _is_right(self, label: str, ways: Sequence[str], compare: Callable[[str], str | None]) -> bool:
        """Compare by the label's way, or the next ones; return False if it is off and used all the same.

        compare: of a way. Raises KernelError if none is right.
        """
        fallbacks, checks = self._fallbacks, self._check.checks
        if not self._compares:
            compare(fallbacks.way_of(label))
            return True
        while label not in fallbacks.kept and (way := fallbacks.way_of(label)) not in _NOT_COMPARED:
            reason = checks.tried(label, way, partial(compare, way))
            if reason is None:
                return True
            fallbacks.next_way(label, ways, reason)
        return label not in fallbacks.kept


def _vocabulary_of(head: DraftHead) -> int:
    """Return how many of its target's ids a head has."""
    return head.vocab_size if head.target_ids is None else len(head.target_ids)


def _of_one_way(compare: Callable[[], str | None]) -> Callable[[str], str | None]:
    """Return a comparison that takes a way; there is one alone to compare."""
    return lambda _: compare()
