"""Writes the data files of this folder, and its README: schemas of custom resources, as their projects publish them.

    python -m tests.data.crds.record CLONES

CLONES has a clone of each repository of `SOURCES` with its commit, at CLONES/OWNER/NAME.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Source:
    """A file of a released version."""

    repository: str
    """On GitHub."""
    version: str
    commit: str
    """What the tag `version` names."""
    path: str
    api_version: str
    """Of the CRD's versions, the one that deploy/ uses."""


_CERT_MANAGER = ("cert-manager/cert-manager", "v1.21.1", "24e33194fb39488eff2bbf10c6dc640f407cad44")
_KUBERAY = ("ray-project/kuberay", "v1.7.0", "59d663aeec13760646da3db9c1cf8cfe883e30b7")
_KEDA = ("kedacore/keda", "v2.20.2", "68a5b5028f35b22d50597c69819ab32c4e92f21a")
SOURCES = {
    "LeaderWorkerSet.json": Source(
        "kubernetes-sigs/lws",
        "v0.10.0",
        "2161f38ff333f9e24d3c44adef7cd5d9787cac00",
        "config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml",
        "leaderworkerset.x-k8s.io/v1",
    ),
    "Certificate.json": Source(*_CERT_MANAGER, "deploy/crds/cert-manager.io_certificates.yaml", "cert-manager.io/v1"),
    "Issuer.json": Source(*_CERT_MANAGER, "deploy/crds/cert-manager.io_issuers.yaml", "cert-manager.io/v1"),
    "ServiceMonitor.json": Source(
        "prometheus-operator/prometheus-operator",
        "v0.93.0",
        "f8fafd475f3d132e239432ae6172de60a6cb6516",
        "example/prometheus-operator-crd/monitoring.coreos.com_servicemonitors.yaml",
        "monitoring.coreos.com/v1",
    ),
    "ScaledObject.json": Source(*_KEDA, "config/crd/bases/keda.sh_scaledobjects.yaml", "keda.sh/v1alpha1"),
    "InferencePool.json": Source(
        "kubernetes-sigs/gateway-api-inference-extension",
        "v1.6.0",
        "992e5c292afb248801ce8d9234eb5b9d28eea231",
        "config/crd/bases/inference.networking.k8s.io_inferencepools.yaml",
        "inference.networking.k8s.io/v1",
    ),
    "RayCluster.json": Source(*_KUBERAY, "ray-operator/config/crd/bases/ray.io_rayclusters.yaml", "ray.io/v1"),
    "RayService.json": Source(*_KUBERAY, "ray-operator/config/crd/bases/ray.io_rayservices.yaml", "ray.io/v1"),
}
"""By the name of the file here."""
TRIGGERS = Source(*_KEDA, "schema/generated/scalers-schema.json", "keda.sh/v1alpha1")
"""What KEDA's triggers read: in the CRD their metadata is a map with any keys."""
TRIGGER = "prometheus"

_README = """\
# Published schemas of custom resources

`record.py` writes this file and the JSON files. By them `tests/helpers/manifest_schemas.py` checks the manifests of
`deploy/`.

| file | repository | version | commit | file there |
|---|---|---|---|---|
{rows}

Of each CustomResourceDefinition its file has the `openAPIV3Schema` of one version, without the descriptions, else
unchanged. `triggers/` has the parameters that a KEDA scaler reads: in the CRD a trigger's metadata has any keys.

All are under the Apache License 2.0, which is in [LICENSE](../../../LICENSE). The NOTICE of prometheus-operator:
CoreOS Project, Copyright 2015 CoreOS, Inc. This product includes software developed at CoreOS, Inc.
(http://www.coreos.com/).

A new version: write its tag and commit into `SOURCES` of `record.py`, then

```sh
for name in {repositories}; do
  git clone --filter=blob:none --no-checkout https://github.com/$name /tmp/clones/$name
done
.venv/bin/python -m tests.data.crds.record /tmp/clones
```
"""


def without_descriptions(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema without the texts of its fields; a field that is itself named description stays."""
    return {key: _within(key, value) for key, value in schema.items() if key != "description"}


def _within(key: str, value: Any) -> Any:
    if key == "properties":
        return {name: without_descriptions(field) for name, field in value.items()}
    return without_descriptions(value) if key in ("items", "additionalProperties") else value


def read(clones: Path, source: Source) -> str:
    clone = clones / source.repository
    command = ["git", "-C", str(clone), "rev-parse", f"{source.version}^{{commit}}"]
    tagged = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if tagged != source.commit:
        raise SystemExit(f"{source.repository}: {source.version} is {tagged}, not {source.commit}")
    command = ["git", "-C", str(clone), "show", f"{source.commit}:{source.path}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def published(text: str, api_version: str) -> dict[str, Any]:
    """What a CRD's file says of one served version."""
    crd = yaml.safe_load(text)["spec"]
    group, name = api_version.split("/")
    (version,) = (each for each in crd["versions"] if each["name"] == name and each["served"])
    assert crd["group"] == group
    schema = without_descriptions(version["schema"]["openAPIV3Schema"])
    return {"apiVersion": api_version, "kind": crd["names"]["kind"], "openAPIV3Schema": schema}


def trigger(text: str) -> dict[str, Any]:
    (found,) = (each for each in json.loads(text)["scalers"] if each["type"] == TRIGGER)
    return dict(found)


def write(name: str, content: dict[str, Any]) -> None:
    (FOLDER / name).write_text(json.dumps(content, separators=(",", ":")) + "\n")


def main(clones: Path) -> None:
    for name, source in SOURCES.items():
        write(name, published(read(clones, source), source.api_version))
    name = f"triggers/{TRIGGER}.json"
    write(name, trigger(read(clones, TRIGGERS)))
    sources = {**SOURCES, name: TRIGGERS}
    rows = [
        f"| `{name}` | {source.repository} | {source.version} | {source.commit} | `{source.path}` |"
        for name, source in sources.items()
    ]
    repositories = " ".join(dict.fromkeys(source.repository for source in sources.values()))
    (FOLDER / "README.md").write_text(_README.format(rows="\n".join(rows), repositories=repositories))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
