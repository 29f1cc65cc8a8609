"""Deploys Manta on a running cluster as `serve deploy` does, and leaves it there: the cluster keeps it, not a terminal.

Engines and edges are restricted to the nodes with the label role=engine; an edge takes half a CPU, so that on nodes of
one CPU it never lies beside an engine.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from manta.deploy.ray_local import join, quiet


def deploy(address: str, port: int, num_edges: int, arguments: dict[str, Any]) -> None:
    """`arguments` are those of a Serve config file."""
    join(address)
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    quiet()
    http = {"host": "127.0.0.1", "port": port}
    serve.start(proxy_location="HeadOnly", http_options=http)
    edge = {"num_cpus": 0.5, "label_selector": {"role": "engine"}}
    application = {
        "name": "manta",
        "route_prefix": "/",
        "import_path": "manta.deploy.app:build",
        "args": {"node_labels": {"role": "engine"}, **arguments},
        "deployments": [{"name": "edge", "num_replicas": num_edges, "ray_actor_options": edge}],
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},
    }
    client = _get_global_client()
    assert client is not None
    config = {"proxy_location": "HeadOnly", "http_options": http, "applications": [application]}
    client.deploy_apps(ServeDeploySchema.model_validate(config))


if __name__ == "__main__":
    deploy(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
