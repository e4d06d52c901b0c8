"""`cadenza ls`: the models in the hub's cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from cadenza.errors import OptionError
from cadenza_cli.load.results import tables_console

HELP = """List the models in the Hugging Face cache: size, format, family, and whether each fits into memory now.

A repository with several GGUF files has a line for each: its name is what `cadenza up`, `fit` and `rm` take.
"""
EPILOG = "Exit codes: 0 success, 2 wrong options."


@dataclass(frozen=True, slots=True)
class Cached:
    """A model in the cache."""

    name: str
    path: Path
    """A folder, or the first of `files`."""
    files: tuple[Path, ...]
    """Of a model in GGUF; empty: the model is the folder."""
    size: int
    """Bytes on disk."""


def cached_models() -> list[Cached]:
    """Return the models in the cache, by name; raises OptionError if the cache cannot be read."""
    import huggingface_hub as hub
    from huggingface_hub.errors import CacheNotFound

    from cadenza_common.hub.names import models_in

    found = []
    try:
        repos = hub.scan_cache_dir().repos
    except CacheNotFound:
        return []
    except OSError as error:
        raise OptionError(f"the cache of the Hugging Face hub cannot be read: {error}") from error
    for repo in repos:
        revision = max(repo.revisions, key=lambda each: ("main" in each.refs, each.last_modified), default=None)
        if repo.repo_type != "model" or revision is None:
            continue
        folder = revision.snapshot_path
        sizes = {file.file_path.relative_to(folder).as_posix(): file.size_on_disk for file in revision.files}
        for first, parts in models_in(sizes).items():
            paths = tuple(folder / part for part in parts)
            size = sum(sizes[part] for part in parts)
            found.append(Cached(f"{repo.repo_id}/{first}", paths[0], paths, size))
        if any(name.endswith(".safetensors") for name in sizes):
            found.append(Cached(repo.repo_id, folder, (), repo.size_on_disk))
    return sorted(found, key=lambda each: each.name)


def ls(
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the names alone.")] = False,
) -> None:
    """Print the models in the cache."""
    from rich.table import Table

    models = cached_models()
    console = tables_console()
    if quiet:
        for model in models:
            console.print(model.name, soft_wrap=True, highlight=False)
        return
    if not models:
        console.print("no models are in the cache: cadenza pull OWNER/REPO")
        return
    table = Table("name", "size", "format", "family", "fits", box=None, header_style="bold")
    table.columns[0].overflow = "fold"
    for model in models:
        table.add_row(model.name, *_facts(model))
    console.print(table)


def _facts(model: Cached) -> tuple[str, str, str, str]:
    from cadenza_cli.models.memory import room
    from cadenza_common.hub.download import human
    from executor_svc.errors import StartError
    from executor_svc.models.fit.sizes import read_sizes

    try:
        sizes = read_sizes(model.path)
    except StartError as error:
        return human(model.size), "?", "?", f"no: {str(error).rpartition(f'{model.path}: ')[2]}"
    return human(model.size), sizes.main_format, sizes.family, "yes" if room().fits(sizes) else "no"
