"""Lets huggingface-hub of this process speak to a fake hub: it reads HF_ENDPOINT and HF_HOME once, when imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.hub.fake_hub import FakeHub


def use_hub(hub: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use `hub`, with a cache in `home`, until the test ends."""
    from huggingface_hub import _snapshot_download, constants, file_download
    from huggingface_hub.utils import _cache_manager

    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants._HF_DEFAULT_ENDPOINT, hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    for module in (_snapshot_download, file_download, _cache_manager):
        for name in ("HF_HUB_CACHE", "ENDPOINT", "HUGGINGFACE_CO_URL_TEMPLATE"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, getattr(constants, name))
