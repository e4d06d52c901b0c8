"""Checks manifests as an API server with strict field validation does: a field that no schema has is an error.

Core kinds by kubernetes-validate, custom resources by the schemas that their projects publish (tests/data/crds). Rules
in CEL (x-kubernetes-validations), formats, and what a project's own webhook refuses are not checked.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import kubernetes_validate
from jsonschema.validators import extend

from tests.helpers.manifests import Manifest
from tests.helpers.paths import ROOT

KUBERNETES = "1.34"
Schema = dict[str, Any]
Kind = tuple[str, str]
"""apiVersion and kind."""
_CRDS = ROOT / "tests" / "data" / "crds"


def validate(manifest: Manifest) -> None:
    """Raises jsonschema.ValidationError for a wrong field; SchemaNotFoundError for a kind without schema.

    A misspelt field may be a missing one too: the error names the one that is there.
    """
    if not is_custom(manifest):
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
        return
    errors = sorted(custom_errors(manifest), key=lambda error: error.validator != "additionalProperties")
    if errors:
        raise errors[0]
    named = {"apiVersion": "v1", "metadata": manifest["metadata"]}
    kubernetes_validate.validate({**named, "kind": "ConfigMap"}, KUBERNETES, strict=True)
    for template in _pod_templates(manifest["spec"]):
        kubernetes_validate.validate({**named, "kind": "PodTemplate", "template": template}, KUBERNETES, strict=True)


def is_custom(manifest: Manifest) -> bool:
    return _kind(manifest) in custom_kinds()


def custom_errors(manifest: Manifest) -> Iterator[jsonschema.ValidationError]:
    """All that is wrong with a custom resource, but for its metadata."""
    yield from custom_kinds()[_kind(manifest)].iter_errors(manifest)


@functools.cache
def custom_kinds() -> dict[Kind, Any]:
    """The validators of the kinds in tests/data/crds."""
    crds = [json.loads(path.read_text()) for path in sorted(_CRDS.glob("*.json"))]
    return {_kind(crd): validator(_with_triggers(crd)) for crd in crds}


def validator(schema: Schema) -> Any:
    """Of a resource by its openAPIV3Schema, which is near to JSON Schema's draft 4."""
    kind = extend(jsonschema.Draft4Validator, {"x-kubernetes-list-map-keys": _distinct})
    return kind(_strict({**schema, "x-kubernetes-embedded-resource": True}))


def _kind(manifest: Manifest) -> Kind:
    return manifest["apiVersion"], manifest["kind"]


def _with_triggers(crd: Manifest) -> Schema:
    """A CRD's schema; a ScaledObject's triggers are those of the one scaler in tests/data/crds/triggers."""
    schema: Schema = crd["openAPIV3Schema"]
    if crd["kind"] == "ScaledObject":
        scaler = json.loads((_CRDS / "triggers" / "prometheus.json").read_text())
        schema["properties"]["spec"]["properties"]["triggers"]["items"]["properties"] |= _trigger(scaler)
    return schema


def _trigger(scaler: Manifest) -> dict[str, Schema]:
    """The fields of a trigger by KEDA's list of what its scaler reads."""
    parameters = scaler["parameters"]
    metadata = {
        "type": "object",
        "properties": {each["name"]: {"type": each["type"]} for each in parameters},
        "required": [each["name"] for each in parameters if not each.get("optional") and "default" not in each],
    }
    return {"type": {"enum": [scaler["type"]]}, "metadata": metadata}


def _strict(schema: Schema) -> Schema:
    """JSON Schema for a structural schema with the extensions of Kubernetes."""
    made = dict(schema)
    if made.get("x-kubernetes-embedded-resource"):
        made |= _embedded(made)
    properties = {name: _strict(field) for name, field in made.get("properties", {}).items()}
    made["properties"] = properties
    for key in ("items", "additionalProperties"):
        if isinstance(made.get(key), dict):
            made[key] = _strict(made[key])
    if made.get("type") == "object" and not made.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    # The API server sets defaults first.
    made["required"] = [name for name in made.get("required", []) if "default" not in properties.get(name, {})]
    if made.get("x-kubernetes-list-type") == "set":
        made["uniqueItems"] = True
    if made.get("x-kubernetes-int-or-string"):
        made["type"] = ["integer", "string"]
    elif made.get("nullable") and "type" in made:
        made["type"] = [made["type"], "null"]
    return made


def _embedded(schema: Schema) -> Schema:
    """A whole resource has these fields besides; its metadata is not the schema's business."""
    properties = schema.get("properties", {})
    metadata = {"type": "object", **properties.get("metadata", {}), "x-kubernetes-preserve-unknown-fields": True}
    own = {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": metadata}
    return {"properties": {**properties, **own}, "required": [*schema.get("required", []), "apiVersion", "kind"]}


def _distinct(_: Any, keys: list[str], items: Any, schema: Schema) -> Iterator[jsonschema.ValidationError]:
    """x-kubernetes-list-map-keys: no two items of a list have the same values of these."""
    fields = schema["items"]["properties"]
    seen: list[dict[str, Any]] = []
    for item in items:
        values = {key: item.get(key, fields[key].get("default")) for key in keys}
        if values in seen:
            yield jsonschema.ValidationError(f"two items have {values}")
        seen.append(values)


def _pod_templates(value: Any) -> Iterator[Manifest]:
    """The pod templates within a part of a manifest."""
    if isinstance(value, dict):
        if "containers" in value.get("spec", {}):
            yield value
            return
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _pod_templates(each)
