"""Which modules an adapter's config names, and the rank and alpha of each, by the rules of peft.

Read from peft 0.21.2: check_target_module_exists, _maybe_include_all_linear_layers and _check_tied_modules in
tuners/tuners_utils.py, get_pattern_key and set_additional_trainable_modules in utils/other.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cadenza_common.brief import brief
from executor_svc.models.adapters.config import ALL_LINEAR, AdapterConfig
from executor_svc.models.adapters.modules import EMBEDDING, Module
from executor_svc.models.adapters.paths import CONFIG_FILE
from executor_svc.models.base import ModelConfigError
from executor_svc.models.quantized.name_pattern import MatchTime, NamePattern, PatternError
from executor_svc.models.specs.spec import HEAD

_PLAIN = re.compile(r"[A-Za-z0-9_.]*")
_LAYER = re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.")


@dataclass(frozen=True, slots=True)
class LoraTarget:
    """A module with a LoRA pair."""

    module: Module
    rank: int
    scale: float


@dataclass(frozen=True, slots=True)
class Targets:
    """All that a config says of a model's modules."""

    pairs: dict[str, LoraTarget]
    saved: frozenset[str]
    """Tables that the adapter holds whole: of `EMBEDDING` and `HEAD`."""
    token_ids: dict[str, tuple[int, ...]]
    """The rows that it holds of each table, in the file's order."""
    head_shares_rows: bool
    """Whether the rows of the embedding are also those of the head, which are not in the file again."""


def find_targets(config: AdapterConfig, modules: Mapping[str, Module], tied: bool) -> Targets:
    """Return what a config names among a model's modules; raises ModelConfigError or LoaderError naming the field."""
    _check_layers(config, modules.values())
    tables = _tables(modules)
    saved = {_table(name, "modules_to_save", tables) for name in config.modules_to_save}
    token_ids, shares_rows = _token_rows(config, tied, tables)
    rules = _Rules(config)
    names = [name for name in modules if name not in saved and rules.has_target(modules[name])]
    if tied and config.ensure_weight_tying:  # the head follows the embedding, with tensors of its own
        if EMBEDDING in saved:
            saved.add(HEAD)
        elif EMBEDDING in names and HEAD not in names:
            names.append(HEAD)
    pairs = {name: rules.target(modules[name]) for name in names if name not in saved}
    both = sorted(token_ids.keys() & (saved | pairs.keys()))
    if both or (shares_rows and HEAD in saved):  # a pair of the head comes on top of the rows that it shares
        table = both[0] if both else HEAD
        raise _error("trainable_token_indices", f"is about {table}, which is a target or saved whole: not both")
    return Targets(pairs, frozenset(saved), token_ids, shares_rows)


class _Rules:
    """The lists and patterns of a config; all patterns share one second of the processor."""

    def __init__(self, config: AdapterConfig) -> None:
        self._config = config
        self._limit = MatchTime()
        self._all_linear = config.target_modules == ALL_LINEAR
        targets = () if self._all_linear else config.target_modules
        self._target = self._names_or_pattern("target_modules", targets)
        self._excluded = self._names_or_pattern("exclude_modules", config.exclude_modules)
        self._layers_patterns = [
            self._compiled("layers_pattern", rf"(?:^|.*?\.){text}\.(?P<idx>\d+)\.") for text in config.layers_pattern
        ]
        self._ranks = [(self._key("rank_pattern", key), rank) for key, rank in config.rank_pattern.items()]
        self._alphas = [(self._key("alpha_pattern", key), alpha) for key, alpha in config.alpha_pattern.items()]

    def has_target(self, module: Module) -> bool:
        """Return whether a module has a LoRA pair; modules saved whole are the caller's."""
        name = module.stored_name
        if _named(name, self._excluded):
            return False
        if self._all_linear:
            return module.name not in (EMBEDDING, HEAD)
        if not _named(name, self._target):
            return False
        chosen = self._config.layers_to_transform
        # As in peft, a module named in full is meant in whatever layer it is.
        if chosen is None or (not isinstance(self._target, NamePattern) and name in self._target):
            return True
        return self._layer(name) in chosen

    def target(self, module: Module) -> LoraTarget:
        rank = next((rank for key, rank in self._ranks if key.ends(module.stored_name)), self._config.r)
        alpha = next((alpha for key, alpha in self._alphas if key.ends(module.stored_name)), self._config.lora_alpha)
        return LoraTarget(module, rank, self._config.scale(rank, alpha))

    def _layer(self, name: str) -> int | None:
        if not self._layers_patterns:
            found = _LAYER.match(name)
            return int(found["idx"]) if found else None
        indexes = (pattern.group(name, "idx") for pattern in self._layers_patterns)
        return next((int(index) for index in indexes if index is not None), None)

    def _names_or_pattern(self, field: str, value: tuple[str, ...] | str) -> frozenset[str] | NamePattern:
        return self._compiled(field, value) if isinstance(value, str) else frozenset(value)

    def _key(self, field: str, text: str) -> _Key:
        plain = _PLAIN.fullmatch(text) is not None
        return _Key(text, None if plain else self._compiled(field, rf"(.*\.)?({text})$"))

    def _compiled(self, field: str, text: str) -> NamePattern:
        try:
            return NamePattern(text, self._limit, CONFIG_FILE)
        except PatternError as error:
            raise _error(field, f"has {error}") from error


