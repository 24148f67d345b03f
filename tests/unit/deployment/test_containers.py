"""Dockerfiles, compose.yaml and kvtier.yaml: they parse, and what they name exists and agrees. Nothing is built."""

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from kvtier.cli.app import app
from kvtier.config import DaemonConfig, resolve
from tests.unit.deployment.shipped import (
    CONFIGS,
    ROOT,
    Mounts,
    assert_shared,
    assert_transfer_config,
    config_of,
    memory_bytes,
)

DOCKERFILES = ("Dockerfile", "vllm.Dockerfile")


@pytest.fixture(autouse=True)
def large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Explicit sizes are compared with the file system, here that of whoever runs the tests."""
    monkeypatch.setattr(resolve, "filesystem_bytes", lambda folder: 1 << 45)


def instructions(name: str) -> list[tuple[str, str]]:
    """Return a Dockerfile's instructions, continued lines joined."""
    text = re.sub(r"\\\n", " ", (CONFIGS / "docker" / name).read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines]


def project() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


@pytest.mark.parametrize("name", DOCKERFILES)
def test_what_is_copied_exists_and_reaches_the_build(name: str) -> None:
    ignored = (CONFIGS / "docker" / f"{name}.dockerignore").read_text().splitlines()
    copied = [rest for word, rest in instructions(name) if word == "COPY" and not rest.startswith("--from")]
    sources = {source for rest in copied for source in rest.split()[:-1]}
    assert {"kvtier", "connector", "pyproject.toml"} <= sources
    for source in sources:
        assert (ROOT / source).exists()
        assert f"!{source}" in ignored


def test_the_image_runs_scripts_that_the_package_has() -> None:
    found = dict(instructions("Dockerfile"))
    assert json.loads(found["ENTRYPOINT"])[0] in project()["scripts"]
    command = json.loads(found["HEALTHCHECK"].partition("CMD ")[2])
    assert_probe(command)
    assert found["USER"] != "root"


def test_the_image_says_where_its_folders_are() -> None:
    text = dict(instructions("Dockerfile"))["ENV"]
    environment = dict(word.split("=", 1) for word in text.split())
    config = config_of(environment)
    run = dict(instructions("Dockerfile"))["RUN"]
    assert {config.server.socket.parent, config.host.arena_dir, config.disk.disk_dir} <= {
        Path(word) for word in run.split() if word.startswith("/")
    }


def assert_probe(command: list[str]) -> None:
    """Check that a probe is a command of ours, which fails, and not for wrong usage, when no daemon answers."""
    assert command[0] == "kvtier"
    result = CliRunner().invoke(app, command[1:], env={"KVTIER_SOCKET": "/nonexistent/kvtier.sock"})
    assert result.exit_code == 3, result.output
    assert result.stdout == ""


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((CONFIGS / "docker" / "compose.yaml").read_text())
    return document


def compose_mounts(service: Mapping[str, Any]) -> Mounts:
    pairs = (volume.split(":")[:2] for volume in service["volumes"])
    return {PurePosixPath(target): source for source, target in pairs}


def test_compose_daemon_and_vllm_see_the_same_files_as_the_same_user(compose: dict[str, Any]) -> None:
    daemon, vllm = compose["services"]["kvtier"], compose["services"]["vllm"]
    config = config_of(daemon["environment"])
    assert_shared(config, compose_mounts(daemon), compose_mounts(vllm))
    assert daemon["user"] == vllm["user"] == "1000:1000"
    assert vllm["environment"]["KVTIER_SOCKET"] == str(config.server.socket)
    assert_transfer_config(vllm["command"])
    named = {source for service in (daemon, vllm) for source in compose_mounts(service).values() if "/" not in source}
    assert named == set(compose["volumes"])


def test_compose_has_room_for_the_arenas(compose: dict[str, Any]) -> None:
    daemon = compose["services"]["kvtier"]
    config = config_of(daemon["environment"])
    options = compose["volumes"]["arena"]["driver_opts"]
    arena = dict(option.split("=") for option in options["o"].split(","))
    assert options["type"] == "tmpfs"
    assert memory_bytes(arena["size"]) > config.host.host_bytes
    assert memory_bytes(daemon["mem_limit"]) > config.host.host_bytes
    assert (arena["uid"], arena["mode"]) == (daemon["user"].split(":")[0], "0700")
    assert int(daemon["stop_grace_period"].removesuffix("s")) > config.server.drain_timeout_s


