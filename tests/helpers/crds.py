"""Schemas of the custom resources in deploy/: of each published one, the fields that the manifests use.

Written from the CRDs of these versions, all Apache-2.0: LeaderWorkerSet 0.10 (kubernetes-sigs/lws), cert-manager 1.21,
prometheus-operator 0.93, KEDA 2.20, InferencePool v1 (kubernetes-sigs/gateway-api-inference-extension, August 2026),
KubeRay 1.7 (ray-project/kuberay).
Every field that is not here is refused, so a new one is looked up first. `published_crds` reads whole files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Schema = dict[str, Any]
_INT: Schema = {"type": "integer"}
_BOOL: Schema = {"type": "boolean"}
_NAME: Schema = {"type": "string", "minLength": 1, "maxLength": 253}
_DURATION: Schema = {"type": "string", "pattern": r"^([0-9]+(h|m|s))+$"}
_INT_OR_STRING: Schema = {"anyOf": [{"type": "integer"}, {"type": "string"}]}
_LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}, "minProperties": 1}
_ANY: Schema = {"type": "object"}
"""What another schema checks."""


def _one_of(*values: str) -> Schema:
    return {"enum": list(values)}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


def _object(required: str = "", /, **properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def _resource(spec: Schema) -> Schema:
    texts: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
    metadata = _object("name namespace", name=_NAME, namespace=_NAME, labels=_LABELS, annotations=texts)
    return _object("apiVersion kind metadata spec", apiVersion=_NAME, kind=_NAME, metadata=metadata, spec=spec)


_POD_TEMPLATE = _object("spec", metadata=_object("", labels=_LABELS), spec=_ANY)
_LEADER_WORKER_SET = _object(
    "leaderWorkerTemplate",
    replicas=_INT,
    rolloutStrategy=_object(
        "type",
        type=_one_of("RollingUpdate"),
        rollingUpdateConfiguration=_object("", maxSurge=_INT_OR_STRING, maxUnavailable=_INT_OR_STRING, partition=_INT),
    ),
    startupPolicy=_one_of("LeaderCreated", "LeaderReady"),
    leaderWorkerTemplate=_object(
        "workerTemplate",
        size={"type": "integer", "minimum": 1},
        restartPolicy=_one_of("Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"),
        leaderTemplate=_POD_TEMPLATE,
        workerTemplate=_POD_TEMPLATE,
    ),
)
_CERTIFICATE = _object(
    "issuerRef secretName",
    issuerRef=_object("name", name=_NAME, kind=_NAME, group=_NAME),
    secretName=_NAME,
    isCA=_BOOL,
    commonName=_NAME,
    dnsNames=_list(_NAME),
    duration=_DURATION,
    renewBefore=_DURATION,
    privateKey=_object(
        "",
        algorithm=_one_of("RSA", "ECDSA", "Ed25519"),
        encoding=_one_of("PKCS1", "PKCS8"),
        rotationPolicy=_one_of("Never", "Always"),
        size=_INT,
    ),
    usages=_list(_one_of("digital signature", "key encipherment", "server auth", "client auth")),
)
_ISSUER = {
    **_object("", selfSigned=_object(""), ca=_object("secretName", secretName=_NAME)),
    "minProperties": 1,
    "maxProperties": 1,
}
_SERVICE_MONITOR = _object(
    "endpoints selector",
    selector=_object("", matchLabels=_LABELS),
    endpoints=_list(
        _object(
            "", port=_NAME, path=_NAME, interval=_DURATION, scrapeTimeout=_DURATION, scheme=_one_of("http", "https")
        )
    ),
)
_POLICY = _object("type value periodSeconds", type=_one_of("Pods", "Percent"), value=_INT, periodSeconds=_INT)
_BEHAVIOR = _object("", stabilizationWindowSeconds=_INT, policies=_list(_POLICY))
_SCALED_OBJECT = _object(
    "scaleTargetRef triggers",
    scaleTargetRef=_object("name", apiVersion=_NAME, kind=_NAME, name=_NAME),
    minReplicaCount=_INT,
    maxReplicaCount=_INT,
    pollingInterval=_INT,
    cooldownPeriod=_INT,
    fallback=_object(
        "failureThreshold replicas",
        failureThreshold=_INT,
        replicas=_INT,
        behavior=_one_of("static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"),
    ),
    advanced=_object(
        "", horizontalPodAutoscalerConfig=_object("", behavior=_object("", scaleUp=_BEHAVIOR, scaleDown=_BEHAVIOR))
    ),
    triggers=_list(
        _object(
            "type metadata",
            type=_one_of("prometheus"),
            metadata=_object(
                "serverAddress query threshold",
                serverAddress={"type": "string", "pattern": "^https?://"},
                query={"type": "string"},
                threshold={"type": "string", "pattern": r"^[0-9]+$"},
            ),
        )
    ),
)
_PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
_INFERENCE_POOL = _object(
    "selector targetPorts endpointPickerRef",
    selector=_object("matchLabels", matchLabels=_LABELS),
    targetPorts={**_list(_object("number", number=_PORT)), "maxItems": 8},
    appProtocol=_one_of("http", "kubernetes.io/h2c"),
    endpointPickerRef=_object(
        "name port",
        name=_NAME,
        group=_NAME,
        kind=_NAME,
        port=_object("number", number=_PORT),
        failureMode=_one_of("FailOpen", "FailClose"),
    ),
)
_RAY_START: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
_RAY_CLUSTER = _object(
    "headGroupSpec",
    rayVersion=_NAME,
    headGroupSpec=_object("template", rayStartParams=_RAY_START, template=_POD_TEMPLATE),
    workerGroupSpecs=_list(
        _object(
            "groupName minReplicas maxReplicas template",
            groupName=_NAME,
            replicas=_INT,
            minReplicas=_INT,
            maxReplicas=_INT,
            rayStartParams=_RAY_START,
            template=_POD_TEMPLATE,
        )
    ),
)
CRD_SCHEMAS = {
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): _resource(_LEADER_WORKER_SET),
    ("cert-manager.io/v1", "Certificate"): _resource(_CERTIFICATE),
    ("cert-manager.io/v1", "Issuer"): _resource(_ISSUER),
    ("monitoring.coreos.com/v1", "ServiceMonitor"): _resource(_SERVICE_MONITOR),
    ("keda.sh/v1alpha1", "ScaledObject"): _resource(_SCALED_OBJECT),
    ("inference.networking.k8s.io/v1", "InferencePool"): _resource(_INFERENCE_POOL),
    ("ray.io/v1", "RayCluster"): _resource(_RAY_CLUSTER),
}
"""By apiVersion and kind."""


def published_crds(folder: Path) -> dict[tuple[str, str], Schema]:
    """The schemas of the CustomResourceDefinitions in a folder's files, by apiVersion and kind."""
    return dict(_published(folder))


def _published(folder: Path) -> Iterator[tuple[tuple[str, str], Schema]]:
    for path in sorted(folder.glob("*.yaml")):
        for crd in yaml.load_all(path.read_text(), Loader=yaml.CSafeLoader):
            for version in crd["spec"]["versions"]:
                api = f"{crd['spec']['group']}/{version['name']}"
                schema = version["schema"]["openAPIV3Schema"]
                schema["properties"]["metadata"] = _ANY
                yield (api, crd["spec"]["names"]["kind"]), _strict(schema)


def _strict(schema: Any) -> Any:
    """The API server's rule: a field that no schema has is an error."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _strict(value) for key, value in schema.items()}
    is_object = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    if is_object and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made
