"""``weft plan --out --launch``: what is written starts on every node what was planned."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from weft.cli.lab_virtual import config_of
from weft.cli.main import run
from weft.cli.resolved import resolved_among
from weft.cluster.cluster import Cluster, catalogue
from weft.comm.address import RankAddress
from weft.config.errors import ConfigErrors
from weft.plan.plan_file import PlanFile
from weft.platform.cpu import CpuPlatform
from weft.platform.detect import detect_node
from weft.platform.registry import PLATFORMS
from weft.resolve.resolve import read_plan_file

UNLIKE = """\
pools:
  - {chip: H100-SXM5-80GB, nodes: 3, chips_per_node: 2, network_gbit: 400, hosts: ["h[08-10]"]}
  - {chip: A100-SXM4-80GB, nodes: 2, chips_per_node: 4, network_gbit: 200, hosts: [a1, a-2.lan]}
"""
HOSTS = ["h08", "h09", "h10", "a1", "a-2.lan"]
WORDS = [
    *("demo", "model.size=llama3-8b", "data.seq_len=4096", "batch.samples=64"),
    *("batch.micro=1", "compute.recompute=full", "plan.schedule=1f1b"),
    "data.path=my 'own' $text;.txt",
]

TOOL = """\
#!{python}
import os, subprocess, sys
name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
if name == "torchrun":
    node = os.environ.get("SLURMD_NODENAME", "")
    with open({log!r}, "a") as log:
        log.write(repr((node, words)) + chr(10))
elif name == "scontrol":
    print(chr(10).join(words[-1].split(",")))
else:
    parts = [[]]
    for word in words:
        parts.append([]) if word == ":" else parts[-1].append(word)
    for part in parts:
        group = [word.partition("=")[2] for word in part if word.startswith("--het-group")]
        variable = "SLURM_JOB_NODELIST" + "".join(f"_HET_GROUP_{{number}}" for number in group)
        for node in reversed(os.environ[variable].split(",")):
            subprocess.run(part[part.index("bash"):], check=True,
                           env=os.environ | {{"SLURMD_NODENAME": node}})