def test_the_image_has_the_compiled_codecs() -> None:
    installs = [rest for word, rest in instructions("Dockerfile") if word == "RUN" and "pip install" in rest]
    assert installs
    assert all("'.[fast]'" in rest for rest in installs)
    assert "fast" in project()["optional-dependencies"]


def test_compose_metrics_can_be_scraped_and_vllm_found(compose: dict[str, Any]) -> None:
    daemon, vllm = compose["services"]["kvtier"], compose["services"]["vllm"]
    host, _, port = config_of(daemon["environment"]).metrics.listen.rpartition(":")
    assert host == "0.0.0.0", "a container's loopback is reached by itself alone"
    assert daemon["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert daemon["environment"]["KVTIER_VLLM_URL"] == "http://vllm:8000"
    (device,) = vllm["deploy"]["resources"]["reservations"]["devices"]
    assert "gpu" in device["capabilities"]


def test_compose_probes_and_builds_what_exists(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert_probe(services["kvtier"]["healthcheck"]["test"][1:])
    assert services["vllm"]["depends_on"].keys() <= services.keys()
    for service in services.values():
        context = (CONFIGS / "docker" / service["build"]["context"]).resolve()
        assert context == ROOT
        assert (context / service["build"]["dockerfile"]).is_file()


@pytest.fixture(scope="module")
def objects() -> dict[str, dict[str, Any]]:
    documents = yaml.safe_load_all((CONFIGS / "kubernetes" / "kvtier.yaml").read_text())
    return {document["kind"]: document for document in documents}


def pod(workload: Mapping[str, Any]) -> dict[str, Any]:
    """Return a pod template's spec; its labels are those selected."""
    template = workload["spec"]["template"]
    assert workload["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    spec: dict[str, Any] = template["spec"]
    return spec


def environment_of(container: Mapping[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container["env"]}


def pod_mounts(spec: Mapping[str, Any], container: Mapping[str, Any]) -> Mounts:
    """Return what is mounted, as the volume's definition: host paths are the same on a node when they are equal."""
    volumes = {volume["name"]: json.dumps({**volume, "name": ""}) for volume in spec["volumes"]}
    mounts = {PurePosixPath(m["mountPath"]): volumes[m["name"]] for m in container["volumeMounts"]}
    assert len(mounts) == len(container["volumeMounts"])
    return mounts


def test_kubernetes_daemon_and_vllm_see_the_same_files_as_the_same_user(
    objects: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    daemon_pod, vllm_pod = pod(objects["DaemonSet"]), pod(objects["Deployment"])
    (daemon,), (vllm,) = daemon_pod["containers"], vllm_pod["containers"]
    config = kubernetes_config(objects, daemon, tmp_path)
    assert_shared(config, pod_mounts(daemon_pod, daemon), pod_mounts(vllm_pod, vllm))
    assert environment_of(vllm)["KVTIER_SOCKET"] == str(config.server.socket)
    assert vllm_pod["securityContext"]["runAsUser"] == daemon["securityContext"]["runAsUser"] == 1000
    assert_transfer_config(vllm["args"])
    limit_bytes = memory_bytes(daemon["resources"]["limits"]["memory"])
    assert limit_bytes > config.host.host_bytes
    assert daemon_pod["terminationGracePeriodSeconds"] > config.server.drain_timeout_s


def kubernetes_config(objects: Mapping[str, Any], daemon: Mapping[str, Any], tmp_path: Path) -> DaemonConfig:
    """Read the ConfigMap's file from where the pod's variable says that it is."""
    environment = environment_of(daemon)
    path = PurePosixPath(environment.pop("KVTIER_CONFIG"))
    (mount,) = (mount for mount in daemon["volumeMounts"] if mount["name"] == "config")
    assert str(path.parent) == mount["mountPath"]
    (tmp_path / path.name).write_text(objects["ConfigMap"]["data"][path.name])
    return config_of(environment, tmp_path / path.name)


def test_kubernetes_makes_the_folders_for_the_daemons_user(objects: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    spec = pod(objects["DaemonSet"])
    (folders,), (daemon,) = spec["initContainers"], spec["containers"]
    config = kubernetes_config(objects, daemon, tmp_path)
    made = {Path(word) for word in folders["command"] if word.startswith("/")}
    assert made == {config.server.socket.parent, config.host.arena_dir, config.disk.disk_dir}
    assert {str(path) for path in made} == {mount["mountPath"] for mount in folders["volumeMounts"]}
    assert folders["command"][folders["command"].index("-o") + 1] == str(daemon["securityContext"]["runAsUser"])


def test_kubernetes_runs_where_the_nodes_are_labelled(objects: dict[str, dict[str, Any]]) -> None:
    """It asked 20 GiB of every node."""
    daemon, vllm = pod(objects["DaemonSet"]), pod(objects["Deployment"])
    assert daemon["nodeSelector"] == vllm["nodeSelector"] != {}


def test_kubernetes_services_set_no_variables_that_are_settings(objects: dict[str, dict[str, Any]]) -> None:
    """The Service `vllm` set VLLM_PORT to an address, with which vLLM does not start."""
    assert not any(pod(objects[kind])["enableServiceLinks"] for kind in ("DaemonSet", "Deployment"))


def test_kubernetes_metrics_and_vllm_can_be_reached(objects: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    daemon_pod, vllm_pod = pod(objects["DaemonSet"]), pod(objects["Deployment"])
    (daemon,), (vllm,) = daemon_pod["containers"], vllm_pod["containers"]
    listen = kubernetes_config(objects, daemon, tmp_path).metrics.listen
    (metrics,), (http,) = daemon["ports"], vllm["ports"]
    assert listen == f"0.0.0.0:{metrics['containerPort']}"
    service = objects["Service"]
    (port,) = service["spec"]["ports"]
    assert service["spec"]["selector"] == objects["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert port["targetPort"] == http["name"]
    assert environment_of(daemon)["KVTIER_VLLM_URL"] == f"http://{service['metadata']['name']}:{port['port']}"
    monitor = yaml.safe_load((CONFIGS / "kubernetes" / "podmonitor.yaml").read_text())["spec"]
    assert [endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]] == [metrics["name"], http["name"]]
    assert monitor["jobLabel"] == "app", "the alert rules ask for the job kvtier"
    (selected,) = monitor["selector"]["matchExpressions"]
    labels = [objects[kind]["spec"]["template"]["metadata"]["labels"] for kind in ("DaemonSet", "Deployment")]
    assert selected["values"] == [label[selected["key"]] for label in labels] == ["kvtier", "vllm"]


def test_kubernetes_probes(objects: dict[str, dict[str, Any]]) -> None:
    (daemon,), (vllm,) = pod(objects["DaemonSet"])["containers"], pod(objects["Deployment"])["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert_probe(daemon[probe]["exec"]["command"])
        # The CLI gives a daemon that is there but mute ten seconds.
        assert daemon[probe]["timeoutSeconds"] > 10
        assert vllm[probe]["httpGet"] == {"path": "/health", "port": vllm["ports"][0]["name"]}


def test_kubernetes_verifies_beside_a_daemon(objects: dict[str, dict[str, Any]]) -> None:
    job = yaml.safe_load((CONFIGS / "kubernetes" / "verify.yaml").read_text())
    spec = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    (verify,), daemon = spec["containers"], pod(objects["DaemonSet"])
    assert_probe(verify["command"])
    (container,) = daemon["containers"]
    assert verify["image"] == container["image"]
    assert environment_of(verify).items() <= environment_of(container).items()
    assert spec["nodeSelector"] == daemon["nodeSelector"]
    assert spec["securityContext"]["runAsUser"] == container["securityContext"]["runAsUser"]
    assert [each["name"] for each in spec["volumes"]] == ["socket"]
