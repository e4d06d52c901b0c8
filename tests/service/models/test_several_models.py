"""Several models behind one door, as `cadenza up A B C` has them: processes, HTTP and gRPC, with simulated models."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
from aiohttp import ClientSession

from cadenza import Client, SamplingParams
from cadenza.errors import InvalidRequestError, NotFoundError, UnauthenticatedError, UnavailableError
from cadenza_cli.app import run
from cadenza_launcher.pool.several import SeveralModels

pytestmark = pytest.mark.slow
NAMES = ("a", "b", "c")
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Three models, of which two are loaded at once; one more cannot be loaded."""
    root = tmp_path_factory.mktemp("models")
    for name in (*NAMES, "broken"):
        (root / name).mkdir()
        (root / name / "config.json").write_text("{}" if name == "broken" else '{"vocab_size": 300}')
    file = root / "models.toml"
    file.write_text("max_num_seqs = 8\n[models.b]\nmax_model_len = 64\n[models.broken]\ntokenizer = '/nowhere'\n")
    events = []
    with SeveralModels(
        [], host="127.0.0.1", port=0, http="0", config=str(file), models_dir=str(root), models_max=2, unload_after=600,
        simulate="instant", on_log=lambda *line: None, on_event=events.append,
    ) as running:  # fmt: skip
        running.events = events
        yield running


