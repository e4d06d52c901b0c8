"""The command that adds an extra to this installation of Cadenza, for messages about packages that are missing."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from urllib.parse import unquote, urlsplit


def install_command(extras: str) -> str:
    """`pip install …` with `extras` ("serve", or several as in "loadtest,scheduler").

    Cadenza is on no package index, so the command names the wheel, folder or repository from which this Cadenza was
    installed, which pip records in direct_url.json (PEP 610).
    """
    try:
        recorded = distribution("cadenza").read_text("direct_url.json")
    except PackageNotFoundError:
        recorded = None
    if recorded is None:
        return f"pip install '.[{extras}]' in a clone of Cadenza's repository"
    origin = json.loads(recorded)
    url = origin["url"]
    if origin.get("dir_info", {}).get("editable"):
        return f"pip install -e '{unquote(urlsplit(url).path)}[{extras}]'"
    if "vcs_info" in origin:
        url = f"{origin['vcs_info']['vcs']}+{url}@{origin['vcs_info']['commit_id']}"
    return f"pip install 'cadenza[{extras}] @ {url}'"
