"""``weft lab --virtual``: a plan on virtual chips, predicted and played."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import typer

from weft.cli import train
from weft.cli.options import spread
from weft.cli.output import err, out, print_json
from weft.cli.target import OVERRIDES, load
from weft.cluster.cluster import Cluster
from weft.cluster.cluster_file import read_cluster
from weft.config.errors import ConfigError, RunError
from weft.config.load import Loaded
from weft.elastic.signals import interrupted_once
from weft.lab.faults import Fault
from weft.plan.plan import Plan
from weft.platform.detect import detect
from weft.resolve.resolve import Resolved, read_plan, resolve
from weft.virtual.predicted import Prediction, VirtualCluster

MOST_RANKS = 64
"""Processes of some 150 MiB each."""
NEED_RANKS = "comm_report", "profile", "nproc_per_node", "launcher", "explain_config"
"""Options of ``weft train`` that have nothing to work on here."""


def virtual_chips(
    file: Path, words: Sequence[str], faults: Sequence[Fault], gflops: float
) -> VirtualCluster:
    """The plan that ``weft train`` would run, on the cluster of a file.

    Raises:
        ConfigError: it is another command, or something that virtual chips cannot do.
    """
    if faults:
        texts = [fault.text for fault in faults]
        hint = "Virtual chips do not fail."
        raise ConfigError("--fault", texts, "nothing beside --virtual", hint)
    if list(words[:2]) != ["weft", "train"]:
        hint = "Virtual chips run a plan of Weft's, not a program."
        raise ConfigError("COMMAND", list(words), "weft train ... with --virtual", hint)
    cluster = read_cluster(file)
    loaded = config_of(words[2:])
    plan, why = _plan(loaded, file, cluster.world_size)
    (node,) = detect().nodes
    resolved = resolve(
        loaded,
        Cluster(nodes=(replace(node, unusable=()),)),  # what is played needs none
        world_size=cluster.world_size,
        ranks_here=max(len(host.chips) for host in cluster.hosts),
        plan=plan,
        why=why,
        makes=lambda found: _with_orders(found, file, cluster.world_size),
    )
    if any(pipeline.heads for pipeline in resolved.plan.pipelines):
        hint = "Virtual chips play whole heads; `weft lab` without --virtual runs parts of one."
        raise ConfigError("plan.head", "parts of the head", "null with --virtual", hint)
    for note in why:
        err.print(f"[lab] {note}")
    seq_len = resolved.config.data.seq_len
    return VirtualCluster(resolved.plan, resolved.spec, seq_len, cluster, gflops)


def config_of(words: Sequence[str]) -> Loaded:
    """The configuration that ``weft train WORDS`` would run."""
    app = typer.Typer()
    app.command(context_settings=OVERRIDES)(spread(train.train, train.TrainOptions))
    with typer.main.get_command(app).make_context("weft train", list(words)) as context:
        given = context.params
        for name in filter(given.get, NEED_RANKS):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(option, given[name], "none where no ranks are started")
        return load(given["target"], [*(given["overrides"] or ()), *context.args])


def _with_orders(resolved: Resolved, file: Path, num_ranks: int) -> Resolved:
    """With orders for the chips of the file."""
    from weft.resolve.orders import ordered
    from weft.resolve.rank_chips import chips_of_file

    return ordered(resolved, chips_of_file(file, resolved.cluster.nodes[0], num_ranks))


def _plan(loaded: Loaded, file: Path, num_ranks: int) -> tuple[Plan | None, Sequence[str]]:
    """What ``plan.file`` or the planner says, and why; None: the configuration says it."""
    auto = loaded.config.plan.auto
    if auto is None:
        return read_plan(loaded), ()
    if auto.cluster is not None:
        hint = "The planner plans for the lab's own chips."
        error = ConfigError("plan.auto.cluster", auto.cluster, "null in a lab", hint)
        raise loaded.place(error)
    from weft.cli.plan.waiting import telling
    from weft.resolve.planned import choose, resources_of_file

    try:
        resources = resources_of_file(loaded.config, file, detect(), num_ranks)
        chosen = choose(loaded.config, resources, watch=telling())
    except ConfigError as error:
        raise loaded.place(error) from error
    return chosen.plan, chosen.notes


def run_virtual(virtual: VirtualCluster, *, plays: bool, json: bool) -> None:
    """Predict a step; where it is to be played, play some and say what they took."""
    ranks = virtual.plan.world_size
    if plays and ranks > MOST_RANKS:
        expected = f"at most {MOST_RANKS} chips with --virtual, a process each"
        raise ConfigError("CLUSTER", ranks, expected, "--predict starts none.")
    prediction = virtual.predict()
    if not json:
        _tell(virtual, prediction)
    if not plays:
        if json:
            print_json(prediction.as_json())
        return
    from weft.elastic.failure import RanksFailedError
    from weft.virtual.play import play

    if not json:
        err.print("[lab] playing it: a process a chip, which sleeps instead of computing")
    try:
        with interrupted_once():
            played = play(virtual, prediction)
    except RanksFailedError as error:
        raise RunError(str(error)) from error
    if json:
        print_json({**prediction.as_json(), "predicted": False, "played": asdict(played)})
        return
    low, high = prediction.least_s, prediction.most_s
    out.print(
        f"played {played.step_s:.3g} s a step (spread {played.spread:.1%}); "
        f"{played.step_s / low:.3f} of the least and {played.step_s / high:.3f} of the most "
        "that was predicted"
    )
    for rank, (computed, predicted) in enumerate(zip(played.busy, prediction.busy, strict=True)):
        out.print(f"rank {rank}: computed {computed:.0%} of the step, predicted {predicted:.0%}")
    out.print(f"efficiency {played.efficiency:.3f} of what the chips' speeds add up to")
    out.print(
        f"nothing was trained: processes slept, {played.slower:.3g} times as long as modelled, "
        "and sent each other as many messages as training does"
    )


def _tell(virtual: VirtualCluster, prediction: Prediction) -> None:
    out.print(f"predicted from operations and links, {virtual.gflops:g} GFLOP/s at speed 1")
    for number, timeline in enumerate(prediction.pipelines):
        idle = f"{timeline.bubble:.0%} of it idle" if timeline.num_positions > 1 else "no bubble"
        out.print(f"pipeline {number}: {timeline.step_s:.3g} s a step, {idle}")
    for rank, (host, chip) in enumerate(virtual.cluster.by_rank):
        name = f"rank {rank} ({virtual.cluster.hosts[host].name}, {chip.kind} {chip.speed:g})"
        out.print(f"{name}: computes {prediction.busy[rank]:.0%} of the step")
    gradients = f"gradients: {prediction.exchange_s:.3g} s a step on the slowest link"
    out.print(f"{gradients}, if nothing hides it")
    out.print(f"update: {prediction.update_s:.3g} s a step on the slowest rank")
    worst, best = prediction.efficiency
    least, most = prediction.least_s, prediction.most_s
    sum_ = "of what the chips' speeds add up to"
    out.print(f"step: {least:.3g} to {most:.3g} s; {worst:.0%} to {best:.0%} {sum_}")
