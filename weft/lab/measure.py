"""Measure plans in the lab: real processes on shaped links and limited cores."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from weft.cluster.cluster_file import ClusterFile
from weft.config.errors import ConfigError, RunError
from weft.lab.mix import Kind, MixReport, Rates, Trial, Work, mix_trials, part_trials
from weft.lab.rehearsal import Rehearsal, rehearse
from weft.report.metrics import read_metrics
from weft.train.run_folder import write_text

REFUSED = 2
"""Exit code of a job whose configuration cannot work."""
WARM_UP = 2
"""First steps of a run, which are not counted."""
TUNING_STEPS = 5
"""Counted steps of a trial that is only compared with others."""
QUICKLY = ("train.eval_samples=1", "metrics.report=false", "metrics.tensorboard=false")

Say = Callable[[str], None]


def kinds_of(cluster: ClusterFile) -> list[Kind]:
    """The kinds of chips, each with its ranks, in the order of the file.

    Raises:
        ConfigError: there is one kind: nothing is mixed.
    """
    found: dict[str, list[int]] = {}
    for rank, (_, chip) in enumerate(cluster.seats):
        found.setdefault(chip.kind, []).append(rank)
    if len(found) < 2:
        raise ConfigError("hosts.chips.kind", sorted(found), "at least two kinds of chips")
    return [Kind(name, tuple(ranks)) for name, ranks in found.items()]


def only(cluster: ClusterFile, kind: Kind) -> ClusterFile:
    """The part of a cluster that has one kind of chip, with its links."""
    hosts = []
    for host in cluster.hosts:
        chips = tuple(chip for chip in host.chips if chip.kind == kind.name)
        if chips:
            hosts.append(host.model_copy(update={"chips": chips}))
    return cluster.model_copy(update={"hosts": tuple(hosts)})


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What is measured, and where its run folders go."""

    cluster: ClusterFile
    work: Work
    target: Sequence[str]
    """Recipe and overrides of ``weft train``."""
    out: Path
    steps: int
    """Counted steps of a repeat."""
    repeats: int
    say: Say

    def run(self) -> MixReport:
        """Tune each part, then the mix, then repeat the best of all in turn."""
        kinds = kinds_of(self.cluster)
        alone: dict[str, Rates] = {}
        for kind in kinds:
            cluster = only(self.cluster, kind)
            alone[kind.name] = _best(self._tune(kind.name, cluster, part_trials(kind, self.work)))
        mixes = self._tune("mix", self.cluster, mix_trials(kinds, alone, self.work))
        report = MixReport(alone, mixes)
        final = [(kind.name, only(self.cluster, kind), alone[kind.name]) for kind in kinds]
        pooled = [] if report.pooled is report.best else [("mix", self.cluster, report.pooled)]
        final += [("mix", self.cluster, report.best), *pooled]
        for _, _, rates in final:
            rates.values.clear()
        for repeat in range(self.repeats):
            for name, cluster, rates in final:
                where = f"repeat {repeat + 1} of {self.repeats}"
                self._measure(f"{name}, {where}", cluster, rates, self.steps)
        return report

    def _tune(self, name: str, cluster: ClusterFile, trials: Sequence[Trial]) -> list[Rates]:
        found: dict[str, Rates] = {}
        for trial in trials:
            if not trial.instead_of or found[trial.instead_of].problem:
                found[trial.name] = Rates(trial)
                self._measure(name, cluster, found[trial.name], TUNING_STEPS)
        return list(found.values())

    def _measure(self, name: str, cluster: ClusterFile, rates: Rates, steps: int) -> None:
        """One run of a trial."""
        number = len(list(self.out.iterdir())) if self.out.is_dir() else 0
        folder = self.out / f"run{number:03}"
        plan_file = folder / "asked-plan.json"
        folder.mkdir(parents=True)
        write_text(plan_file, rates.trial.plan.to_json())
        samples = f"batch.samples={self.work.samples}"
        settings = [*self.target, *QUICKLY, samples, f"plan.file={plan_file}", "compute.threads=1"]
        command = [sys.executable, "-m", "weft", "train", *settings]
        command += ["--out", str(folder), "--steps", str(WARM_UP + steps), "--quiet"]
        asked = Rehearsal(cluster=cluster, command=tuple(command), out=folder, quiet=True)
        outcome = rehearse(asked, _silent)
        if outcome.was_stopped:
            raise KeyboardInterrupt
        if outcome.exit_code == REFUSED:
            raise RunError(f"the trial {rates.trial.name!r} was refused: see above")
        if outcome.exit_code:
            first = next(rank for rank in outcome.ranks if rank.code != 0)
            rates.problem = f"rank {first.rank} {first.in_words()}"
            self.say(f"{name}: {rates.trial.name}: failed, {rates.problem}")
            return
        records, _ = read_metrics(folder / "metrics.jsonl")
        seconds = median(record.step_time_s for record in records[WARM_UP:])
        rates.values.append(records[-1].tokens / seconds)
        self.say(f"{name}: {rates.trial.name}: {rates.values[-1]:.0f} tokens/s")


def _best(trials: Sequence[Rates]) -> Rates:
    best = max(trials, key=lambda rates: rates.middle)
    if not best.values:
        hint = f"The last one: {trials[-1].problem}."
        expected = "a kind of chip on which some plan runs"
        raise ConfigError("CLUSTER", trials[-1].trial.name, expected, hint)
    return best


def in_rows(report: MixReport) -> list[dict[str, str]]:
    """What was measured, for a table."""
    rows = [
        {"of": name, "plan": rates.trial.name, **_numbers(rates)}
        for name, rates in report.parts.items()
    ]
    ordered = sorted(report.mixes, key=lambda rates: -rates.middle)
    return rows + [{"of": "mix", "plan": r.trial.name, **_numbers(r)} for r in ordered]


def _numbers(rates: Rates) -> dict[str, str]:
    if not rates.values:
        return {"tokens/s": "-", "spread": "", "note": rates.problem}
    several = len(rates.values) > 1
    return {
        "tokens/s": f"{rates.middle:.0f}",
        "spread": f"{rates.spread:.1%}" if several else "",
        "note": f"{len(rates.values)} repeats" if several else "",
    }


def _silent(_: str) -> None:
    """A bench says itself what it does."""
