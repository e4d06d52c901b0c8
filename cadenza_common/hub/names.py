"""Names of models on the Hugging Face hub, and which files of a repository a name means."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import PurePosixPath

_PREFIX = re.compile(r"(https?://)?(hf\.co|(www\.)?huggingface\.co)/", re.IGNORECASE)
_WEB_PATH = re.compile(r"/(?:blob|resolve)/main(?=/)|/tree/main/?$")
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)*", re.ASCII)
_TAG = re.compile(r"[\w.-]+", re.ASCII)
_SPLIT = re.compile(r"-\d{5}-of-(\d{5})$")
_LABEL = re.compile(r"(?:^|[-._/])((?:IQ|TQ|Q)\d(?:_[A-Z0-9]+)*|MXFP4|BF16|F16|F32)(?=$|[-._/])", re.IGNORECASE)
_ORDER = (
    "IQ1_S", "IQ1_M", "TQ1_0", "IQ2_XXS", "TQ2_0", "IQ2_XS", "IQ2_S", "IQ2_M", "Q2_K_S", "Q2_K", "Q2_K_L", "IQ3_XXS",
    "IQ3_XS", "IQ3_S", "Q3_K_S", "IQ3_M", "Q3_K_M", "Q3_K_L", "MXFP4", "IQ4_XS", "IQ4_NL", "Q4_0", "Q4_K_S", "Q4_K_M",
    "Q4_K_L", "Q4_K_XL", "Q4_1", "Q5_0", "Q5_K_S", "Q5_K_M", "Q5_K_L", "Q5_1", "Q6_K", "Q6_K_L", "Q8_0", "BF16", "F16",
    "F32",
)  # fmt: skip
"""Quantizations by bits a weight."""
_FIRST = "Q4_K_M"
_FOLDER_FILES = (".safetensors", ".json", ".model", ".jinja")
_FOLDER_STEMS = ("tokenizer", "vocab", "merges")
_COPIES = ("consolidated", "original/")
"""Copies of the same weights in the publishers' own formats: Mistral's and Meta's."""


class HubError(Exception):
    """A name means no model that can be had; the message says why, and what there is."""


@dataclass(frozen=True, slots=True)
class HubName:
    """What a name says."""

    repo: str
    """OWNER/REPO, or REPO alone."""
    file: str = ""
    """A GGUF file in it, with its folders."""
    tag: str = ""
    """A quantization."""

    def __str__(self) -> str:
        return "/".join(filter(None, (self.repo, self.file))) + (f":{self.tag}" if self.tag else "")


@dataclass(frozen=True, slots=True)
class ChosenFiles:
    """The files of a repository that a name means."""

    files: tuple[str, ...]
    gguf: str = ""
    """The one that is opened, of several parts the first; empty: the model is the folder."""
    note: str = ""
    """What was chosen in place of what."""


def parse(name: str) -> HubName | None:
    """Return what a name says; None: it can only be a path."""
    web = _PREFIX.match(name)
    rest = name[web.end() :].partition("?")[0] if web else name
    rest, _, tag = _WEB_PATH.sub("", rest).rstrip("/").partition(":")
    if not _NAME.fullmatch(rest) or rest.startswith(".") or (tag and not _TAG.fullmatch(tag)) or name.endswith(":"):
        return None
    owner, _, below = rest.partition("/")
    repo, _, file = below.partition("/")
    if file:
        return HubName(f"{owner}/{repo}", file) if file.lower().endswith(".gguf") and not tag else None
    if rest.lower().endswith(".gguf"):
        return None
    return HubName(rest, tag=tag)


def label(file: str) -> str:
    """Return the quantization that a file's name, or else its folder's, has; empty: none."""
    stem = plain_name(file)
    found = _LABEL.findall(PurePosixPath(stem).name) or _LABEL.findall(stem)
    return found[-1].upper() if found else ""


def choose(name: HubName, files: Collection[str]) -> ChosenFiles:
    """Return the files that a name means among those of its repository; raises HubError."""
    models = models_in(files)
    if name.file:
        first = next((first for first, parts in models.items() if name.file in parts), None)
        if first is None:
            raise HubError(f"{name.repo} has no file {name.file}{_others(name.file, models)}")
        return ChosenFiles(models[first], first)
    if not name.tag and (not models or ("config.json" in files and any(_is_weights(file) for file in files))):
        return ChosenFiles(tuple(file for file in sorted(files) if _in_folder(file)))
    if not models:
        raise HubError(f"{name.repo} has no GGUF files, of which :{name.tag} would name one")
    first, note = _quantized(name, sorted(models, key=lambda file: (len(file), file)))
    return ChosenFiles(models[first], first, note)


def _quantized(name: HubName, models: list[str]) -> tuple[str, str]:
    labels = {file: label(file) for file in models}
    wanted = (name.tag or _FIRST).upper()
    for file in models:
        if labels[file] == wanted or (
            name.tag and wanted in (_tail(file), PurePosixPath(plain_name(file)).name.upper())
        ):
            return file, ""
    known = sorted({found for found in labels.values() if found}, key=_rank)
    if name.tag:
        raise HubError(f"{name.repo} has no quantization {name.tag}; there are {', '.join(known) or ', '.join(models)}")
    place = _ORDER.index(_FIRST)
    nearest = min(models, key=lambda file: (abs(_rank(labels[file]) - place), -_rank(labels[file])))
    if len(models) == 1:
        return nearest, ""
    return nearest, f"{name.repo} has no {_FIRST}: the nearest is {labels[nearest] or nearest} of {', '.join(known)}"


def _tail(file: str) -> str:
    """Return the end of a name from a prefix of its quantization on, such as UD-Q4_K_XL."""
    stem = PurePosixPath(plain_name(file)).name.upper()
    return "-".join(stem.split("-")[-2:])


def _rank(quantization: str) -> int:
    return _ORDER.index(quantization) if quantization in _ORDER else 2 * len(_ORDER)


def models_in(files: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return the models in GGUF by their first file, with all files; one that lacks a part is left out."""
    found: dict[str, list[str]] = {}
    for file in sorted(files):
        base = PurePosixPath(file).name.lower()
        if base.endswith(".gguf") and not base.startswith(("mmproj", "imatrix")):
            found.setdefault(plain_name(file), []).append(file)
    whole = {}
    for parts in found.values():
        split = _SPLIT.search(parts[0][: -len(".gguf")])
        if split is None or len(parts) == int(split[1]):
            whole[parts[0]] = tuple(parts)
    return whole


def plain_name(file: str) -> str:
    """Return a file's name without .gguf and the number of its part."""
    return _SPLIT.sub("", file[: -len(".gguf")] if file.lower().endswith(".gguf") else file)


def _is_weights(file: str) -> bool:
    return file.endswith(".safetensors") and "/" not in file


def _in_folder(file: str) -> bool:
    return not file.startswith(_COPIES) and (file.endswith(_FOLDER_FILES) or file.startswith(_FOLDER_STEMS))


def _others(file: str, models: Collection[str]) -> str:
    near = difflib.get_close_matches(file, models, n=1, cutoff=0.4)
    return f"; did you mean {near[0]}?" if near else f"; there are {', '.join(models)}" if models else ""
