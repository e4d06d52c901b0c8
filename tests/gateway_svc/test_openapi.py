"""GET /openapi.json: it says of each field what the gateway does with it."""

from __future__ import annotations

import jsonschema
import pytest

from gateway_svc.fields.field import KINDS, Use
from gateway_svc.fields.reading import read_fields
from gateway_svc.fields.tables import APIS, REQUIRED
from gateway_svc.http.errors import ApiError
from gateway_svc.openapi import KIND_SCHEMAS, body_schema

VALUES = [
    None,
    True,
    False,
    0,
    7,
    -(2**63),
    0.5,
    "",
    "text",
    "auto",
    [],
    ["a"],
    [7],
    ["a", 7],
    {},
    {"a": "b"},
    {"a": 1},
]


async def test_all_paths_are_described(g):
    document = await g.get("/openapi.json")
    assert set(document["paths"]) == set(g.paths) - {"/openapi.json"}
    for path in APIS:
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        jsonschema.Draft202012Validator.check_schema(body)
        assert body == body_schema(APIS[path], REQUIRED.get(path, ()))
    errors = document["components"]["schemas"]
    jsonschema.validate(await g.post("/v1/completions", {}, 400), errors["Error"])
    jsonschema.validate(await g.post("/v1/messages", {}, 400), errors["AnthropicError"])


def is_read(path, body):
    try:
        read_fields(APIS[path], body)
    except ApiError:
        return False
    return True


@pytest.mark.parametrize("path", APIS)
def test_a_schema_allows_what_the_table_does(path):
    assert KIND_SCHEMAS.keys() == KINDS.keys()
    validator = jsonschema.Draft202012Validator(body_schema(APIS[path], ()))
    for field in APIS[path].values():
        values = [*VALUES, *field.neutral]
        allowed = [value for value in values if validator.is_valid({field.name: value})]
        assert allowed == [value for value in values if is_read(path, {field.name: value})], field.name
        assert field.use is Use.REFUSED or len(allowed) > 1
    assert not validator.is_valid({"temprature": 1})


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in REQUIRED if "lora" not in path])
async def test_without_a_field_that_is_required_there_is_no_request(g, path):
    for name in REQUIRED[path]:
        given = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        body = {each: given[each] for each in REQUIRED[path] if each != name}
        assert f"{name} is missing" in (await g.post(path, body, 400))["error"]["message"]
