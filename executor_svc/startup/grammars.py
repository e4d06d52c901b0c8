"""Grammars of an executor: whether it has any, and what makes their masks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cadenza_common.grammar.table import GrammarEngine, TableSource, table_source
from executor_svc.plan.description import ModelFacts
from executor_svc.plan.limits import Limits
from executor_svc.speculation.drafts import DraftSource
from executor_svc.structured.compiler import Compiler
from executor_svc.structured.drafts import GrammarDrafts
from executor_svc.structured.slot_grammars import SlotGrammars


@dataclass(frozen=True, slots=True)
class Grammars:
    """What a model's grammars need."""

    source: TableSource
    engine: GrammarEngine

    def within(self, limits: Limits) -> Limits:
        """Return the limits of an executor with grammars."""
        return replace(limits, has_grammars=True)

    def of_slots(self, limits: Limits) -> SlotGrammars:
        """Return the grammars of the slots of an executor with these limits; makes the table of tokens.

        At the start, as that holds the interpreter: a second for 131,072 tokens. Raises ValueError, OSError.
        """
        compiler = Compiler(self.source)
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
