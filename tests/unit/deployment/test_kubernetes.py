"""configs/kubernetes: it renders, Kubernetes' schemas accept it, and what it names exists and agrees."""

import copy
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from kvtier.config import DaemonConfig
from kvtier.library.declared.files import read_declared
from kvtier_connector.settings import AUTO, parse_settings
from tests.unit.deployment.manifests import (
    KUBERNETES,
    WITHOUT_KUBECTL,
    Rendered,
    composed,
    containers_of,
    has_kubectl,
    rendered,
    violations,
)
from tests.unit.deployment.shipped import (
    ROOT,
    Mounts,
    assert_probe,
    assert_shared,
    assert_transfer_config,
    config_of,
    memory_bytes,
)

pytestmark = [
    pytest.mark.skipif(not has_kubectl(), reason=WITHOUT_KUBECTL),
    pytest.mark.usefixtures("large_machine"),
]

COMPONENTS = sorted(folder.name for folder in (KUBERNETES / "components").iterdir())
OLDEST, NEWEST = (1, 26), (1, 37)
"""`internalTrafficPolicy` is stable since 1.26; the package of schemas ends with 1.37."""
VERSIONS = [f"{OLDEST[0]}.{minor}" for minor in range(OLDEST[1], NEWEST[1] + 1)]
SHARED_FOLDERS = {"socket": "/run/kvtier", "arena": "/dev/shm/kvtier", "state": "/var/lib/kvtier"}
UID, OTHER_UID = 1000, 1001


@pytest.fixture(scope="module")
def base() -> Rendered:
    return rendered(KUBERNETES / "base")


@pytest.fixture(scope="module")
def example() -> Rendered:
    return rendered(KUBERNETES / "example")


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    return composed(tmp_path_factory.mktemp("everything"), *COMPONENTS)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_schemas_of_kubernetes_accept_every_object(version: str, everything: Rendered, example: Rendered) -> None:
    kinds = set()
    for each in (*everything.objects, *example.objects):
        if each["kind"] != "PodMonitor":  # the operator's
            kubernetes_validate.validate(each, version, strict=True)
            kinds.add(each["kind"])
    assert kinds >= {"DaemonSet", "Deployment", "CronJob", "Service", "ConfigMap", "NetworkPolicy", "Namespace"}


@pytest.mark.parametrize("misspelt", ["readOnlyRootFileSystem", "runAsUsers"])
def test_the_schemas_refuse_a_field_that_is_misspelt(misspelt: str, base: Rendered) -> None:
    """Else the test above would show nothing: a server drops such a field, with a warning."""
    wrong = copy.deepcopy(base.one("DaemonSet", "kvtier"))
    wrong["spec"]["template"]["spec"]["containers"][0]["securityContext"][misspelt] = True
    with pytest.raises(kubernetes_validate.ValidationError, match=misspelt):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def test_a_kustomization_names_every_file_of_its_folder() -> None:
    """A file that none names reaches no cluster."""
    for path in KUBERNETES.rglob("kustomization.yaml"):
        text = path.read_text()
        files = {str(file.relative_to(path.parent)) for file in path.parent.rglob("*") if file.is_file()}
        assert {name for name in files - {"kustomization.yaml"} if name not in text} == set(), path


def test_a_rollout_has_not_failed_while_vllm_may_start_and_pins_may_be_computed(base: Rendered) -> None:
    """`kubectl rollout status`, which docs/kubernetes.md waits with, failed after the default of ten minutes."""
    containers = containers_of(base.pod("vllm"))
    startup = containers["vllm"]["startupProbe"]
    (for_pins,) = (each["value"] for each in containers["pins"]["env"] if each["name"] == "READY_TIMEOUT_S")
    slowest_s = startup["failureThreshold"] * startup["periodSeconds"] + int(for_pins)
    assert base.one("Deployment", "vllm")["spec"].get("progressDeadlineSeconds", 600) > slowest_s


# What pods may