async def complete(http: ClientSession, name: str, tokens: int = 20) -> int:
    body = {"model": name, "prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "return_token_ids": True}
    async with http.post("/v1/completions", json=body) as response:
        answer = await response.json()
    assert response.status == 200, answer
    assert len(answer["choices"][0]["token_ids"]) == tokens
    assert answer["model"] == name
    return response.status


async def states(http: ClientSession) -> dict[str, str]:
    async with http.get("/v1/models") as response:
        return {each["id"]: each["state"] for each in (await response.json())["data"]}


async def test_a_model_is_loaded_when_it_is_asked_for_and_another_leaves_for_it(models):
    async with ClientSession(f"http://{models.http}") as http:
        assert await states(http) == dict.fromkeys((*NAMES, "broken"), "unloaded")
        assert await asyncio.gather(*(complete(http, name) for name in "aabb")) == [200] * 4
        assert await states(http) == {"a": "loaded", "b": "loaded", "c": "unloaded", "broken": "unloaded"}
        await complete(http, "a")
        await complete(http, "c")
        assert await states(http) == {"a": "loaded", "b": "unloaded", "c": "loaded", "broken": "unloaded"}


async def test_ps_shows_the_door_and_who_is_loaded(models, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    async with ClientSession(f"http://{models.http}") as http:
        await complete(http, "a")
        assert run(["ps"]) == 0
        rows = [line.split() for line in capsys.readouterr().out.splitlines() if f" {os.getpid()} " in line]
        loaded = {name for name, state in (await states(http)).items() if state == "loaded"}
    assert [" ".join(row[:5]) for row in rows if models.target in row] == ["4 models: a, b, broken,"]
    assert {row[0].rpartition("/")[2] for row in rows if models.target not in row} == loaded


async def test_no_request_is_lost_while_models_come_and_go_under_load(models):
    async def user(http: ClientSession, name: str, until: float) -> int:
        count = 0
        while time.monotonic() < until or count == 0:
            await complete(http, name)
            count += 1
            await asyncio.sleep(0.01)
        return count

    loads = Counter(event.split()[0] for event in models.events if "loading" in event)
    async with ClientSession(f"http://{models.http}") as http:
        until = time.monotonic() + 6
        served = await asyncio.gather(*(user(http, name, until) for name in NAMES * 2))
        assert min(served) >= 1
        async with http.get("/v1/models/a") as response:
            found = await response.json()
    assert (found["num_running"], found["num_waiting"]) == (0, 0)
    again = Counter(event.split()[0] for event in models.events if "loading" in event) - loads
    assert sum(again.values()) >= 2, "each has waited for a place that another had"


async def test_the_clients_of_a_model_that_dies_are_not_those_of_another(models):
    async with ClientSession(f"http://{models.http}") as http:
        await complete(http, "a")
        await complete(http, "b")
        pids = models.pids()
        for service in ("scheduler a", "executor a"):
            os.kill(pids[service], signal.SIGKILL)
        await asyncio.gather(*(complete(http, "b") for _ in range(10)))
        await complete(http, "a")
        assert {name: pid for name, pid in models.pids().items() if name.endswith(" b")} == {
            name: pid for name, pid in pids.items() if name.endswith(" b")
        }


async def test_the_error_of_a_load_is_the_answer(models):
    async with ClientSession(f"http://{models.http}") as http:
        body = {"model": "broken", "prompt": PROMPT, "max_tokens": 3}
        async with http.post("/v1/completions", json=body) as response:
            error = (await response.json())["error"]
        assert (response.status, error["code"]) == (503, "model_not_loaded")
        assert error["message"].startswith("the model broken was not loaded: the scheduler did not start: ")
        assert "there is no folder '/nowhere'" in error["message"]
        assert (await states(http))["broken"] == "failed"
        async with http.post("/v1/completions", json={**body, "model": "d"}) as response:
            error = (await response.json())["error"]
        assert response.status == 404
        assert error["message"].endswith("there are a, b, broken, c")


def test_a_client_names_its_model(models):
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    with Client(models.target, model="b") as client:
        assert client.model_info().max_model_len == 64
        (output,) = client.generate([PROMPT], params)
        assert len(output.outputs[0].token_ids) == 3
        for name in ("a", "c"):
            with Client(models.target, model=name) as other:
                assert sum(len(each.outputs[0].token_ids) for each in other.stream(PROMPT, params)) == 3
        # Its session has ended with the model, which is loaded again.
        assert len(client.generate([PROMPT, PROMPT], params)) == 2
        with pytest.raises(InvalidRequestError, match="max_model_len = 64"):
            client.generate([list(range(2, 80))], params)
    with Client(models.target) as client, pytest.raises(InvalidRequestError, match="name one of a, b, broken, c"):
        client.model_info()
    with Client(models.target, model="bb") as client, pytest.raises(NotFoundError, match="did you mean b"):
        client.model_info()
    with Client(models.target, model="broken") as client, pytest.raises(UnavailableError, match="was not loaded"):
        client.model_info()


async def test_a_gateway_that_dies_finds_its_models_again(models):
    async with ClientSession(f"http://{models.http}") as http:
        await complete(http, "a")
        before = await states(http)
        os.kill(models.pids()["gateway"], signal.SIGKILL)
    async with asyncio.timeout(30), ClientSession(f"http://{models.http}") as http:
        while True:
            try:
                if await states(http) == before:
                    break
            except OSError:
                pass
            await asyncio.sleep(0.05)
        await complete(http, "a")


def test_up_serves_several_to_those_with_a_key_and_stops_at_a_signal(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    folders = [tmp_path / name for name in ("x", "y")]
    for each in folders:
        each.mkdir()
    up = subprocess.Popen(
        [sys.executable, "-m", "cadenza", "up", *map(str, folders), "--port", "0", "--http", "0", "--simulate",
         "instant", "--unload-after", "0.5", "--http-api-key-file", str(keys)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    target = up.stdout.readline().split()[1]
    with Client(target, model="x", token="other") as client, pytest.raises(UnauthenticatedError):
        client.model_info()
    with Client(target, model="y", token="secret") as client:
        assert len(client.generate([PROMPT], SamplingParams(max_tokens=3))) == 1
    lines = []
    for line in up.stderr:
        lines.append(line)
        if line.endswith("y: unloaded\n"):
            break
    up.send_signal(signal.SIGTERM)
    _, rest = up.communicate(timeout=20)
    said = "".join([*lines, rest])
    assert up.returncode == 0, said
    assert "y: unloaded" in said
    assert f"model     x: {folders[0]}" in said
    assert "unloaded after 0.5 s without a request" in said
    assert "y: loaded in" in said
    assert "x: loading" not in said
