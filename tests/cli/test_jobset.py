"""The manifest for Kubernetes: fields as documented, and the commands that were planned."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from weft.cli.main import run
from weft.cli.plan.jobset import jobset
from weft.cli.plan.launch_machine import Machine

POD = {
    "restartPolicy!": re.compile("Never|OnFailure"),
    "terminationGracePeriodSeconds": int,
    "nodeSelector": {"*": str},
    "containers!": [
        {
            "name!": re.compile("[a-z0-9-]+"),
            "image!": str,
            "command": [str],
            "workingDir": str,
            "env": [{"name!": str, "value": str}],
            "resources": {"limits": {"*": int}},
            "volumeMounts": [{"name!": str, "mountPath!": str}],
        }
    ],
    "volumes": [
        {
            "name!": str,
            "persistentVolumeClaim": {"claimName!": str},
            "emptyDir": {"medium": re.compile("Memory|")},
        }
    ],
}
JOB = {
    "parallelism": int,
    "completions": int,
    "completionMode": re.compile("Indexed|NonIndexed"),
    "backoffLimit": int,
    "template!": {"spec!": POD},
}
JOBSET = {
    "apiVersion!": re.compile("jobset.x-k8s.io/v1alpha2"),
    "kind!": re.compile("JobSet"),
    "metadata!": {"name!": re.compile("[a-z]([a-z0-9-]{0,40}[a-z0-9])?")},
    "spec!": {
        "failurePolicy": {"maxRestarts": int},
        "replicatedJobs!": [
            {
                "name!": re.compile("[a-z]([-a-z0-9]*[a-z0-9])?"),
                "replicas": int,
                "template!": {"spec!": JOB},
            }
        ],
    },
}
"""The part of the API that is used, written from https://jobset.sigs.k8s.io/docs/reference/ and
https://kubernetes.io/docs/reference/kubernetes-api/: ``!`` is required, ``*`` any name."""

MACHINES = [
    *(Machine("2 x H100", 2 * n, 2, f"h{n}", True, 0) for n in range(3)),
    *(Machine("4 x A100", 6 + 4 * n, 4, f"a{n}", True, 1) for n in range(2)),
]
TRAIN = ["weft", "train", "demo", "data.path=my 'own' $text;.txt", "plan.file=p.json"]


def refuse(value: Any, schema: Any, place: str = "manifest") -> None:
    """Fail where the value is not what the schema says."""
    if isinstance(schema, dict):
        assert isinstance(value, dict), place
        known = {key.rstrip("!"): part for key, part in schema.items()}
        missing = {key.rstrip("!") for key in schema if key.endswith("!")} - value.keys()
        assert not missing, f"{place}: no {missing}"
        for key, part in value.items():
            assert key in known or "*" in known, f"{place}.{key} does not exist"
            refuse(part, known.get(key, known.get("*")), f"{place}.{key}")
    elif isinstance(schema, list):
        assert isinstance(value, list) and value, place
        for number, part in enumerate(value):
            refuse(part, schema[0], f"{place}[{number}]")
    elif isinstance(schema, re.Pattern):
        assert schema.fullmatch(str(value)), f"{place}: {value!r}"
    else:
        assert type(value) is schema, f"{place}: {value!r}"


def commands_of(manifest: Any) -> list[str]:
    """What the shell of each pod would run, in the order of jobs and of their pods."""
    found = []
    for job in manifest["spec"]["replicatedJobs"]:
        spec = job["template"]["spec"]
        (container,) = spec["template"]["spec"]["containers"]
        shell, option, script = container["command"]
        for index in range(spec["completions"]):
            said = subprocess.check_output(
                [shell, option, script.replace("exec ", "printf '%s\\n' ", 1)],
                env={"JOB_COMPLETION_INDEX": str(index), "PATH": "/usr/bin:/bin"},
                text=True,
            )
            found.append(said)
    return found


@pytest.mark.parametrize(
    ("name", "label"), [("7b", "plan-7b"), ("", "plan"), ("2 " * 40, "plan" + "-2" * 18)]
)
def test_a_label_that_would_be_none(name: str, label: str) -> None:
    """Names of services begin with a letter."""
    manifest = yaml.safe_load(jobset(name, TRAIN, MACHINES))
    refuse(manifest, JOBSET)
    assert manifest["metadata"]["name"] == label


def test_every_pod_is_a_node_of_the_plan() -> None:
    manifest = yaml.safe_load(jobset("My plan_2", TRAIN, MACHINES))
    refuse(manifest, JOBSET)
    assert manifest["metadata"]["name"] == "my-plan-2"
    spec = manifest["spec"]["replicatedJobs"]
    assert [job["template"]["spec"]["parallelism"] for job in spec] == [3, 2]
    for node, said in enumerate(commands_of(manifest)):
        words = said.splitlines()
        assert words[0] == "torchrun"
        options = dict(zip(words[1:11:2], words[2:12:2], strict=True))
        assert options == {
            "--nnodes": "5",
            "--node-rank": str(node),
            "--nproc-per-node": str(MACHINES[node].num_ranks),
            "--master-addr": "my-plan-2-nodes-0-0-0.my-plan-2",
            "--master-port": "29400",
        }
        assert words[12:] == TRAIN


def test_one_node_needs_no_torchrun(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "debug", "plan.shares=[1,1]", "--out", "q.json", "--launch", "--kubernetes"]
    assert run(words) == 0
    assert "wrote q.jobset.yaml" in capsys.readouterr().err
    assert not (here / "q.sbatch").exists()
    manifest = yaml.safe_load((here / "q.jobset.yaml").read_text())
    refuse(manifest, JOBSET)
    (said,) = commands_of(manifest)
    assert said.split() == shlex.split("weft train debug plan.file=q.json --out runs/q")


def test_it_starts_what_is_written(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "debug", "--out", "q.json", "--kubernetes"]) == 2
    assert capsys.readouterr().err == (
        "error: --kubernetes = true: expected --launch beside it. It starts what --out writes.\n"
    )
    assert not (here / "q.json").exists()
