"""From a name to a local path: the one place that looks in the hub's cache and downloads what is not there."""

from __future__ import annotations

import glob
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cadenza_common.hub.names import HubError, HubName, choose
from cadenza_common.hub.resume import HubFile, bytes_there, check_hash, fetch_blob, is_resumed

_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Listed:
    """What the hub lists of a repository."""

    commit: str
    files: dict[str, HubFile]


def local_model(name: HubName, with_weights: bool = True, on_event: Callable[[str], None] = lambda line: None) -> Path:
    """Return the local folder or GGUF file of a hub name; downloads what the cache lacks.

    with_weights: without, no safetensors file is downloaded. on_event: gets lines on what is chosen and
    downloaded. What a call that ended has left is kept, and the next one goes on there. Raises HubError; nothing is
    downloaded if the disk has no room.
    """
    try:
        listed = list_files(name.repo)
    except HubError as error:
        return _cached(name, on_event, error)
    chosen = choose(name, listed.files)
    if chosen.note:
        on_event(chosen.note)
    wanted = [file for file in chosen.files if with_weights or not file.endswith(".safetensors")]
    folder = _fetch(name, listed, wanted, on_event)
    return folder / chosen.gguf if chosen.gguf else folder


def list_files(repo: str) -> Listed:
    """Return what the hub lists of a repository; raises HubError if it has or says nothing."""
    import huggingface_hub as hub
    from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError

    try:
        info = hub.HfApi().model_info(repo, timeout=_TIMEOUT_S, files_metadata=True)
    except HFValidationError:
        raise HubError("a hub id has the form NAME or OWNER/NAME") from None
    except RepositoryNotFoundError:
        raise HubError("the Hugging Face hub has no such model, or only for those who set HF_TOKEN") from None
    except OfflineModeIsEnabled:
        raise HubError("as a hub id it is not in the local cache, and HF_HUB_OFFLINE is set") from None
    except Exception as error:  # of the HTTP library too, which differs between releases of the hub's client
        raise HubError(
            f"as a hub id it is not in the local cache, and the Hugging Face hub does not answer: {error}"
        ) from error
    files = info.siblings or ()
    listed = {each.rfilename: HubFile(each.size or 0, each.lfs.sha256 if each.lfs else "") for each in files}
    return Listed(info.sha or "main", listed)


def _cached(name: HubName, on_event: Callable[[str], None], problem: HubError) -> Path:
    """Return what the cache has; raises `problem` if it lacks the model."""
    try:
        found = cached_model(name, on_event)
    except HubError as error:
        raise HubError(f"in the local cache, {error}, and {problem}") from None
    if found is None:
        raise problem
    return found


def cached_model(name: HubName, on_event: Callable[[str], None] = lambda line: None) -> Path | None:
    """Return what the cache has, without a look at the hub; None: nothing. Raises HubError for what it lacks."""
    import huggingface_hub as hub

    try:
        # No pattern: the whole repository need not be there.
        folder = Path(hub.snapshot_download(name.repo, local_files_only=True, allow_patterns=[]))
    except Exception:  # validation, or not in the cache
        return None
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    chosen = choose(name, files)
    if not chosen.gguf and "config.json" not in files:
        return None
    if chosen.note:
        on_event(chosen.note)
    return folder / chosen.gguf if chosen.gguf else folder


def _fetch(name: HubName, listed: Listed, files: Sequence[str], on_event: Callable[[str], None]) -> Path:
    """Download what the cache lacks of some files; returns the folder."""
    import huggingface_hub as hub

    cached = {
        file for file in files if isinstance(hub.try_to_load_from_cache(name.repo, file, revision=listed.commit), str)
    }
    new = {file: listed.files[file] for file in files if file not in cached}
    resumed = {file: each for file, each in new.items() if is_resumed(each)}
    there = sum(min(each.size, bytes_there(name.repo, each)) for each in resumed.values())
    size = sum(each.size for each in new.values())
    _check_disk(name, size - there)
    if new:
        rest = f", of which {human(there)} are there" if there else ""
        on_event(f"downloading {name.repo}: {len(new)} files, {human(size)}{rest}")
    began = time.monotonic()
    try:
        with _bars(wanted=True):
            for file, each in resumed.items():
                fetch_blob(name.repo, listed.commit, file, each, _bar_class())
        with _bars(wanted=any(each.sha256 for file, each in new.items() if file not in resumed)):
            patterns = [glob.escape(file) for file in files]
            folder = hub.snapshot_download(name.repo, allow_patterns=patterns, tqdm_class=_bar_class())
    except HubError:
        raise
    except hub.errors.GatedRepoError:
        raise HubError(
            f"{name.repo} is gated: accept its terms at https://huggingface.co/{name.repo}, and set HF_TOKEN"
        ) from None
    except Exception as error:  # of the HTTP library too
        raise HubError(
            f"the download of {name.repo} from the Hugging Face hub broke off; what has come is kept: {error}"
        ) from error
    for file, each in new.items():
        if each.sha256 and file not in resumed:
            check_hash(name.repo, file, Path(folder) / file, each.sha256)
    if new:
        on_event(f"downloaded {name.repo} in {time.monotonic() - began:.0f} s")
    return Path(folder)


def _bar_class() -> type[Any]:
    """Return huggingface-hub's bar with the rate, which its own shows for storage in Xet only."""
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *given: Any, **options: Any) -> None:
            if options.get("unit") == "B":
                options["bar_format"] = "{desc}: {bar}| {n_fmt}B / {total_fmt}B, {rate_fmt}, {remaining} left"
            super().__init__(*given, **options)  # type: ignore[no-untyped-call]

    return Bar


@contextmanager
def _bars(wanted: bool) -> Iterator[None]:
    """In the body, huggingface-hub draws bars with size and rate if they are wanted, on a terminal alone."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled() or (wanted and sys.stderr is not None and sys.stderr.isatty()):
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _check_disk(name: HubName, needed: int) -> None:
    from huggingface_hub.constants import HF_HUB_CACHE

    cache = Path(HF_HUB_CACHE)
    place = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise HubError(
            f"{name} takes {human(needed)} more on the disk of {cache}, which has {human(free)} free: `cadenza rm` "
            "removes models, and HF_HOME names another place"
        )


def repo_of(path: Path) -> str:
    """Return the hub name of a folder or file in the hub's cache; empty: it is none."""
    parts = path.absolute().parts
    for index, part in enumerate(parts[:-2]):
        if part.startswith("models--") and parts[index + 1] == "snapshots":
            return "/".join((part.removeprefix("models--").replace("--", "/"), *parts[index + 3 :]))
    return ""


def human(size: float) -> str:
    """Return a number of bytes for people."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size:.0f} bytes"
