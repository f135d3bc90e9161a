"""A manifest that starts a plan on Kubernetes: a JobSet, one replicated job for each kind of node.

Fields as https://jobset.sigs.k8s.io describes version v1alpha2.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from shlex import join
from typing import Any

import yaml

from weft.cli.plan.launch_machine import PORT, Machine, alike

GRACE_S = 120
"""What a pod that shall go has to finish its step and save."""
RESTARTS = 10
"""How often all pods are started again, which go on where they saved, after one has failed."""
_HEADING = """\
# Start it with `kubectl apply -f`, where the JobSet controller is installed. Say here first:
# the image, which has Weft; the claim of a volume that all pods see, which has the plan and takes
# the run folder; and for each job what its nodes are called and what their devices are, such as
#   nodeSelector: {NAME: VALUE}
#   resources: {limits: {VENDOR/DEVICE: NUMBER}}
"""


def jobset(name: str, train: Sequence[str], machines: Sequence[Machine]) -> str:
    """The manifest's text.

    Args:
        name: Of the plan.
        train: ``weft train ...`` with the plan's file.
    """
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-")
    if not label[:1].isalpha():  # names of hosts are made of it
        label = f"plan-{label}"[:40].strip("-")
    jobs, node = list[dict[str, Any]](), 0
    for number, group in enumerate(alike(machines)):
        script = f"exec {_command(label, train, group[0].num_ranks, len(machines), node)}"
        jobs.append(_job(f"nodes-{number}", len(group), script))
        node += len(group)
    manifest = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": label},
        "spec": {"failurePolicy": {"maxRestarts": RESTARTS}, "replicatedJobs": jobs},
    }
    kinds = (
        f"# nodes-{number}: {group[0].chips}, pools[{group[0].pool}] of the cluster\n"
        for number, group in enumerate(alike(machines))
    )
    return _HEADING + "".join(kinds) + yaml.safe_dump(manifest, sort_keys=False, width=1000)


def _command(label: str, train: Sequence[str], ranks: int, num_nodes: int, first: int) -> str:
    """Of one pod: a node. Pods of a JobSet find each other by name."""
    if num_nodes == 1:
        return join(train)
    return (
        f"torchrun --nnodes {num_nodes} --node-rank $(({first} + JOB_COMPLETION_INDEX)) "
        f"--nproc-per-node {ranks} --master-addr {label}-nodes-0-0-0.{label} "
        f"--master-port {PORT} -m {join(train)}"
    )


def _job(name: str, num_nodes: int, script: str) -> dict[str, Any]:
    container = {
        "name": "weft",
        "image": "IMAGE",
        "command": ["bash", "-c", script],
        "workingDir": "/shared",
        "volumeMounts": [
            {"name": "shared", "mountPath": "/shared"},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_S,
        "containers": [container],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": "CLAIM"}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    job = {
        "parallelism": num_nodes,
        "completions": num_nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"spec": pod},
    }
    return {"name": name, "replicas": 1, "template": {"spec": job}}