@dataclass(frozen=True, slots=True)
class _Key:
    """A key of rank_pattern or alpha_pattern: a pattern of a name or of its last parts."""

    text: str
    pattern: NamePattern | None
    """None: the text has no marks but dots, and there may be hundreds of these: no regular expression is needed."""

    def ends(self, name: str) -> bool:
        if self.pattern is not None:
            return self.pattern.match(name)
        start = len(name) - len(self.text)
        if start < 0 or (start and name[start - 1] != "."):
            return False
        return all(mark in (".", letter) for mark, letter in zip(self.text, name[start:], strict=True))


def _named(name: str, names: frozenset[str] | NamePattern) -> bool:
    """Return whether a module is named in full, or by its last parts, or by a pattern."""
    if isinstance(names, NamePattern):
        return names.fullmatch(name)
    parts = name.split(".")
    return any(".".join(parts[start:]) in names for start in range(len(parts)))


def _tables(modules: Mapping[str, Module]) -> dict[str, str]:
    """Return the modules that may be saved whole or have single rows trained, by the names that configs use."""
    names = {table: modules[table].stored_name for table in (EMBEDDING, HEAD)}
    whole = {stored: table for table, stored in names.items()}
    return {stored.rpartition(".")[2]: table for table, stored in names.items()} | whole | {HEAD: HEAD}


def _token_rows(
    config: AdapterConfig, tied: bool, tables: Mapping[str, str]
) -> tuple[dict[str, tuple[int, ...]], bool]:
    """Return the token ids by table, and whether a tied head shares the embedding's rows."""
    given = config.trainable_token_indices
    table_name = next(name for name, table in tables.items() if table == EMBEDDING)
    by_name = given if isinstance(given, Mapping) else {table_name: given} if given else {}
    found: dict[str, tuple[int, ...]] = {}
    for name, ids in by_name.items():
        table = _table(name, "trainable_token_indices", tables)
        if table in found:
            raise _error("trainable_token_indices", f"names {table} twice")
        found[table] = ids
    shares = tied and EMBEDDING in found and found.get(HEAD, found[EMBEDDING]) == found[EMBEDDING]
    if shares:
        found.pop(HEAD, None)
    elif tied and config.ensure_weight_tying and len(found) > 1:
        raise _error("trainable_token_indices", "has other tokens for lm_head, and ensure_weight_tying is true")
    return found, shares


def _table(name: str, field: str, tables: Mapping[str, str]) -> str:
    if name not in tables:
        names = [next(name for name, known in tables.items() if known == table) for table in (EMBEDDING, HEAD)]
        raise _error(field, f"names {brief(name)}: only {' and '.join(names)} are supported")
    return tables[name]


def _check_layers(config: AdapterConfig, modules: Iterable[Module]) -> None:
    num_layers = 1 + max(module.layer for module in modules if module.layer is not None)
    lacking = [layer for layer in config.layers_to_transform or () if layer >= num_layers]
    if lacking:
        raise _error("layers_to_transform", f"names layer {lacking[0]}: the model has {num_layers} layers")


def _error(field: str, problem: str) -> ModelConfigError:
    return ModelConfigError(f"{CONFIG_FILE}: {field} {problem}")
