"""Which models are served behind one door: their names, where they are, and the options of each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cadenza.errors import OptionError
from cadenza_common.hub.names import models_in, plain_name
from cadenza_launcher.services.checks import check_model
from cadenza_launcher.services.options import GATEWAY, SEVERAL_OPTIONS, service_options

_NAME = re.compile(r"[!-.0-~]{1,128}")
"""Printable ASCII without / and spaces: a name is metadata of calls, and what is behind a slash an adapter's."""
_OF_GATEWAY = ("tool_call_parser", "reasoning_parser")
_NOT_HERE = {
    **dict.fromkeys(
        ("tls_cert", "tls_key", "tls_client_ca"),
        "the gateway is the door of several models: --http-tls-cert and --http-tls-key",
    ),
    "tenants": "the gateway is the door of several models, and --http-api-key-file has its keys",
    **dict.fromkeys(
        ("kserve", "vllm_grpc", "kv_events_endpoint", "kv_events_replay_endpoint", "page", "page_demo",
         "served_model_name", "http_token_file", "http_admin_key_file"),
        "it is for one model",
    ),
    **dict.fromkeys(
        ("distributed_executor_backend", "max_executors"), "several models run on this machine"
    ),
}  # fmt: skip
"""Options that several models cannot have, and why."""
_OF_ONE = ("journal", "record", "metrics_port", "lora", "lora_dir", "speculative_model", "tokenizer", "chat_template")
"""Options that would be the same file, port or model for all of them."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One of several models."""

    name: str
    model: str
    """Folder, file or hub id, as `check_model` gives it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Its own, which override those of all."""
    gateway: Mapping[str, str] = field(default_factory=dict)
    """Those of the gateway."""


def read_specs(
    named: Sequence[str], models_dir: str | None, tables: Mapping[str, Mapping[str, Any]]
) -> tuple[ModelSpec, ...]:
    """The models of the command line, of a folder, and of a file, in this order; raises OptionError.

    tables: by name; one without `model` has options for the model of that name.
    """
    places = [(short_name(each), each) for each in named]
    places += [] if models_dir is None else _in_folder(models_dir)
    for name, table in tables.items():
        if "model" in table:
            places.append((name, str(table["model"])))
        elif name not in dict(places):
            raise OptionError(f"[models.{name}]: it needs a model: a folder, a GGUF file or a hub id")
    specs: dict[str, ModelSpec] = {}
    for name, place in places:
        if not _NAME.fullmatch(name):
            raise OptionError(f"option model: {name!r} is no name of a model: give one as [models.NAME] in a file")
        if name in specs:
            raise OptionError(f"option model: {name} is the name of two models: give them others as [models.NAME]")
        own = {key: value for key, value in tables.get(name, {}).items() if key != "model"}
        specs[name] = _spec(name, place, own)
    if not specs:
        raise OptionError(f"option models-dir: there is no model in {models_dir}")
    return tuple(specs.values())


def short_name(model: str) -> str:
    """The last part of a folder, file or hub id, without .gguf and the number of a part."""
    return plain_name(model.rstrip("/").rpartition("/")[2])


def check_common(names: Iterable[str]) -> None:
    """Raise OptionError for an option that all models have been given and cannot have."""
    for name in names:
        if name in _NOT_HERE:
            raise OptionError(f"option {name}: several models cannot have it: {_NOT_HERE[name]}")
        if name in _OF_ONE:
            raise OptionError(f"option {name}: give it in the table of one model, such as [models.small]")


def _spec(name: str, place: str, own: Mapping[str, Any]) -> ModelSpec:
    known = service_options()
    for key in own:
        of_gateway = known.get(key) == [GATEWAY] and key not in _OF_GATEWAY
        if key in (*_NOT_HERE, *SEVERAL_OPTIONS, "http") or of_gateway:
            raise OptionError(f"[models.{name}] {key}: {_NOT_HERE.get(key, 'it is an option of all models')}")
    gateway = {key: str(own[key]) for key in _OF_GATEWAY if key in own}
    try:
        model = check_model(place)
    except OptionError as error:
        raise OptionError(f"{error} (model {name})") from None
    return ModelSpec(name, model, {key: value for key, value in own.items() if key not in gateway}, gateway)


def _in_folder(folder: str) -> list[tuple[str, str]]:
    """The models in a folder by name. Parts of one are one model; of those in a folder below, its name is theirs."""
    root = Path(folder).expanduser()
    try:
        below = [each for each in root.iterdir() if each.is_dir()]
        found = [(each.name, each) for each in below if (each / "config.json").is_file()]
        found += [(short_name(first), root / first) for first in _gguf_files(root)]
        for each in below:
            files = [] if (each / "config.json").is_file() else _gguf_files(each)
            found += [(each.name if len(files) == 1 else short_name(file), each / file) for file in files]
    except OSError as error:
        raise OptionError(f"option models-dir: {folder}: {(error.strerror or str(error)).lower()}") from None
    return [(name, str(path)) for name, path in sorted(found)]


def _gguf_files(folder: Path) -> list[str]:
    """The models in GGUF in a folder, each by its first file."""
    return [*models_in([each.name for each in folder.iterdir() if each.is_file()])]