def test_pods_break_one_rule_of_the_restricted_standard_the_hosts_folders(base: Rendered) -> None:
    assert violations(base.pod("kvtier")) == {f"{name}: hostPath" for name in SHARED_FOLDERS}
    assert violations(base.pod("vllm")) == {"socket: hostPath", "arena: hostPath"}


def test_components_add_no_right_but_that_to_make_the_folders(everything: Rendered, base: Rendered) -> None:
    made_by_root = {"folders: runAsNonRoot", "folders: runAsUser", "folders: capabilities.add"}
    assert violations(everything.pod("kvtier")) == violations(base.pod("kvtier")) | made_by_root
    assert violations(everything.pod("vllm")) == violations(base.pod("vllm"))
    assert violations(everything.pod("kvtier-verify")) == {"socket: hostPath"}
    folders = containers_of(everything.pod("kvtier"))["folders"]
    assert folders["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN", "FOWNER"]}


def test_another_uid_of_vllm_is_in_the_daemons_group_and_knows_its_uid(everything: Rendered) -> None:
    """As docs/two-users.md has it; tests/fault/test_two_users.py runs processes with these numbers."""
    daemon, vllm = everything.pod("kvtier"), everything.pod("vllm")
    (gid,) = daemon["securityContext"]["supplementalGroups"]
    assert vllm["securityContext"]["supplementalGroups"] == [gid]
    assert "fsGroup" not in daemon["securityContext"] | vllm["securityContext"]
    environment = {each["name"]: each["value"] for each in containers_of(daemon)["daemon"]["env"]}
    assert environment["KVTIER_SERVER_GROUP"] == str(gid)
    for name in ("vllm", "pins"):
        environment = {each["name"]: each["value"] for each in containers_of(vllm)[name]["env"]}
        assert environment["KVTIER_DAEMON_UID"] == str(UID)


def test_every_pod_is_closed_and_bounded(everything: Rendered) -> None:
    for name, pod in ((name, template["spec"]) for name, template in everything.pods().items()):
        assert pod["automountServiceAccountToken"] is False
        # The Service `vllm` set VLLM_PORT to an address, with which vLLM does not start.
        assert pod["enableServiceLinks"] is False
        # In a user namespace of its own a pod would not know the uid of who listens at the socket.
        assert pod.get("hostUsers", True)
        uid = OTHER_UID if name == "vllm" else UID  # the component other-uid
        assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["runAsGroup"] == uid
        for container in containers_of(pod).values():
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["resources"]["limits"]["memory"]
            assert container["resources"]["requests"]["cpu"]


def test_nothing_of_the_host_is_seen_but_the_shared_folders(everything: Rendered) -> None:
    for name, template in everything.pods().items():
        for volume in template["spec"]["volumes"]:
            if "hostPath" in volume:
                assert volume["hostPath"]["path"] == SHARED_FOLDERS[volume["name"]], name


def test_only_vllm_listens_beyond_its_pod(base: Rendered, tmp_path: Path) -> None:
    daemon = containers_of(base.pod("kvtier"))["daemon"]
    assert "ports" not in daemon
    assert daemon_config(base, tmp_path).http.listen.startswith("127.0.0.1:")


# Where pods run


def test_pods_run_where_the_nodes_are_labelled_and_where_gpus_are(everything: Rendered) -> None:
    """It asked 20 GiB of every node."""
    pods = [template["spec"] for template in everything.pods().values()]
    assert len(pods) == 3
    assert {json.dumps(pod["nodeSelector"]) for pod in pods} == {'{"kvtier": "true"}'}
    for pod in pods:
        assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]


