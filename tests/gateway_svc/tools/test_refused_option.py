"""An option that cannot read what the chat template shows ends the gateway at its start, and is named."""

from __future__ import annotations

import asyncio
import sys

import pytest

from tests.helpers.scheduler.scheduler_world import world
from tests.helpers.scheduler.scripted_executor import ScriptedExecutor
from tests.helpers.service_process import service_process

pytestmark = pytest.mark.slow


async def test_a_format_that_does_not_read_the_templates_calls_is_refused_at_start(hermes_folder):
    async with world(ScriptedExecutor(max_model_len=2048), tokenizer=hermes_folder) as w:
        command = (sys.executable, "-m", "gateway_svc", "--target", w.target, "--http", "127.0.0.1:0")
        process = await asyncio.create_subprocess_exec(
            *command, "--tool-call-parser", "mistral", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(60):
            out, said = await process.communicate()
        assert (process.returncode, b"ready" in out) == (2, False)
        assert b"--tool-call-parser mistral does not read the calls" in said
        assert b"hermes does" in said
        async with service_process(
            "gateway_svc", "--target", w.target, "--tool-call-parser", "hermes", by="--http"
        ) as gateway:
            assert gateway.address
