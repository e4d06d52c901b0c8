"""Grammars of an executor: whether it has any, and what makes their masks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cadenza_common.grammar.table import GrammarEngine, TableSource, table_source
from executor_svc.device.interface import cores
from executor_svc.plan.description import ModelFacts
from executor_svc.plan.limits import Limits
from executor_svc.speculation.drafts import DraftSource
from executor_svc.structured.compiler import Compiler
from executor_svc.structured.drafts import GrammarDrafts
from executor_svc.structured.slot_grammars import SlotGrammars

_MOST_THREADS, _CORES_OF_THREAD = 4, 3
"""That make masks: one for so many cores. What they do with the interpreter's lock would hold up more."""


@dataclass(frozen=True, slots=True)
class Grammars:
    """What a model's grammars need."""

    source: TableSource
    engine: GrammarEngine

    def within(self, limits: Limits) -> Limits:
        """Return the limits of an executor with grammars."""
        return replace(limits, has_grammars=True)

    def of_slots(self, limits: Limits, device_name: str = "cpu") -> SlotGrammars:
        """Return the grammars of the slots of an executor with these limits; makes the table of tokens.

        At the start, as that holds the interpreter: a second for 131,072 tokens. Masks are made by several threads if
        the device leaves the host's cores to them. Raises ValueError, OSError.
        """
        num_threads = 1 if device_name == "cpu" else max(1, min(_MOST_THREADS, cores() // _CORES_OF_THREAD))
        compiler = Compiler(self.source, num_lexers=num_threads)
        compiler.prepare()
        return SlotGrammars(compiler, limits.num_slots, limits.max_drafts)


def find_grammars(loaded: ModelFacts) -> Grammars | None:
    """Return what a model's grammars need; None if llguidance, the tokenizer's tokenizer.json or an EOS id lacks."""
    source = table_source(loaded.tokenizer, loaded.geometry.vocab_size, loaded.eos_token_ids)
    return None if source is None else Grammars(source, source.engine())


def with_grammars(
    source: DraftSource | None, grammars: SlotGrammars | None, *, on_device: bool = False
) -> DraftSource | None:
    """Return a source of drafts that keeps to the grammars, if there are both.

    on_device: whether the device samples, whose slots with grammars have no drafts.
    """
    if source is None or grammars is None or on_device:
        return source
    return GrammarDrafts(source, grammars)