def test_one_daemon_at_a_time_is_updated_and_has_time_to_end(base: Rendered, tmp_path: Path) -> None:
    daemons = base.one("DaemonSet", "kvtier")["spec"]
    config = daemon_config(base, tmp_path)
    assert daemons["updateStrategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}}
    assert daemons["template"]["spec"]["terminationGracePeriodSeconds"] > config.server.drain_timeout_s
    assert config.host.keep_arena


def test_workloads_select_their_pods(everything: Rendered) -> None:
    for kind, name in (("DaemonSet", "kvtier"), ("Deployment", "vllm")):
        labels = everything.pods()[name]["metadata"]["labels"]
        assert everything.one(kind, name)["spec"]["selector"]["matchLabels"].items() <= labels.items()
    for name in ("vllm", "vllm-node"):
        selected = everything.one("Service", name)["spec"]["selector"]
        assert selected.items() <= everything.pods()["vllm"]["metadata"]["labels"].items()


# What daemon and vLLM share


def environment_of(container: Mapping[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container["env"]}


def mounts_of(pod: Mapping[str, Any], container: Mapping[str, Any]) -> Mounts:
    """Return what is mounted where: a path of the host, else the volume's definition."""
    volumes = {each["name"]: each.get("hostPath", {}).get("path") or json.dumps(each) for each in pod["volumes"]}
    mounts = {PurePosixPath(m["mountPath"]): volumes[m["name"]] for m in container["volumeMounts"]}
    assert len(mounts) == len(container["volumeMounts"])
    return mounts


def daemon_config(objects: Rendered, folder: Path) -> DaemonConfig:
    """Read the ConfigMap's file from where the pod's variable says that it is."""
    daemon = containers_of(objects.pod("kvtier"))["daemon"]
    environment = environment_of(daemon)
    path = PurePosixPath(environment.pop("KVTIER_CONFIG"))
    assert [m["name"] for m in daemon["volumeMounts"] if m["mountPath"] == str(path.parent)] == ["config"]
    (folder / path.name).write_text(objects.data("kvtier-config")[path.name])
    return config_of(environment, folder / path.name)


@pytest.mark.parametrize("which", ["base", "example", "everything"])
def test_daemon_and_vllm_see_the_same_files(which: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    objects: Rendered = request.getfixturevalue(which)
    daemons, vllms = objects.pod("kvtier"), objects.pod("vllm")
    daemon, vllm = containers_of(daemons)["daemon"], containers_of(vllms)["vllm"]
    config = daemon_config(objects, tmp_path)
    assert_shared(config, mounts_of(daemons, daemon), mounts_of(vllms, vllm))
    assert environment_of(vllm)["KVTIER_SOCKET"] == str(config.server.socket)
    assert memory_bytes(daemon["resources"]["limits"]["memory"]) > config.host.host_bytes


def test_every_container_of_ours_finds_the_socket(everything: Rendered, tmp_path: Path) -> None:
    socket = daemon_config(everything, tmp_path).server.socket
    for template in everything.pods().values():
        for name, container in containers_of(template["spec"]).items():
            if name != "folders":
                assert environment_of(container)["KVTIER_SOCKET"] == str(socket), name
                mounted = mounts_of(template["spec"], container)[PurePosixPath(socket.parent)]
                assert mounted == SHARED_FOLDERS["socket"], name


def test_the_connector_takes_what_vllm_is_given(example: Rendered) -> None:
    arguments = containers_of(example.pod("vllm"))["vllm"]["args"]
    assert_transfer_config(arguments)
    given = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    settings = parse_settings(given["kv_connector_extra_config"])
    # It renders and computes what the daemon's pod has applied.
    assert settings.warm_url == AUTO
    assert settings.refresh


def test_what_a_container_names_the_pod_has(everything: Rendered) -> None:
    names = {each["metadata"]["name"] for each in everything.objects if each["kind"] == "ConfigMap"}
    for template in everything.pods().values():
        for volume in template["spec"]["volumes"]:
            if "configMap" in volume and volume["name"] != "prompts":
                assert volume["configMap"]["name"] in names
        for container in containers_of(template["spec"]).values():
            scripts = [word for word in container.get("command", ()) if word.endswith(".sh")]
            mounted = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
            for script in map(PurePosixPath, scripts):
                (volume,) = (v for v in template["spec"]["volumes"] if v["name"] == mounted[str(script.parent)])
                assert script.name in everything.one("ConfigMap", volume["configMap"]["name"])["data"]


# The folders on the nodes


def test_both_ways_make_every_folder_for_the_pods_user(everything: Rendered, tmp_path: Path) -> None:
    pod = everything.pod("kvtier")
    folders, daemon = containers_of(pod)["folders"], containers_of(pod)["daemon"]
    config = daemon_config(everything, tmp_path)
    wanted = {Path(path) for path in (config.server.socket.parent, config.host.arena_dir, config.disk.disk_dir)}
    assert {Path(word) for word in folders["command"] if word.startswith("/")} == wanted
    assert mounts_of(pod, folders) == {
        path: host for path, host in mounts_of(pod, daemon).items() if Path(path) in wanted
    }
    assert [folders["command"][folders["command"].index(flag) + 1] for flag in ("-o", "-g")] == [str(UID)] * 2
    lines = (KUBERNETES / "node" / "kvtier.conf").read_text().splitlines()
    made = [line.split() for line in lines if not line.startswith("#")]
    assert {line[1] for line in made} == set(SHARED_FOLDERS.values())
    assert all(line[0] == "d" and line[2:] == ["0700", str(UID), str(UID), "-"] for line in made)


def test_without_folders_a_pod_says_so_and_with_the_component_they_are_made(
    base: Rendered, everything: Rendered
) -> None:
    for objects, kind in ((base, "Directory"), (everything, "DirectoryOrCreate")):
        volumes = [each["hostPath"]["type"] for each in objects.pod("kvtier")["volumes"] if "hostPath" in each]
        assert volumes == [kind] * 3


# Probes


def test_probes_ask_what_the_container_answers(base: Rendered) -> None:
    daemon = containers_of(base.pod("kvtier"))["daemon"]
    vllm = containers_of(base.pod("vllm"))["vllm"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert_probe(daemon[probe]["exec"]["command"])
        # The CLI gives a daemon that is there but mute ten seconds.
        assert daemon[probe]["timeoutSeconds"] > 10
        assert vllm[probe]["httpGet"] == {"path": "/health", "port": vllm["ports"][0]["name"]}


def test_a_pod_of_vllm_is_ready_when_ready_said_so(base: Rendered) -> None:
    pins = containers_of(base.pod("vllm"))["pins"]
    made = pins["command"][-1]
    assert pins["readinessProbe"]["exec"]["command"] == ["test", "-e", made]
    (place,) = (m["name"] for m in pins["volumeMounts"] if m["mountPath"] == str(PurePosixPath(made).parent))
    assert {"name": place, "emptyDir": {}} in base.pod("vllm")["volumes"]
    assert "livenessProbe" not in pins
    script = base.data("kvtier-ready")["ready.sh"]
    (command,) = re.findall(r"^(kvtier .*?) &", script, re.MULTILINE)
    assert_probe(command.replace('"$READY_TIMEOUT_S"', "0").split())


# Prompts


@pytest.fixture
def prompts_folder(example: Rendered, tmp_path: Path) -> Path:
    """The files of the example's ConfigMap, as a pod sees them."""
    for name, text in example.data("kvtier-prompts").items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_examples_prompts_are_what_apply_takes(prompts_folder: Path) -> None:
    declared = read_declared([str(prompts_folder)])
    assert set(declared.prompts) == {"support"}
    assert declared.set_names == {"kubernetes"}
    schema = json.loads((ROOT / "docs" / "prompts.schema.json").read_text())
    jsonschema.validate(yaml.safe_load((prompts_folder / "prompts.yaml").read_text()), schema)


def test_a_change_of_prompts_restarts_nothing_and_one_of_settings_does(example: Rendered) -> None:
    names = {volume["configMap"]["name"] for volume in configmap_volumes(example.pod("kvtier"))}
    assert "kvtier-prompts" in names
    assert {re.sub(r"-[a-z0-9]{10}$", "", name) for name in names - {"kvtier-prompts"}} == {
        "kvtier-config",
        "kvtier-apply",
    }
    assert "kvtier-config" not in names, "without a hash in its name no daemon would read it again"


def configmap_volumes(pod: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    return (volume for volume in pod["volumes"] if "configMap" in volume)


def test_prompts_are_applied_where_the_script_looks(example: Rendered) -> None:
    apply = containers_of(example.pod("kvtier"))["apply"]
    folder = apply["command"][-1]
    assert {"name": "prompts", "mountPath": folder, "readOnly": True} in apply["volumeMounts"]


# vLLM, metrics, verification


def test_what_kvtier_asks_of_vllm_reaches_the_one_on_its_node(everything: Rendered, tmp_path: Path) -> None:
    """Another node's vLLM would compute into another daemon."""
    service = everything.one("Service", "vllm-node")
    (port,) = service["spec"]["ports"]
    assert service["spec"]["internalTrafficPolicy"] == "Local"
    # Else prompts would wait for a vLLM that waits for its prompts.
    assert service["spec"]["publishNotReadyAddresses"] is True
    (http,) = containers_of(everything.pod("vllm"))["vllm"]["ports"]
    assert port["targetPort"] == http["name"]
    url = f"http://{service['metadata']['name']}:{port['port']}"
    for pod, names in (("kvtier", ("daemon", "apply")), ("kvtier-verify", ("verify",))):
        containers = containers_of(everything.pod(pod))
        assert {environment_of(containers[name])["KVTIER_VLLM_URL"] for name in names} == {url}
    assert daemon_config(everything, tmp_path).http.vllm_url == url, "what is pinned over HTTP"


def test_metrics_are_for_those_who_scrape(everything: Rendered, tmp_path: Path) -> None:
    listen = daemon_config(everything, tmp_path).http.listen
    ports = {port["name"]: port for port in containers_of(everything.pod("kvtier"))["daemon"]["ports"]}
    metrics = ports["metrics"]
    (http,) = containers_of(everything.pod("vllm"))["vllm"]["ports"]
    assert listen == f"0.0.0.0:{metrics['containerPort']}"
    monitor = everything.one("PodMonitor", "kvtier")["spec"]
    assert [endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]] == [metrics["name"], http["name"]]
    assert monitor["jobLabel"] == "app", "the alert rules ask for the job kvtier"
    (selected,) = monitor["selector"]["matchExpressions"]
    labels = [everything.pods()[name]["metadata"]["labels"] for name in ("kvtier", "vllm")]
    assert selected["values"] == [label[selected["key"]] for label in labels] == ["kvtier", "vllm"]
    policy = everything.one("NetworkPolicy", "kvtier")["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= labels[0].items()
    (rule,) = policy["ingress"]
    assert rule["ports"] == [{"port": metrics["name"]}]
    assert rule["from"], "an empty list would admit everyone"


def test_verification_runs_once_on_each_node_beside_a_vllm(everything: Rendered) -> None:
    job, pod = everything.one("CronJob", "kvtier-verify"), everything.pod("kvtier-verify")
    (verify,) = pod["containers"]
    assert_probe(verify["command"])
    assert verify["image"] == containers_of(everything.pod("kvtier"))["daemon"]["image"]
    spec = job["spec"]["jobTemplate"]["spec"]
    assert spec["completions"] == spec["parallelism"]
    affinity = pod["affinity"]
    (beside,) = affinity["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (apart,) = affinity["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert beside["topologyKey"] == apart["topologyKey"] == "kubernetes.io/hostname"
    labels = {name: template["metadata"]["labels"] for name, template in everything.pods().items()}
    assert beside["labelSelector"]["matchLabels"].items() <= labels["vllm"].items()
    assert apart["labelSelector"]["matchLabels"].items() <= labels["kvtier-verify"].items()
