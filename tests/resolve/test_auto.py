"""``plan.auto``: what the planner may use, what it is asked, and when it is asked again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from resolve import profiles

from weft.cluster.cluster import Cluster, Node, catalogue
from weft.config.errors import ConfigError
from weft.config.load import Loaded, load_config
from weft.plan.plan import StagePlan
from weft.resolve.planned import (
    Chosen,
    Resources,
    choose,
    facts,
    resources_here,
    resources_of_facts,
    resources_of_file,
)
from weft.resolve.prediction import AUTO_FILE
from weft.resolve.resolve import resolve

GPU = catalogue()["A100-SXM4-80GB"]


@pytest.fixture(autouse=True)
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cores of ``profiles.node()``."""
    monkeypatch.setenv("WEFT_PROFILES", str(tmp_path / "profiles"))
    profiles.save(tmp_path / "profiles", profiles.node())


def asked(*overrides: str) -> Loaded:
    return load_config("debug", ["plan=auto", "data.tokenizer=bytes", *overrides])


def here(machine: Node, *overrides: str) -> Resources:
    return resources_here(asked(*overrides).config, Cluster(nodes=(machine,)))


def shape(resources: Resources) -> list[tuple[str, int, int]]:
    return [(p.chip.name, p.num_nodes, p.chips_per_node) for p in resources.chips.view.pools]


def test_a_rank_a_core_where_there_is_no_gpu() -> None:
    four = profiles.node(cores=4)
    resources = here(four)
    assert shape(resources) == [("Abacus core", 1, 4)]
    assert resources.may_idle and resources.precision == "fp32"
    assert shape(here(four, "compute.threads=2")) == [("Abacus core", 1, 2)]
    assert shape(here(four, "compute.threads=9")) == [("Abacus core", 1, 1)]


def test_ranks_that_are_asked_for_all_work() -> None:
    resources = here(profiles.node(cores=4), "plan.auto.ranks=3")
    assert shape(resources) == [("Abacus core", 1, 3)]
    assert not resources.may_idle


def test_gpus_come_before_cores() -> None:
    machine = replace(profiles.node(), chips=(GPU,) * 4)
    resources = here(machine)
    assert shape(resources) == [(GPU.name, 1, 4)]
    assert resources.precision == "bf16"
    assert resources.chips.basis == (f"the catalogue of {GPU.name}",)
    assert shape(here(machine, "plan.auto.ranks=2")) == [(GPU.name, 1, 2)]
    assert shape(here(machine, "compute.device=cpu")) == [("Abacus core", 1, 2)]


def test_what_is_not_here_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        here(profiles.node(), "compute.device=cuda")
    message = "compute.device = 'cuda': expected a GPU for each rank (0 seen)."
    assert str(caught.value) == message
    with pytest.raises(ConfigError) as caught:
        here(profiles.node(), "plan.auto.cluster=far.yaml")
    assert str(caught.value) == (
        "plan.auto.cluster = 'far.yaml': expected null, unless another launcher starts a process "
        "on each of its chips. `weft plan` plans for any file; `weft lab FILE -- weft train ...` "
        "plays it here."
    )


def test_processors_keep_no_activations_on_their_hosts() -> None:
    """Refused by what was asked for, before a search."""
    config = asked("compute.recompute=offload").config
    with pytest.raises(ConfigError, match=r"compute.recompute = 'offload': expected off on proc"):
        choose(config, resources_here(config, Cluster(nodes=(profiles.node(),))))


def stages(chosen: Chosen) -> list[StagePlan]:
    return [stage for _, _, stage in chosen.plan.stages()]


def test_a_choice_can_be_run() -> None:
    loaded = asked()
    cluster = Cluster(nodes=(profiles.node(),))
    chosen = choose(loaded.config, resources_here(loaded.config, cluster))
    found = resolve(loaded, cluster, plan=chosen.plan, why=chosen.notes)
    assert found.plan.global_batch == 24
    assert {(stage.device, stage.precision) for stage in stages(chosen)} == {("cpu", "fp32")}
    assert found.notes[-1] == "plan.auto takes rates from a profile of Abacus core (2026-11-21)"
    assert Chosen.from_json(chosen.to_json()) == chosen


@pytest.mark.parametrize("recompute", ["off", "full"])
def test_what_is_said_is_kept_to(recompute: str) -> None:
    config = asked(
        "plan.auto.ranks=1",
        "batch.micro=3",
        "compute.compile=true",
        "compute.precision=fp64",
        f"compute.recompute={recompute}",
    ).config
    chosen = choose(config, resources_here(config, Cluster(nodes=(profiles.node(),))))
    (stage,) = stages(chosen)
    assert chosen.plan.pipelines[0].microbatch == 3
    assert (stage.recompute, stage.compile, stage.precision) == (recompute, True, "fp64")


