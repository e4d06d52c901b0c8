"""`cadenza_common.settings.extras`: the command that installs what is missing, from where this Cadenza came."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError

import pytest

from cadenza_common.settings import extras

CASES = {
    "a wheel": (
        {"url": "file:///tmp/dist/cadenza-0.1.0-py3-none-any.whl", "archive_info": {}},
        "pip install 'cadenza[serve] @ file:///tmp/dist/cadenza-0.1.0-py3-none-any.whl'",
    ),
    "a folder": (
        {"url": "file:///home/me/cadenza", "dir_info": {}},
        "pip install 'cadenza[serve] @ file:///home/me/cadenza'",
    ),
    "an editable folder": (
        {"url": "file:///home/me/my%20cadenza", "dir_info": {"editable": True}},
        "pip install -e '/home/me/my cadenza[serve]'",
    ),
    "a commit": (
        {"url": "https://git.example/cadenza.git", "vcs_info": {"vcs": "git", "commit_id": "0123abc"}},
        "pip install 'cadenza[serve] @ git+https://git.example/cadenza.git@0123abc'",
    ),
    "no record": (None, "pip install '.[serve]' in a clone of Cadenza's repository"),
}


class Installed:
    """A distribution with the given direct_url.json."""

    def __init__(self, origin: dict | None) -> None:
        self.origin = origin

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self.origin is None else json.dumps(self.origin)


@pytest.mark.parametrize("case", CASES)
def test_the_command_names_the_place_of_the_installation(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    origin, command = CASES[case]
    monkeypatch.setattr(extras, "distribution", lambda name: Installed(origin))
    assert extras.install_command("serve") == command


def test_a_source_tree_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Installed:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(extras, "distribution", absent)
    assert extras.install_command("cli") == CASES["no record"][1].replace("serve", "cli")
