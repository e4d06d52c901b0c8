"""Choices of arguments' schemas are found in bounded time."""

from __future__ import annotations

import pytest

from gateway_svc.tools.object_schemas import flat, object_variants


@pytest.mark.parametrize("key", ["allOf", "anyOf", "oneOf"])
def test_schemas_that_refer_to_each_other_without_an_end_are_refused(key):
    """Along all paths the first two would take for ever, and the last has more parts than a stack has frames."""
    definitions = {f"d{index}": {key: [{"$ref": f"#/$defs/d{index + 1}"}] * 10} for index in range(40)}
    many = {key: [{"anyOf": [{"required": [f"a{one}"]} for one in range(16)]} for _ in range(12)]}
    circle = {key: [{"$ref": "#"}]}
    chain = {f"d{index}": {key: [{"$ref": f"#/$defs/d{index + 1}"}]} for index in range(2000)}
    for schema in ({"$defs": definitions, **definitions["d0"]}, many, circle, {"$defs": chain, **chain["d0"]}):
        with pytest.raises(ValueError, match="a schema"):
            object_variants(schema, schema)
        assert flat(schema) == schema
