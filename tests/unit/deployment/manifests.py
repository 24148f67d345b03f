"""configs/kubernetes as `kubectl kustomize` renders it, and what the Pod Security Standards say of a pod."""

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.unit.deployment.shipped import CONFIGS

KUBERNETES = CONFIGS / "kubernetes"
WITHOUT_KUBECTL = "kubectl is not installed: nothing renders configs/kubernetes"
_DEADLINE_S = 60
_HASH = re.compile(r"-[a-z0-9]{10}$")
_NAMESPACES_OF_THE_HOST = ("hostIPC", "hostNetwork", "hostPID")
_VOLUMES_OF_PODS = {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"}

Object = Mapping[str, Any]


def has_kubectl() -> bool:
    """Return whether `kubectl kustomize` can be run."""
    return shutil.which("kubectl") is not None


@dataclass(frozen=True)
class Rendered:
    """All objects of a kustomization."""

    objects: tuple[Object, ...]

    def one(self, kind: str, name: str) -> Object:
        """Return an object by its name, a ConfigMap also without its hash."""
        (found,) = (
            each
            for each in self.objects
            if each["kind"] == kind and name in (each["metadata"]["name"], _HASH.sub("", each["metadata"]["name"]))
        )
        return found

    def data(self, name: str) -> Mapping[str, str]:
        """Return the files of a ConfigMap."""
        found: Mapping[str, str] = self.one("ConfigMap", name)["data"]
        return found

    def pods(self) -> dict[str, Any]:
        """Return the pod template of each workload, by the workload's name."""
        return {each["metadata"]["name"]: template for each in self.objects if (template := template_of(each))}

    def pod(self, name: str) -> Any:
        """Return the spec of a workload's pods."""
        return self.pods()[name]["spec"]


@functools.cache
def rendered(folder: Path) -> Rendered:
    """Render a folder with a kustomization."""
    done = subprocess.run(
        ["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=_DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return Rendered(tuple(yaml.safe_load_all(done.stdout)))


def composed(folder: Path, *components: str) -> Rendered:
    """Render the base with these components, as a kustomization in `folder`."""
    base = Path(os.path.relpath(KUBERNETES, folder.resolve()))
    text = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [str(base / "base")],
        "components": [str(base / "components" / name) for name in components],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(text))
    return rendered(folder)


def template_of(workload: Object) -> Any:
    """Return a workload's pod template; None for what has none."""
    spec = workload.get("spec", {})
    return spec.get("jobTemplate", {}).get("spec", spec).get("template")


def containers_of(pod: Object) -> dict[str, Any]:
    """Return all containers of a pod, those of its start included, by name."""
    return {each["name"]: each for each in (*pod.get("initContainers", ()), *pod["containers"])}


def violations(pod: Object) -> set[str]:
    """Return what a pod does that the standard `restricted` forbids: "PLACE: FIELD".

    Source: kubernetes.io/docs/concepts/security/pod-security-standards, of Kubernetes 1.32.
    """
    return set(_of_the_pod(pod)) | {
        f"{name}: {field}"
        for name, each in containers_of(pod).items()
        for field in _of_a_container(pod.get("securityContext", {}), each)
    }


def _of_the_pod(pod: Object) -> Iterator[str]:
    yield from (f"pod: {field}" for field in _NAMESPACES_OF_THE_HOST if pod.get(field))
    for volume in pod.get("volumes", ()):
        (kind,) = volume.keys() - {"name"}
        if kind not in _VOLUMES_OF_PODS:
            yield f"{volume['name']}: {kind}"


def _of_a_container(of_pod: Object, container: Object) -> Iterator[str]:
    own = container.get("securityContext", {})
    both = {**of_pod, **own}
    if own.get("privileged"):
        yield "privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation"
    if both.get("runAsNonRoot") is not True:
        yield "runAsNonRoot"
    if both.get("runAsUser") == 0:
        yield "runAsUser"
    if own.get("capabilities", {}).get("drop") != ["ALL"]:
        yield "capabilities.drop"
    if set(own.get("capabilities", {}).get("add", ())) - {"NET_BIND_SERVICE"}:
        yield "capabilities.add"
    if both.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
        yield "seccompProfile"
    if any("hostPort" in port for port in container.get("ports", ())):
        yield "hostPort"
