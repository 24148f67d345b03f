"""Dockerfiles and compose.yaml: they parse, and what they name exists and agrees. Nothing is built."""

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from tests.unit.deployment.shipped import (
    CONFIGS,
    ROOT,
    Mounts,
    assert_probe,
    assert_shared,
    assert_transfer_config,
    config_of,
    memory_bytes,
)

pytestmark = pytest.mark.usefixtures("large_machine")

DOCKERFILES = ("Dockerfile", "vllm.Dockerfile")


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


def test_the_image_has_the_compiled_codecs_and_encryption() -> None:
    """With `disk.key_file` the daemon did not start, and nothing can be installed into a container that runs."""
    installs = [rest for word, rest in instructions("Dockerfile") if word == "RUN" and "pip install" in rest]
    assert installs
    assert all("'.[fast,encryption]'" in rest for rest in installs)
    assert {"fast", "encryption"} <= project()["optional-dependencies"].keys()


def test_compose_metrics_can_be_scraped_and_vllm_found(compose: dict[str, Any]) -> None:
    daemon, vllm = compose["services"]["kvtier"], compose["services"]["vllm"]
    host, _, port = config_of(daemon["environment"]).http.listen.rpartition(":")
    assert host == "0.0.0.0", "a container's loopback is reached by itself alone"
    assert daemon["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert daemon["environment"]["KVTIER_VLLM_URL"] == "http://vllm:8000"
    assert config_of(daemon["environment"]).http.vllm_url == "http://vllm:8000", "what is pinned over HTTP"
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
