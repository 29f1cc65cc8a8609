"""Manifests for KubeRay and `ray up` hold to the schemas of those who read them, and what they serve can be placed."""

from __future__ import annotations

import json
import lzma
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray.autoscaler
import typer
import yaml

from manta.cluster.placement import Placement, place
from manta.cluster.topology import Node, Topology
from manta.deploy.cli import app
from manta.deploy.serve import APP_NAME
from manta.engine.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray Serve's own fields

ROOT = Path(__file__).parent.parent.parent
KUBERAY = ROOT / "deploy" / "kuberay"
RAY_UP = sorted((ROOT / "deploy" / "ray_cluster").glob("*.yaml"))


def load(file: Path) -> dict[str, Any]:
    return yaml.safe_load(file.read_text())


def crd_schema(kind: str) -> dict[str, Any]:
    """KubeRay's schema of a kind, as strict as `kubectl apply --validate=strict`: unknown fields are errors."""
    packed = (ROOT / "tests" / "data" / "kuberay" / f"{kind.lower()}.v1.json.xz").read_bytes()
    return strict(json.loads(lzma.decompress(packed)))


def strict(schema: Any) -> Any:
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    result = {name: strict(value) for name, value in schema.items()}
    is_object = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    if is_object and not schema.get("x-kubernetes-preserve-unknown-fields") and "additionalProperties" not in schema:
        result["additionalProperties"] = False
    if isinstance(result.get("properties"), dict) and "metadata" in result["properties"]:
        result["properties"]["metadata"] = {"type": "object"}  # Kubernetes' own, not the CRD's
    return result


def cluster_spec(manifest: dict[str, Any]) -> dict[str, Any]:
    spec = manifest["spec"]
    return spec["rayClusterConfig"] if manifest["kind"] == "RayService" else spec


@pytest.fixture(params=["rayservice.yaml", "raycluster.yaml"])
def manifest(request: pytest.FixtureRequest) -> dict[str, Any]:
    return load(KUBERAY / request.param)


def test_a_manifest_holds_to_kuberay_s_schema(manifest: dict[str, Any]) -> None:
    assert manifest["apiVersion"] == "ray.io/v1"
    jsonschema.validate(manifest, crd_schema(manifest["kind"]))


def test_a_misspelt_field_would_be_seen(manifest: dict[str, Any]) -> None:
    cluster_spec(manifest)["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(jsonschema.ValidationError, match="volumeMount"):
        jsonschema.validate(manifest, crd_schema(manifest["kind"]))


def test_containers_are_not_root_and_share_memory_and_ray_asks_for_its_token(manifest: dict[str, Any]) -> None:
    spec = cluster_spec(manifest)
    assert spec["authOptions"]["mode"] == "token"
    assert "redisAddress" in spec["gcsFaultToleranceOptions"]
    groups = spec["workerGroupSpecs"]
    for pod in (spec["headGroupSpec"]["template"]["spec"], *(group["template"]["spec"] for group in groups)):
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            volumes = {volume["name"] for volume in pod.get("volumes", [])}
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes
    for group in groups:
        (container,) = group["template"]["spec"]["containers"]
        assert "/dev/shm" in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_what_the_service_serves_has_room_on_its_workers(tmp_path: Path) -> None:
    from ray.serve.schema import ServeDeploySchema

    from manta.deploy.app import config_of, gang_spec
    from manta.deploy.config import pools_of

    manifest = load(KUBERAY / "rayservice.yaml")
    serve_config = ServeDeploySchema.model_validate(yaml.safe_load(manifest["spec"]["serveConfigV2"]))
    (application,) = serve_config.applications
    assert (application.name, application.import_path) == (APP_NAME, "manta.deploy.app:build")
    key_file = tmp_path / "api-key"
    key_file.write_text("secret\n")
    config = config_of({**application.args, "api_key_file": str(key_file)})
    assert config.serving.api_keys == ("secret",)

    nodes = []
    for group in cluster_spec(manifest)["workerGroupSpecs"]:
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        gpus, cpus = float(limits["nvidia.com/gpu"]), float(limits["cpu"])
        nodes += [Node(f"{group['groupName']}{i}", "", gpus, gpus, cpus, cpus) for i in range(group["replicas"])]
    (pool,) = pools_of(config)
    spec = gang_spec(pool, pool.engine, uses_gpus=True)
    placed = place(Topology(tuple(nodes)), spec, num_replicas=config.serving.num_replicas)
    assert isinstance(placed, Placement), placed
    assert len(set(placed.nodes)) == config.serving.num_replicas


def test_a_key_file_that_is_missing_or_empty_is_refused(tmp_path: Path) -> None:
    from manta.deploy.app import config_of

    with pytest.raises(ConfigError, match="No such file"):
        config_of({"api_key_file": str(tmp_path / "missing")})
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="holds no key"):
        config_of({"api_key_file": str(tmp_path / "empty")})


def test_the_network_policy_lets_clients_reach_the_port_that_is_served() -> None:
    policy = load(KUBERAY / "networkpolicy.yaml")
    served = yaml.safe_load(load(KUBERAY / "rayservice.yaml")["spec"]["serveConfigV2"])["http_options"]["port"]
    *_, clients = policy["spec"]["ingress"]
    assert clients["ports"] == [{"protocol": "TCP", "port": served}]
    assert policy["spec"]["policyTypes"] == ["Ingress"]


@pytest.mark.parametrize("file", RAY_UP, ids=lambda file: file.stem)
def test_a_cluster_for_ray_up_holds_to_ray_s_schema(file: Path) -> None:
    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    jsonschema.validate(load(file), schema)
    with pytest.raises(jsonschema.ValidationError, match="max_wokers"):
        jsonschema.validate({**load(file), "max_wokers": 1}, schema)


@pytest.mark.parametrize("file", RAY_UP, ids=lambda file: file.stem)
def test_nodes_of_ray_up_start_with_commands_that_exist_and_share_a_token(file: Path) -> None:
    tree = load(file)
    assert "~/.ray/auth_token" in tree["file_mounts"]
    for name in ("head_start_ray_commands", "worker_start_ray_commands"):
        (line,) = (one for one in tree[name] if "manta " in one)
        *_, command = line.split("manta ", 1)
        group: Any = typer.main.get_command(app)
        start = group.commands["cluster"].commands["start"]
        assert shlex.split(command)[:2] == ["cluster", "start"]
        parsed = start.make_context("start", shlex.split(command)[2:])
        assert parsed.params["head"] is (name == "head_start_ray_commands")
        assert [word for word in parsed.args if word.startswith("--")] in ([], ["--autoscaling-config"])


def test_the_image_s_user_is_not_root() -> None:
    lines = (ROOT / "deploy" / "docker" / "Dockerfile").read_text().splitlines()
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users[-1] == "1000:1000"