"""
"""Stands for torchrun, which notes what it was given, and for scontrol and srun."""

pytestmark = pytest.mark.usefixtures("hurried")


def plan(folder: Path, cluster: str, *more: str) -> int:
    (folder / "c.yaml").write_text(cluster)
    return run(["plan", *WORDS, "--cluster", "c.yaml", "--out", "my plan.json", *more])


def noted(folder: Path, script: str, **variables: str) -> list[tuple[str, list[str]]]:
    """What torchrun was given on which node, when a shell ran the script."""
    tools, log = folder / "tools", folder / "log"
    tools.mkdir(exist_ok=True)
    for name in ("torchrun", "scontrol", "srun"):
        (tools / name).write_text(TOOL.format(python=sys.executable, log=str(log)))
        (tools / name).chmod(0o755)
    log.write_text("")
    environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", **variables}
    subprocess.run(["bash", "-c", script], check=True, env=environment, cwd=folder)
    return [eval(line) for line in log.read_text().splitlines()]


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_every_node_gets_its_ranks(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(here, UNLIKE, "--launch", "--json") == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    file = PlanFile.read((here / "my plan.json").read_text())
    assert file.to_data() == data["plan"]
    hosts = [host for used in file.chips for host in used.hosts]
    sizes = [used.chips_per_node for used in file.chips for _ in used.hosts]
    assert hosts == HOSTS and sum(sizes) == file.plan.world_size == 14
    assert data["launch"]["nodes"][3] == "node 3: a1 (4 x A100-SXM4-80GB), ranks 6-9"

    # The commands, each in a shell of its own.
    given = [noted(here, command)[0][1] for command in data["launch"]["commands"]]
    assert [option(words, "--node-rank") for words in given] == ["0", "1", "2", "3", "4"]
    assert [int(option(words, "--nproc-per-node")) for words in given] == sizes
    assert {option(words, "--master-addr") for words in given} == {"h08"}

    # What they run is what was planned, of the same model on the same data.
    words = given[0][given[0].index("weft") + 2 :]
    loaded = config_of(words)
    assert read_plan_file(loaded) == file
    assert loaded.config.data.path == "my 'own' $text;.txt"
    assert loaded.config.data.vocab_size == 128_256

    # The same through Slurm, where nodes come in any order.
    script = (here / "my plan.sbatch").read_text()
    assert script == data["launch"]["sbatch"]
    lines = script.splitlines()
    assert lines[0] == "#!/bin/bash" and lines[1] == "#SBATCH --job-name=my-plan"
    assert lines.count("#SBATCH hetjob") == 1
    assert [line for line in lines if "--nodes=" in line] == [
        "#SBATCH --nodes=3",
        "#SBATCH --nodes=2",
    ]
    groups = {
        "SLURM_JOB_NODELIST_HET_GROUP_0": "h08,h09,h10",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "a1,a-2.lan",
    }
    ran = noted(here, script, SLURM_JOB_ID="131999", **groups)
    assert {option(w, "--master-port") for _, w in ran} == {"31999"}, "none that is given to others"
    seen = {node: (option(w, "--node-rank"), option(w, "--nproc-per-node")) for node, w in ran}
    expected = [(str(n), str(size)) for n, size in enumerate(sizes)]
    assert seen == dict(zip(HOSTS, expected, strict=True))
    assert {tuple(w[w.index("weft") :]) for _, w in ran} == {
        tuple(given[0][given[0].index("weft") :])
    }


def test_one_node_and_a_lab_start_themselves(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "debug", "plan.schedule=1f1b", "--cluster", "lab.yaml", "--out", "p.json"]
    two = "hosts: [{name: a, chips: [{kind: x}, {kind: y, speed: 0.5}]}]\n"
    (here / "lab.yaml").write_text(two)
    assert run([*words, "--launch", "--json"]) == 0
    launch = json.loads(capsys.readouterr().out)["launch"]
    (command,) = launch["commands"]
    assert shlex.split(command)[:6] == ["weft", "lab", "lab.yaml", "--", "weft", "train"]
    assert launch["sbatch"] == ""
    assert run(["plan", "debug", "plan.shares=[1,1,1]", "--out", "q.json", "--launch"]) == 0
    text = capsys.readouterr().out
    assert "  weft train debug plan.file=q.json --out runs/q" in text.splitlines()
    assert "ranks 0-2\n" in text and "torchrun" not in text


@pytest.mark.parametrize("name", ["a;id", "$(id)", "-x", "a b", "a\\nb", "h[9-1]", "a'b", "`id`"])
def test_a_name_that_could_escape_is_refused(
    name: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = f'hosts: ["{name}", b]'
    assert plan(here, f"pools:\n  - {{chip: T4, nodes: 2, chips_per_node: 1, {hosts}}}\n") == 2
    assert "pools[0].hosts" in capsys.readouterr().err
    used = {"chip": "T4", "pool": 0, "nodes": 1, "chips_per_node": 1, "hosts": [name]}
    (here / "p.json").write_text(json.dumps({"num_layers": 1, "pipelines": [], "chips": [used]}))
    assert run(["plan", "debug", "plan.file=p.json"]) == 2
    if "[" not in name:
        assert "chips[0].hosts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("pool", "problem"),
    [
        ("nodes: 2, hosts: [a]", "pools[0].hosts = '1 names': expected a name for each of the 2"),
        ("nodes: 2, hosts: [a, a]", "pools[0].hosts = 'a': expected every host once"),
        ("hosts: [b]", "pools[1].hosts = 'b': expected hosts of its own; pools[0] has this one"),
    ],
)
def test_hosts_are_counted(
    pool: str, problem: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = "{chip: T4, chips_per_node: 1, hosts: [b]}"
    assert plan(here, f"pools:\n  - {{chip: T4, chips_per_node: 1, {pool}}}\n  - {other}\n") == 2
    assert problem in capsys.readouterr().err


def test_a_later_format_and_commands_without_a_file_are_refused(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "p.json").write_text('{"format": 2, "num_layers": 1, "pipelines": []}')
    assert run(["plan", "debug", "plan.file=p.json"]) == 2
    assert "format: 2 is not 1." in capsys.readouterr().err
    assert run(["plan", "debug", "--launch"]) == 2
    assert "--launch = true: expected --out beside it." in capsys.readouterr().err


def test_a_rank_on_another_machine_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that were mixed up: this host is in the plan, for other ranks or another chip."""
    assert plan(here, UNLIKE) == 0
    loaded = config_of([*WORDS[:4], "data.vocab_size=128256", "plan.file=my plan.json"])

    def join(host: str, rank: int, chip: str) -> None:
        node = detect_node()
        node = type(node)(
            host=host, cpu="x", cores=1, memory_gib=1.0, cpu_bf16=True,
            chips=(catalogue()[chip],) * 4,
        )  # fmt: skip
        monkeypatch.setattr("weft.cli.resolved.detect", lambda: Cluster(nodes=(node,)))
        address = RankAddress(rank=rank, world_size=14, local_rank=0)
        with ExitStack() as until_joined:
            resolved_among(loaded, address, until_joined)

    join("a1", 6, "A100-SXM4-80GB")
    join("h08.cluster", 2, "H100-SXM5-80GB")
    join("elsewhere", 0, "H100-SXM5-80GB")
    with pytest.raises(ConfigErrors, match=r"expected rank 0 on .*'h08'.* It runs on a1"):
        join("a1", 0, "A100-SXM4-80GB")
    with pytest.raises(ConfigErrors, match="Rank 6 was planned on A100-SXM4-80GB"):
        join("a1", 6, "H100-SXM5-80GB")


