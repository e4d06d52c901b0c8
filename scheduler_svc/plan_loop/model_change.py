"""A changed description of an executor that came back, and whether unfinished requests can go on under it.

Another incarnation alone is no change. With the same vocabulary and the same numerics fingerprint requests go on with
the tokens that they would have had, whatever the limits are now.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from scheduler_svc.plan_loop.ports import ModelDescription


class ModelRefusedError(Exception):
    """The service cannot serve an executor's new model; the message has the reason."""


@dataclass(frozen=True, slots=True)
class ModelChange:
    """Two different descriptions of the executor at one address, one after the other."""

    target: str
    before: ModelDescription
    after: ModelDescription

    @property
    def same_numerics(self) -> bool:
        """Whether the numerics fingerprints are equal."""
        return self.before.fingerprint == self.after.fingerprint

    def why_requests_end(self, *, same_tokens: bool, allows_other_numerics: bool) -> str:
        """Why no unfinished request can go on; empty if they can.

        `same_tokens`: whether the tokenizers agree. `allows_other_numerics`: whether the operator accepts that later
        tokens may differ; a server in fast mode has never promised that they do not.
        """
        before, after = self.before, self.after
        if before.vocab_size != after.vocab_size or not same_tokens:
            sizes = f"{before.name} with {before.vocab_size} token ids became {after.name} with {after.vocab_size}"
            other = "" if before.vocab_size != after.vocab_size else ", and its tokenizer has other tokens"
            return f"the executor at {self.target} came back with another model: {sizes}{other}"
        if self.same_numerics or allows_other_numerics or not before.is_exact:
            return ""
        return f"{self.other_numerics}; --allow-fingerprint-change on the scheduler lets requests go on"

    @property
    def other_numerics(self) -> str:
        """A sentence with the parts of the fingerprint that differ."""
        parts = [f"{name} {old} became {new}" for name, old, new in self._differences()]
        return (
            f"the executor at {self.target} came back with another numerics fingerprint, under which later tokens may "
            f"differ: {', '.join(parts)}"
        )

    def _differences(self) -> list[tuple[str, str, str]]:
        known = dict(self.after.numerics)
        found = [(name, old, known.get(name, "none")) for name, old in self.before.numerics if known.get(name) != old]
        if self.before.name != self.after.name:
            found.insert(0, ("model", self.before.name, self.after.name))
        # The digest covers all parts, so it says something only if no other part differs.
        return [each for each in found if each[0] != "digest"] or found or [("digest", "one", "another")]


def model_change(target: str, before: ModelDescription, after: ModelDescription) -> ModelChange | None:
    """The change from one description to the next; None if only the incarnation differs."""
    return None if replace(before, incarnation=after.incarnation) == after else ModelChange(target, before, after)
