"""The headers of a model's weights on the hub, without the weights: what `cadenza fit` reads before a download."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cadenza_common.hub.download import list_files
from cadenza_common.hub.names import HubError, HubName, choose

_MOST = 32 << 20
"""Bytes of a weight file: the header of a GGUF file with 260000 tokens has 16 MB."""
_LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header, little endian."""


@contextmanager
def headers_only(name: HubName) -> Iterator[Path]:
    """Yield a folder or GGUF file with the model's small files, and weight files as long as the hub's with holes for
    tensors. Raises HubError."""
    listed = list_files(name.repo)
    chosen = choose(name, listed.files)
    with tempfile.TemporaryDirectory(prefix="cadenza-fit-") as place:
        for file in chosen.files:
            size = listed.files[file].size
            if not chosen.gguf and not file.endswith((".safetensors", ".json")):
                continue
            path = Path(place) / file
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as out:
                out.write(_head(name.repo, listed.commit, file, size))
                out.truncate(size)
        yield Path(place) / chosen.gguf


def _head(repo: str, commit: str, file: str, size: int) -> bytes:
    count = min(size, _MOST)
    if file.endswith(".safetensors"):
        length = int.from_bytes(_read(repo, commit, file, _LENGTH_BYTES), "little")
        count = min(count, _LENGTH_BYTES + length)
    return _read(repo, commit, file, count)


def _read(repo: str, commit: str, file: str, count: int) -> bytes:
    """Return the first bytes of a file."""
    import huggingface_hub as hub
    from huggingface_hub.utils._headers import build_hf_headers
    from huggingface_hub.utils._http import get_session, hf_raise_for_status

    if count == 0:
        return b""
    try:
        headers = {**build_hf_headers(), "Range": f"bytes=0-{count - 1}"}
        url = hub.hf_hub_url(repo, file, revision=commit)
        response = get_session().get(url, headers=headers, follow_redirects=True)
        hf_raise_for_status(response)
    except Exception as error:  # of the HTTP library too
        raise HubError(f"{file} of {repo} cannot be read from the Hugging Face hub: {error}") from error
    return bytes(response.content[:count])
