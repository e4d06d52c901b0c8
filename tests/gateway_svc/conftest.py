"""Fixtures of the gateway's tests: a scheduler over a scripted executor, and a gateway in front of it."""

from __future__ import annotations

import pytest
import pytest_asyncio

from tests.helpers.gateway.gateway import gateway
from tests.helpers.scheduler.scheduler_world import world


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    """A folder with the toy byte-level tokenizer and its chat template."""
    from tests.helpers.models.toy_tokenizers import hf_byte_level

    folder = tmp_path_factory.mktemp("tokenizer")
    hf_byte_level().save_pretrained(folder)
    return str(folder)


@pytest.fixture
async def w(tokenizer_folder):
    """The scheduler; its executor follows scripts by seed."""
    async with world(tokenizer=tokenizer_folder) as it:
        yield it


@pytest.fixture
async def simulated(tokenizer_folder):
    """A gateway before the simulated executor, which has samples, beams and adapters."""
    pytest.importorskip("torch", reason="the helper can start executors with models too")
    from tests.helpers.services import cadenza_services

    options = {"tokenizer": tokenizer_folder}
    async with cadenza_services("simulated", scheduler=options, simulate="instant", simulate_vocab_size=400) as running:
        async with gateway(running.target) as it:
            yield it
        await running.wait_until_free()


@pytest.fixture
async def g(w):
    """The gateway."""
    async with gateway(w.target) as it:
        yield it


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_gateway(tokenizer_folder):
    """A gateway for all of a file's bodies that are refused; its tests run in the module's event loop."""
    async with world(tokenizer=tokenizer_folder) as w, gateway(w.target) as it:
        yield it