def test_a_choice_is_kept_until_the_question_changes(tmp_path: Path) -> None:
    """Of a plan that no planner would choose, so that it can be told."""

    def again(*overrides: str, cores: int = 2) -> Chosen:
        config = asked(*overrides).config
        cluster = Cluster(nodes=(profiles.node(cores=cores),))
        return choose(config, resources_here(config, cluster), tmp_path)

    first = again()
    pipeline = replace(first.plan.pipelines[0], microbatch=24)
    odd = replace(first.plan, pipelines=(pipeline, *first.plan.pipelines[1:]))
    (tmp_path / AUTO_FILE).write_text(replace(first, plan=odd).to_json())
    kept = again()
    assert kept.plan == odd
    assert kept.notes == ("plan.auto keeps the plan of the run's last start",)
    more = again(cores=4)
    assert more.plan != odd
    assert more.notes[0] == (
        "plan.auto plans again: chips was ['2 Abacus core of 4.0 GiB'], "
        "is ['4 Abacus core of 2.0 GiB']"
    )
    assert "recompute was 'auto', is 'full'" in again("compute.recompute=full").notes[0]
    for broken in (
        "{",
        "[]",
        '{"asked": {}}',
        '{"asked": 1, "notes": [], "plan": {}}',
        '{"plan": 3}',
    ):
        (tmp_path / AUTO_FILE).write_text(broken)
        assert again().plan == first.plan


LAB = """\
hosts:
  - {name: h1, chips: [{kind: big}]}
  - {name: h2, chips: [{kind: small, speed: 0.25, memory_gib: 2}]}
"""


def test_a_file_describes_the_chips_of_processes(tmp_path: Path) -> None:
    file = tmp_path / "lab.yaml"
    file.write_text(LAB)
    cluster = Cluster(nodes=(profiles.node(),))
    resources = resources_of_file(asked().config, file, cluster, 2)
    assert shape(resources) == [("big", 1, 1), ("small", 1, 1)]
    assert not resources.may_idle and not resources.chips.is_guess
    assert resources.chips.view.pools[1].chip.memory_gib == 2
    with pytest.raises(ConfigError, match="describes 3 chips, one for each process"):
        resources_of_file(asked().config, file, cluster, 3)
    with pytest.raises(ConfigError, match="expected null or 2, the processes"):
        resources_of_file(asked("plan.auto.ranks=3").config, file, cluster, 2)


def test_one_name_at_two_speeds_is_two_kinds(tmp_path: Path) -> None:
    """Each has its own rates, and a plan tells them apart."""
    file = tmp_path / "lab.yaml"
    file.write_text(LAB.replace("big", "small"))
    config = asked("plan.auto.max_stages=1").config
    resources = resources_of_file(config, file, Cluster(nodes=(profiles.node(),)), 2)
    assert shape(resources) == [("small at 1", 1, 1), ("small at 0.25", 1, 1)]
    first, second = choose(config, resources).plan.pipelines
    assert first.samples + second.samples == 24
    by_rank = {p.stages[0].mesh.ranks: p.samples for p in (first, second)}
    assert by_rank[0,] == pytest.approx(4 * by_rank[1,], rel=0.3)


def told(machine: Node, host: str, ranks: int) -> list[dict[str, object]]:
    """As JSON brings it to rank 0."""
    one = json.loads(json.dumps(facts(Cluster(nodes=(machine,)), host)))
    return [one] * ranks


def test_ranks_tell_what_they_run_on() -> None:
    """Three machines: two alike, one with GPUs; each rank has its part of its machine."""
    alike = profiles.node(cores=4)
    cards = replace(profiles.node(cpu="Slide rule"), chips=(GPU, GPU))
    everyone = [*told(alike, "a", 2), *told(alike, "b", 2), *told(cards, "c", 2)]
    resources = resources_of_facts(asked().config, everyone)
    assert shape(resources) == [("Abacus core", 2, 2), (GPU.name, 1, 2)]
    assert resources.precision == "fp32", "cores without instructions for bf16"
    assert resources.chips.basis == (
        "a profile of Abacus core (2026-11-21)",
        f"the catalogue of {GPU.name}",
        "a guess of 10 Gbit/s between machines",
    )
    place = resources.chips.knowledge.hardware["Abacus core"]
    assert place.fabric.across_bytes_s == 1.25e9
    alone = resources_of_facts(asked().config, told(alike, "a", 2))
    assert shape(alone) == [("Abacus core", 1, 2)]


def test_two_ranks_have_two_threads_each_of_four_cores() -> None:
    """Unless fewer are asked for; a rank that has both cores of two is twice as fast."""
    machine = profiles.node(cores=4)

    def speed(*overrides: str) -> float:
        resources = resources_of_facts(asked(*overrides).config, told(machine, "a", 2))
        return resources.chips.view.pools[0].chip.peak_flops("fp32") or 0.0

    assert speed() == pytest.approx(2 * profiles.FLOPS_S)
    assert speed("compute.threads=1") == pytest.approx(profiles.FLOPS_S)
