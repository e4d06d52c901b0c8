"""Fixtures: a scheduler over a scripted executor whose model has the markers of tool calls, and a gateway before it."""

from __future__ import annotations

import pytest

from tests.helpers.gateway.gateway import gateway
from tests.helpers.models.tool_models import hermes_tokenizer, mistral_tokenizer, saved, scripts
from tests.helpers.scheduler.scheduler_world import world
from tests.helpers.scheduler.scripted_executor import ScriptedExecutor


@pytest.fixture(scope="session")
def hermes_folder(tmp_path_factory):
    return saved(hermes_tokenizer(), tmp_path_factory.mktemp("hermes"))


@pytest.fixture(scope="session")
def mistral_folder(tmp_path_factory):
    return saved(mistral_tokenizer(), tmp_path_factory.mktemp("mistral"))


@pytest.fixture
async def hermes(hermes_folder):
    """A gateway; its model writes what `script` was given."""
    async with world(ScriptedExecutor(max_model_len=2048), tokenizer=hermes_folder) as w, gateway(w.target) as g:
        g.script = scripts(w, hermes_tokenizer())
        yield g


@pytest.fixture
async def mistral(mistral_folder):
    async with world(ScriptedExecutor(max_model_len=2048), tokenizer=mistral_folder) as w, gateway(w.target) as g:
        g.script = scripts(w, mistral_tokenizer())
        yield g
