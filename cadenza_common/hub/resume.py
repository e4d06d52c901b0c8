"""Downloads a large file into the hub's cache, from where an earlier call was stopped or killed.

huggingface-hub 2 gives the bytes of each call a name that no later call opens (its pull request 4228). So its http_get
writes here into `blobs/SHA256.incomplete`, as its own releases before 2 did; it then finds the whole blob and links it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cadenza_common.hub.names import HubError


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository as the hub lists it."""

    size: int
    sha256: str
    """Empty: the hub names none, as for small files."""


def is_resumed(file: HubFile) -> bool:
    """Whether a file is for `fetch_blob`; else huggingface-hub fetches it alone: it is small, or only Xet has it."""
    from huggingface_hub import constants

    return bool(file.sha256) and file.size <= constants.MAX_HTTP_DOWNLOAD_SIZE and not constants.HF_XET_HIGH_PERFORMANCE


def bytes_there(repo: str, file: HubFile) -> int:
    """Return how many bytes of a file earlier calls have left."""
    part = _part(repo, file)
    return part.stat().st_size if part.exists() else 0


def fetch_blob(repo: str, commit: str, name: str, file: HubFile, bar: type[Any]) -> None:
    """Download what lacks of a file, and put it among the cache's blobs; raises HubError for other bytes than listed.

    Raises errors of the HTTP library too; what has come stays for the next call.
    """
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils._fixes import WeakFileLock
    from huggingface_hub.utils._headers import build_hf_headers

    part = _part(repo, file)
    blob = part.with_suffix("")
    lock = Path(constants.HF_HUB_CACHE) / ".locks" / part.parts[-3] / f"{blob.name}.lock"  # the library's own
    for folder in (part.parent, lock.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if blob.exists():
            return
        if bytes_there(repo, file) > file.size:
            part.unlink()
        with part.open("ab") as out:
            http_get(
                hf_hub_url(repo, name, revision=commit),
                out,
                resume_size=out.tell(),
                headers=build_hf_headers(),
                expected_size=file.size,
                displayed_filename=name,
                tqdm_class=bar,
            )
        check_hash(repo, name, part, file.sha256)
        part.rename(blob)


def check_hash(repo: str, name: str, path: Path, sha256: str) -> None:
    """Remove a downloaded file with other bytes than the hub lists; raises HubError."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        raise HubError(
            f"{name} of {repo} came with other bytes than the hub lists (sha256 {found[:12]}, not "
            f"{sha256[:12]}); it was removed: try again"
        )


def _part(repo: str, file: HubFile) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = repo_folder_name(repo_id=repo, repo_type="model")
    return Path(constants.HF_HUB_CACHE) / folder / "blobs" / f"{file.sha256}.incomplete"
