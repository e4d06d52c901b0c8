"""The manifests in deploy/ by the schemas of Kubernetes and of the custom resources; a wrong field is named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from tests.helpers.manifest_schemas import custom_errors, custom_kinds, is_custom, validate, validator
from tests.helpers.manifests import OVERLAYS, RAY, RAY_SERVICE, Manifest, named, needs_kubectl, rendered

ALL = (*OVERLAYS, RAY, RAY_SERVICE)
WRONG = "wrongField"
Path = tuple[str | int, ...]


def with_wrong_fields(value: Any) -> Any:
    """A manifest's part with a field more in each of its objects."""
    if isinstance(value, dict):
        return {key: with_wrong_fields(each) for key, each in value.items()} | {WRONG: {}}
    return [with_wrong_fields(each) for each in value] if isinstance(value, list) else value


def objects(value: Any, at: Path = ()) -> Iterator[Path]:
    if isinstance(value, dict):
        yield at
    for key, each in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from objects(each, (*at, key))


def place(error: jsonschema.ValidationError) -> Path:
    """The object whose wrong field an error names, by its path or in its text."""
    path = tuple(error.absolute_path)
    if path[-1:] == (WRONG,):
        return path[:-1]
    assert f"'{WRONG}' was unexpected" in error.message
    return path


@needs_kubectl
@pytest.mark.parametrize("overlay", ALL)
def test_manifests_are_valid(overlay: str) -> None:
    for manifest in rendered(overlay):
        validate(manifest)


@needs_kubectl
def test_every_schema_has_a_manifest() -> None:
    used = {(each["apiVersion"], each["kind"]) for overlay in ALL for each in rendered(overlay) if is_custom(each)}
    assert used == set(custom_kinds())


@pytest.mark.slow
@needs_kubectl
def test_a_wrong_field_is_named_in_every_kind() -> None:
    for manifest in {each["kind"]: each for overlay in ALL for each in rendered(overlay)}.values():
        for part in {"spec", "metadata"} & set(manifest):
            with pytest.raises(jsonschema.ValidationError) as raised:
                validate({**manifest, part: {**manifest[part], WRONG: {}}})
            assert place(raised.value) == (part,)


@needs_kubectl
@pytest.mark.parametrize("overlay", ALL)
def test_a_wrong_field_is_named_in_every_object_of_a_custom_resource(overlay: str) -> None:
    for manifest in rendered(overlay):
        if is_custom(manifest):
            parts = {key: value for key, value in manifest.items() if key != "metadata"}
            assert set(map(place, custom_errors(with_wrong_fields(parts)))) == set(objects(parts))


CHANGES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a size without templates": ("LeaderWorkerSet", "cadenza-group", {"leaderWorkerTemplate": {"size": 1}}),
    "a field of another object": ("LeaderWorkerSet", "cadenza-group", {"restartPolicy": "Default"}),
    "a number as text": ("LeaderWorkerSet", "cadenza-group", {"replicas": "2"}),
    "a use that there is not": ("Certificate", "cadenza-scheduler", {"usages": ["server"]}),
    "a trigger without its threshold": (
        "ScaledObject",
        "cadenza-executor",
        {"triggers": [{"type": "prometheus", "metadata": {"serverAddress": "a", "query": "b"}}]},
    ),
}


@needs_kubectl
@pytest.mark.parametrize("change", CHANGES)
def test_a_wrong_value_is_refused(change: str) -> None:
    kind, name, fields = CHANGES[change]
    manifest = named("ranks", kind, name)
    with pytest.raises(jsonschema.ValidationError):
        validate({**manifest, "spec": {**manifest["spec"], **fields}})


ANY = {"x-kubernetes-preserve-unknown-fields": True}
NAMED = {"type": "object", "properties": {"name": {"type": "string"}}}
DEFAULTED = {"type": "object", "properties": {"n": {"type": "integer", "default": 1}}, "required": ["n"]}
EMBEDDED = {"type": "object", "x-kubernetes-embedded-resource": True, "properties": {"spec": NAMED}}
PORT = {
    "type": "object",
    "properties": {"port": {"type": "integer"}, "protocol": {"type": "string", "default": "TCP"}},
}
PORTS = {"type": "array", "items": PORT, "x-kubernetes-list-map-keys": ["port", "protocol"]}
RESOURCE = {"apiVersion": "v1", "kind": "Any", "metadata": {"any": 1}, "spec": {"name": "a"}}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (NAMED, {"name": "a"}, {"nam": "a"}),
        ({"type": "object"}, {}, {"any": 1}),
        ({"type": "object", "additionalProperties": NAMED}, {"any": {"name": "a"}}, {"any": {"nam": "a"}}),
        ({"type": "array", "items": NAMED}, [{"name": "a"}], [{"nam": "a"}]),
        ({**NAMED, **ANY}, {"name": "a", "any": 1}, {"name": 1}),
        ({**NAMED, **ANY, "properties": {"in": NAMED}}, {"any": {"nam": 1}}, {"in": {"nam": "a"}}),
        ({"x-kubernetes-int-or-string": True}, "25%", {}),
        ({"x-kubernetes-int-or-string": True, "pattern": "^[0-9]+%$"}, 3, "25"),
        ({"type": "string", "nullable": True}, None, 1),
        ({"type": "string"}, "a", None),
        (DEFAULTED, {}, {"n": "1"}),
        (EMBEDDED, RESOURCE, {**RESOURCE, "spec": {"nam": "a"}}),
        (EMBEDDED, RESOURCE, {"kind": "Any"}),
        ({"type": "array", "x-kubernetes-list-type": "set"}, ["a", "b"], ["a", "a"]),
        (PORTS, [{"port": 1}, {"port": 1, "protocol": "UDP"}], [{"port": 1}, {"port": 1, "protocol": "TCP"}]),
        ({"type": "integer", "minimum": 0, "exclusiveMinimum": True}, 1, 0),
    ],
)
def test_the_extensions_of_kubernetes(schema: Any, right: Any, wrong: Any) -> None:
    """With a field of a resource that has this schema."""
    checks = validator({"type": "object", "properties": {"field": schema}})
    resource: Manifest = {"apiVersion": "v1", "kind": "Any", "metadata": {"name": "a"}}
    assert checks.is_valid({**resource, "field": right})
    assert not checks.is_valid({**resource, "field": wrong})