NODES = "pools:\n  - {chip: H100-SXM5-80GB, nodes: 2, chips_per_node: 8, network_gbit: 25}\n"


def test_domains_where_the_planner_may_choose_them(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over a slow network, what both nodes hold is summed inside each before it crosses."""
    few = ["--json", "plan.auto.max_stages=1", "batch.samples=256"]
    assert plan(here, NODES, *few, "plan.auto.domains=false") == 0
    assert "domains" not in json.loads(capsys.readouterr().out)["plan"]
    assert plan(here, NODES, *few) == 0
    found = json.loads(capsys.readouterr().out)["plan"]["domains"]
    assert found == [list(range(8)), list(range(8, 16))]
    assert plan(here, NODES, "plan.file=my plan.json", "batch.samples=256") == 0
    (line,) = [each for each in capsys.readouterr().out.splitlines() if "all ranks as one" in each]
    assert line.startswith("domains: ") and " s a step" in line


STRANGERS = """\
pools:
  - {chip: H100-SXM5-80GB, nodes: 1, chips_per_node: 8}
  - {chip: MI300X, nodes: 1, chips_per_node: 8}
"""
BEYOND = f"{STRANGERS}  - {{chip: Ascend-910B, nodes: 1, chips_per_node: 8}}\n"


class AscendPlatform(CpuPlatform):
    """As the vendor's package would bring it."""

    name = "npu"
    is_host = False


@pytest.fixture
def packages() -> Iterator[None]:
    """The package that brings Ascend chips is installed."""
    PLATFORMS.add(AscendPlatform())
    yield
    PLATFORMS.remove(AscendPlatform.name)


def test_vendors_of_one_device_are_started_together(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """NVIDIA's and AMD's are both "cuda": groups that have both talk through host memory."""
    assert plan(here, STRANGERS, "--launch", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["not_run"] == [] and "unrun" not in data["search"]["pruned"]
    used = {nodes["chip"] for nodes in data["plan"]["chips"]}
    assert used == {"H100-SXM5-80GB", "MI300X"}
    assert data["launch"]["nodes"] == [
        "node 0: 8 x H100-SXM5-80GB, ranks 0-7",
        "node 1: 8 x MI300X, ranks 8-15",
    ]


@pytest.mark.usefixtures("packages")
def test_chips_of_a_package_are_started_with_the_others(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(here, BEYOND, "--launch", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["not_run"] == [] and "unrun" not in data["search"]["pruned"]
    assert len({nodes["chip"] for nodes in data["plan"]["chips"]}) == 3


def test_what_cannot_be_run_is_said_and_not_started(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A family that no package brings is planned, with a word; to be started, the others."""
    expected = "Ascend-910B needs a device family 'npu'; installed are cpu and cuda."
    assert plan(here, BEYOND, "--json", "--html", "p.html") == 0
    (why,) = json.loads(capsys.readouterr().out)["not_run"]
    assert why == expected
    assert "this version cannot run it: Ascend-910B needs" in (here / "p.html").read_text()
    assert plan(here, BEYOND, "plan.file=my plan.json") == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "cannot run" in line]
    assert said == [f"  this version cannot run it: {expected}"]

    assert plan(here, BEYOND, "--launch", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["not_run"] == [] and data["search"]["pruned"]["unrun"] > 0
    used = json.loads((here / "my plan.json").read_text())["chips"]
    assert {nodes["chip"] for nodes in used} == {"H100-SXM5-80GB", "MI300X"}
    assert plan(here, BEYOND, "--launch") == 0
    said = capsys.readouterr().out
    assert "16 of 24 chips: " in said
    assert f"\n  left out, for this version cannot run it: {expected}\nplan: " in said
    alone = "pools:\n  - {chip: Ascend-910B, nodes: 1, chips_per_node: 8}\n"
    assert plan(here, alone, "--launch") == 2
    text = capsys.readouterr().err
    assert "expected chips on which this version can run a plan that fits. Left out: " in text
    assert "Ascend-910B needs a device family 'npu'; installed are " in text
