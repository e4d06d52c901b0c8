"""LoRA adapters by name as `model`, and vLLM's calls that load and unload them."""

from __future__ import annotations

import pytest

from tests.helpers.executor.simulated_adapters import greedy_tokens, make_adapter
from tests.helpers.gateway.gateway import gateway
from tests.helpers.services import cadenza_services

PATH = "/v1/completions"
IDS = [5, 6, 7, 8]
BODY = {"prompt": IDS, "temperature": 0, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture
async def g(tmp_path):
    (tmp_path / "admin").write_text("root\n")
    scheduler = {"lora": [f"sql={make_adapter(tmp_path / 'sql', b'sql')}"], "lora_root": [str(tmp_path)]}
    async with (
        cadenza_services("simulated", scheduler=scheduler, simulate="instant") as running,
        gateway(running.target, http_admin_key_file=str(tmp_path / "admin")) as it,
    ):
        yield it


async def test_a_request_names_its_adapter_as_model(g, tmp_path):
    models = {model["id"]: model for model in (await g.get("/v1/models"))["data"]}
    assert set(models) == {"simulated", "sql"}
    assert models["sql"]["parent"] == "simulated"
    for name, folder in (("sql", tmp_path / "sql"), ("simulated", None)):
        answer = await g.post(PATH, {**BODY, "model": name})
        assert answer["model"] == name
        assert answer["choices"][0]["token_ids"] == greedy_tokens(IDS, 6, folder)
    error = (await g.post(PATH, {**BODY, "model": "none"}, 404))["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    error = await g.post(
        "/v1/messages", {"model": "none", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}, 400
    )
    assert "tokenizer" in error["error"]["message"]


async def test_adapters_are_loaded_and_unloaded_with_the_admins_key(g, tmp_path):
    body = {"lora_name": "gold", "lora_path": str(make_adapter(tmp_path / "gold", b"gold"))}
    for key in ({}, {"key": "guess"}):
        await g.post("/v1/load_lora_adapter", body, 401, **key)
    for path, answer, status in (
        ("/v1/load_lora_adapter", body, 200),
        ("/v1/load_lora_adapter", {**body, "lora_path": str(tmp_path / "sql")}, 409),
        ("/v1/load_lora_adapter", {"lora_name": "x"}, 400),
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": str(tmp_path / "nothing")}, 400),
        ("/v1/load_lora_adapter", {**body, "load_inplace": True}, 400),
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/etc"}, 403),
    ):
        async with g.http.post(path, json=answer, headers={"Authorization": "Bearer root"}) as response:
            assert response.status == status, await response.text()
    found = await g.post(PATH, {**BODY, "model": "gold"})
    assert found["choices"][0]["token_ids"] == greedy_tokens(IDS, 6, tmp_path / "gold")
    for status in (200, 404):
        async with g.http.post(
            "/v1/unload_lora_adapter", json={"lora_name": "gold"}, headers={"Authorization": "Bearer root"}
        ) as response:
            assert response.status == status, await response.text()
    await g.post(PATH, {**BODY, "model": "gold"}, 404)
