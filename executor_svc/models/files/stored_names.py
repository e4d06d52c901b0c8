"""The names of a decoder's tensors in its files: other programs put other words before them than transformers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from executor_svc.models.folder import LoaderError
from executor_svc.models.specs.file_form import HEAD, LAYERS, FileForm

Place = TypeVar("Place")

_PREFIX = "model."
_OTHER_PARTS = ("vision", "audio", "mtp")
"""Words in the names of other parts of a checkpoint, which may have layers with the same modules."""
_LLAMA = FileForm()


def decoder_names(stored: Iterable[str], first: str = "input_layernorm", form: FileForm = _LLAMA) -> dict[str, str]:
    """Return the stored names by those that Cadenza gives the tensors of a decoder, which are transformers' of Llama.

    first: a module of a decoder's layers that no other part of the checkpoint has. form: of the family's files.

    What stands before `layers.0` becomes `model.`: nothing in checkpoints of the model without its head, such as
    LlamaModel; `language_model.model.` in those of larger models; `transformer.` in old ones. The head has no word
    before its name, or the first ones of these. Names stay as they are where some begin with `model.layers.0`, where
    there are several such words, or where two tensors would have one name.
    """
    names = list(stored)
    layers = re.escape(form.layers)
    pattern = re.compile(rf"(?P<prefix>(?:.+\.)?){layers}\.0\.{re.escape(first)}\.weight", re.DOTALL)
    found = {match["prefix"] for name in names if (match := pattern.fullmatch(name))}
    found = {prefix for prefix in found if not any(word in prefix for word in _OTHER_PARTS)}
    if (_PREFIX in found and form.parts == _LLAMA.parts) or len(found) != 1:
        return dict(zip(names, names, strict=True))
    (prefix,) = found
    heads = [f"{prefix[:end]}{form.head}." for end in range(len(prefix) + 1) if end == 0 or prefix[end - 1] == "."]
    own = {_own(name, prefix, heads, form): name for name in names}
    return own if len(own) == len(names) else dict(zip(names, names, strict=True))


def give_own_endings(places: dict[str, Place], endings: Iterable[tuple[str, str]], folder: Path) -> None:
    """Give tensors the names that they have in Cadenza; raises LoaderError if two would have one.

    places: by name; endings: of names in files, and what they are here.
    """
    for stored, own in endings:
        for name in [name for name in places if name.endswith(f".{stored}")]:
            renamed = name.removesuffix(stored) + own
            if renamed in places:
                raise LoaderError(f"model folder {folder}: tensors {name} and {renamed} are the same")
            places[renamed] = places.pop(name)


def has_own_names(stored: Iterable[str], first: str) -> bool:
    """Return whether files have Cadenza's names, as those that it writes: then they have its order, too."""
    return f"{LAYERS}.0.{first}.weight" in stored


def _own(name: str, prefix: str, heads: list[str], form: FileForm) -> str:
    head = next((each for each in heads if name.startswith(each)), None)
    if head is not None:
        return f"{HEAD}.{name.removeprefix(head)}"
    if not name.startswith(prefix):
        return name
    rest = name.removeprefix(prefix)
    part = next((own for own, part in form.parts.items() if rest.startswith(f"{part}.")), None)
    return f"{_PREFIX}{rest}" if part is None else part + rest.removeprefix(form.parts[part])
