"""Fixtures of the tests that run services."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack

import pytest


@pytest.fixture
def clients() -> Iterator[ExitStack]:
    """Closes what a test has entered, such as clients of SDKs: their sockets would be warned about later."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    """A folder with the toy byte-level tokenizer and its chat template."""
    # transformers takes seconds to import: only for those who need it.
    from tests.helpers.models.toy_tokenizers import hf_byte_level

    folder = tmp_path_factory.mktemp("tokenizer")
    hf_byte_level().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tokenizer_folders(tokenizer_folder, tmp_path_factory):
    """The same, and one without a chat template: what tests.helpers.errors.error_servers needs."""
    from tests.helpers.models.toy_tokenizers import hf_byte_level

    folder = tmp_path_factory.mktemp("no_template")
    hf_byte_level(template=False).save_pretrained(folder)
    return {"tokenizer": tokenizer_folder, "no_template": str(folder)}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A tiny model with a tokenizer, in transformers' hands: what sampling is held against."""
    from tests.helpers.models.sampling_reference import load_reference

    return load_reference(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The folder of a tiny random model."""
    from tests.checkpoints import make_llama

    return make_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def real_worker(checkpoint):
    """A device thread with that model."""
    from tests.helpers.executor.executor_harness import model_worker

    with model_worker(checkpoint) as running:
        yield running


@pytest.fixture
async def real(real_worker):
    """The executor service around it."""
    from tests.helpers.executor.executor_harness import model_executor

    async with model_executor(*real_worker) as harness:
        yield harness


@pytest.fixture
def no_errors_are_logged(caplog):
    """Clients' mistakes are reported to the clients: the scheduler logs no error."""
    yield
    ours = [record for record in caplog.get_records("call") if record.name.startswith("scheduler_svc")]
    assert not [record.getMessage() for record in ours if record.levelno >= logging.ERROR]


@pytest.fixture
async def w(tokenizer_folder, no_errors_are_logged):
    """A scheduler over a scripted executor; see tests.helpers.scheduler.scheduler_world."""
    from tests.helpers.scheduler.scheduler_world import world

    async with world(tokenizer=tokenizer_folder) as it:
        yield it
