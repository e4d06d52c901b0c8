"""`cadenza rm`: removes models from the hub's cache."""

from __future__ import annotations

import contextlib
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from cadenza.errors import OptionError
from cadenza_cli.models.ls import Cached, cached_models
from cadenza_common.spelling import suggestion

HELP = """Remove models from the Hugging Face cache.

\b
Examples:
  cadenza rm OWNER/REPO                 (all files of the repository)
  cadenza rm OWNER/REPO:Q8_0            (one quantization of a GGUF repository)
  cadenza rm OWNER/REPO/FILE.gguf
"""
EPILOG = "Exit codes: 0 success, 2 a name is not in the cache."


def rm(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL...", help="Names as in `cadenza ls`.", show_default=False)
    ],
) -> None:
    """Remove models; raises OptionError before anything is removed if one is not there."""
    from cadenza_common.hub.download import human

    cached = cached_models()
    for name, chosen in [(model, _chosen(model, cached)) for model in models]:
        freed = _remove_repo(chosen) if isinstance(chosen, str) else _remove_files(chosen)
        sys.stdout.write(f"removed {name}: {human(freed)}\n")


def _chosen(name: str, cached: list[Cached]) -> str | Cached:
    """Return the repository, or one model in GGUF of it, that a name means."""
    from cadenza_common.hub.names import HubError, choose, parse

    said = parse(name)
    names = {each.name for each in cached}
    if said is None:
        raise OptionError(f"{name} is no name of the Hugging Face hub{suggestion(name, names)}")
    here = [each for each in cached if each.name == said.repo or each.name.startswith(f"{said.repo}/")]
    if not here and not (said.file or said.tag) and _repo_folder(said.repo).exists():
        return said.repo  # a download that was stopped
    if not here:
        raise OptionError(f"{name} is not in the cache{suggestion(name, names) or '; cadenza ls lists what is'}")
    if not (said.file or said.tag):
        return said.repo
    try:
        files = {path.name if len(each.files) == 0 else _below(path): each for each in here for path in each.files}
        return files[choose(said, files).gguf]
    except HubError as error:
        raise OptionError(f"in the cache, {error}") from None


def _below(path: Path) -> str:
    """Return a file's name in its repository."""
    from cadenza_common.hub.download import repo_of

    return repo_of(path).split("/", 2)[2]


def _remove_repo(repo: str) -> int:
    """Remove all of a repository, and what downloads of it have left; returns the bytes freed."""
    import huggingface_hub as hub

    left = [path for path in _repo_folder(repo).glob("blobs/*.incomplete") if path.is_file()]
    freed = sum(path.stat().st_size for path in left)
    cache = hub.scan_cache_dir()
    revisions = [
        revision.commit_hash
        for each in cache.repos
        if (each.repo_id, each.repo_type) == (repo, "model")
        for revision in each.revisions
    ]
    strategy = cache.delete_revisions(*revisions)
    strategy.execute()
    shutil.rmtree(_repo_folder(repo), ignore_errors=True)
    return freed + int(strategy.expected_freed_size)


def _repo_folder(repo: str) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model")


def _remove_files(model: Cached) -> int:
    """Remove a model in GGUF, and its bytes where no other name is left for them; returns the bytes freed."""
    freed = 0
    for path in model.files:
        blob, snapshots = path.resolve(), path.parents[len(Path(_below(path)).parts)]
        path.unlink()
        if not any(other.is_symlink() and other.resolve() == blob for other in snapshots.rglob("*")):
            with contextlib.suppress(FileNotFoundError):  # without links the file was the blob
                freed += blob.stat().st_size
                blob.unlink()
    return freed
