"""What lets operators of other hosts in: the drop-in of the systemd unit, and the component for Kubernetes."""

import re
import shutil
import sys
from pathlib import Path, PurePosixPath

import pytest

from kvtier import Client
from kvtier.access.tls_files import TlsFiles
from kvtier.config.model import OFF
from kvtier.config.units import parse_address
from kvtier.errors import UnauthenticatedError
from tests.fakes.certificates import Authority
from tests.fakes.daemon_process import daemon_command, daemon_process
from tests.fakes.scripted_engine import config_in
from tests.unit.deployment import sandbox
from tests.unit.deployment.manifests import KUBERNETES, WITHOUT_KUBECTL, Rendered, composed, containers_of, has_kubectl
from tests.unit.deployment.mounted_files import MountedFiles
from tests.unit.deployment.shipped import CONFIGS, config_of
from tests.unit.deployment.units import Unit, read_unit

SERVICE = CONFIGS / "systemd" / "kvtier-daemon.service"
DROP_IN = SERVICE.with_suffix(".service.d") / "listen.conf"
needs_kubectl = pytest.mark.skipif(not has_kubectl(), reason=WITHOUT_KUBECTL)


# systemd


def environment_of(unit: Unit) -> dict[str, str]:
    return {name: value.replace("%d", "/run/credentials/unit") for name, value in unit.environment.items()}


def test_the_drop_in_listens_with_the_credentials_that_it_loads() -> None:
    unit, drop_in = read_unit(SERVICE), read_unit(DROP_IN)
    assert config_of(unit.environment).server.listen == OFF
    config = config_of(unit.environment | environment_of(drop_in))
    loaded = dict(value.split(":") for value in drop_in.values("Service", "LoadCredential"))
    access = config.access
    assert access.tls_cert_file is not None
    assert access.tls_key_file is not None
    assert {access.tls_cert_file.name, access.tls_key_file.name} == loaded.keys()
    assert all(path in DROP_IN.read_text().partition("[Service]")[0] for path in loaded.values())
    assert access.auth == "token"
    assert access.audit_file is not None
    assert access.audit_file.parent == Path("/var/log") / drop_in.value("Service", "LogsDirectory")
    assert drop_in.value("Service", "PrivateNetwork") == "no"
    assert drop_in.value("Service", "IPAddressDeny") == "any"


@pytest.mark.skipif(
    sandbox.library() is None or shutil.which("systemd-analyze") is None,
    reason="libseccomp or systemd-analyze is not installed",
)
def test_the_daemon_serves_under_the_rules_of_unit_and_drop_in(tmp_path: Path) -> None:
    unit, address = tmp_path / "unit", tmp_path / "log"
    unit.write_text(f"{SERVICE.read_text()}\n{DROP_IN.read_text()}")
    authority = Authority(tmp_path)
    cert, key = authority.issue("daemon")
    config = config_in(tmp_path)
    settings = {
        "KVTIER_SERVER_LISTEN": "127.0.0.1:0",
        "KVTIER_ACCESS_TLS_CERT_FILE": str(cert),
        "KVTIER_ACCESS_TLS_KEY_FILE": str(key),
        "KVTIER_HTTP_LISTEN": OFF,
    }
    command = [sys.executable, "-m", "tests.unit.deployment.sandbox", str(unit), *daemon_command(config)]
    with daemon_process(["env", *(f"{name}={value}" for name, value in settings.items()), *command], address):
        (server,) = re.findall(r"tcp_served address=(\S+)", address.read_text())
        with Client(config.server.socket) as local:
            token = local.create_grant("alice", role="admin").token
        with Client(server=server, token=token, ca_file=authority.ca_file) as client:
            assert client.list() == []
        with Client(server=server, ca_file=authority.ca_file) as client, pytest.raises(UnauthenticatedError):
            client.list()


# Kubernetes


@pytest.fixture(scope="module")
def operators(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    return composed(tmp_path_factory.mktemp("operators"), "operators")


@needs_kubectl
@pytest.mark.usefixtures("large_machine")
def test_the_service_leads_to_the_port_of_its_nodes_daemon(operators: Rendered) -> None:
    pod = operators.pod("kvtier")
    daemon = containers_of(pod)["daemon"]
    environment = {each["name"]: each["value"] for each in daemon["env"]}
    environment["KVTIER_CONFIG"] = str(KUBERNETES / "base" / "kvtier.toml")
    config = config_of(environment, Path(environment["KVTIER_CONFIG"]))
    (grpc,) = daemon["ports"]
    assert parse_address(config.server.listen) == ("0.0.0.0", grpc["containerPort"])
    assert config.access.auth == "token"
    service = operators.one("Service", "kvtier")["spec"]
    (port,) = service["ports"]
    assert port["targetPort"] == grpc["name"]
    assert service["externalTrafficPolicy"] == service["internalTrafficPolicy"] == "Local"
    labels = operators.pods()["kvtier"]["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()
    policy = operators.one("NetworkPolicy", "kvtier-operators")["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    (rule,) = policy["ingress"]
    assert rule["ports"] == [{"port": grpc["name"]}]
    assert rule["from"], "an empty list would admit everyone"


@needs_kubectl
def test_certificate_and_key_are_files_of_the_secret(operators: Rendered, tmp_path: Path) -> None:
    """The kubelet replaces a link when the Secret changes, and the daemon reads what that leads to then."""
    pod = operators.pod("kvtier")
    daemon = containers_of(pod)["daemon"]
    paths = {PurePosixPath(each["value"]) for each in daemon["env"] if each["name"].startswith("KVTIER_ACCESS_TLS_")}
    (folder,) = {path.parent for path in paths}
    (mount,) = (each for each in daemon["volumeMounts"] if each["mountPath"] == str(folder))
    assert mount["readOnly"]
    assert "subPath" not in mount, "the kubelet does not renew those"
    (volume,) = (each for each in pod["volumes"] if each["name"] == mount["name"])
    assert volume["secret"] == {"secretName": "kvtier-tls"}
    assert {path.name for path in paths} == {"tls.crt", "tls.key"}, "as a Secret of type kubernetes.io/tls has them"

    def secret(name: str) -> dict[str, str]:
        cert, key = Authority(tmp_path, f"authority of {name}").issue(name)
        return {"tls.crt": cert.read_text(), "tls.key": key.read_text(), "ca.crt": ""}

    mounted, new = MountedFiles(tmp_path / "mounted", secret("first")), secret("second")
    files = TlsFiles(mounted.path / "tls.crt", mounted.path / "tls.key")
    assert files.renewed() is None
    mounted.write(new)
    renewed = files.renewed()
    assert renewed is not None
    assert renewed.certificate == new["tls.crt"].encode()


@needs_kubectl
def test_prometheus_scrapes_over_tls_where_the_daemon_has_it(tmp_path: Path) -> None:
    """A daemon with a certificate serves HTTPS beyond loopback; the first endpoint is its."""
    for name, components in (("without", ["monitoring"]), ("with", ["monitoring", "operators"])):
        (tmp_path / name).mkdir()
        objects = composed(tmp_path / name, *components)
        daemon, vllm = objects.one("PodMonitor", "kvtier")["spec"]["podMetricsEndpoints"]
        assert (daemon["port"], vllm) == ("metrics", {"port": "http", "path": "/metrics"})
        tls = {"ca": {"secret": {"name": "kvtier-tls", "key": "ca.crt"}}, "serverName": "kvtier"}
        assert (daemon.get("scheme"), daemon.get("tlsConfig")) == (("https", tls) if name == "with" else (None, None))
