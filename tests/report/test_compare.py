"""Two run folders compared: alignment, band, trend, evaluations, data, and what else differs."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import yaml
from report.report_cases import TWO_TO_ONE, make_run

from weft.cli.main import run
from weft.config.errors import ConfigError
from weft.plan.mesh import Mesh
from weft.precision.registry import PRECISIONS
from weft.report.compare_band import (
    SCALAR_SAFETY,
    loss_band,
    operation_error,
    tensor_band,
)
from weft.report.compare_page import difference_chart, lines, page, verdict
from weft.report.compare_runs import StepPair, compare_runs, eval_differences, sign_test, trend
from weft.report.metrics import EvalMetrics, JsonlWriter, StepMetrics
from weft.report.svg import line_chart

STEPS = 60
CLOCK = count()
"""No two records were written at the same time."""


def step(number: int, loss: float, data: int | None = 7) -> StepMetrics:
    return StepMetrics(
        step=number, loss=loss, tokens=4096, grad_norm=1.0, lr=1e-3, step_time_s=0.1,
        tokens_per_s=1.0, memory_gib=1.0, mfu=None, samples=number, elapsed_s=float(next(CLOCK)),
        data=None if data is None else data + number,
    )  # fmt: skip


def evaluation(number: int, loss: float) -> EvalMetrics:
    return EvalMetrics(step=number, eval_loss=loss, eval_tokens=10, elapsed_s=float(next(CLOCK)))


def make(
    parent: Path,
    name: str,
    loss: Callable[[int], float],
    *,
    data: int | None = 7,
    evals: dict[int, float] | None = None,
    plan_text: str | None = None,
) -> Path:
    """A run of 60 steps whose losses are a function of the step."""
    (parent / name).mkdir()
    folder = make_run(parent / name)
    writer = JsonlWriter(folder / "metrics.jsonl", None)
    for number in range(1, STEPS + 1):
        writer.write(step(number, loss(number), data))
    for number, value in (evals or {}).items():
        writer.write(evaluation(number, value))
    writer.close()
    if plan_text is not None:
        (folder / "plan.json").write_text(plan_text)
    return folder


def fall(number: int) -> float:
    return 4 + 4 * 0.98**number


def ulps(number: int) -> float:
    """The same but for a few last places of fp32."""
    return fall(number) * (1 + 2**-24 * (number % 3 - 1))


def test_rounding_is_inside_and_a_thousandth_is_not(tmp_path: Path) -> None:
    a = make(tmp_path, "a", fall)
    same = compare_runs(a, make(tmp_path, "b", ulps))
    assert same.ok and len(same.pairs) == STEPS and same.precision == "fp32"
    assert same.unlike_data == ()
    other = compare_runs(a, make(tmp_path, "c", lambda n: fall(n) + (n == 41) * 1e-3))
    outside = other.first_outside
    assert outside is not None and outside.step == 41 and not other.ok
    assert outside.difference == pytest.approx(1e-3)
    assert "step 41 differs by +1.00e-03 nats" in lines(other)[-1]


def test_a_page_that_cannot_be_written_is_seen_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = str(make(tmp_path, "a", fall))
    for words, problem in (
        (["--html", "/proc/x/y.html"], "--html = '/proc/x/y.html': expected a file in a folder"),
        (["--steps", "5"], "--steps = 5: expected --bisect beside it"),
    ):
        assert run(["compare", a, a, *words]) == 2
        said = capsys.readouterr()
        assert problem in said.err and not said.out


def test_losses_of_zero_are_equal_and_huge_ones_are_not(tmp_path: Path) -> None:
    """A batch without weight has a loss of zero; of one in the hundreds of digits no square is
    known."""
    a, b = (make(tmp_path, name, lambda n: 0.0 if n < 3 else fall(n)) for name in "ab")
    assert verdict(compare_runs(a, b)).startswith("inside the band at every step, at most 0%")
    huge = compare_runs(a, make(tmp_path, "c", lambda _: 1e308))
    assert not huge.ok and huge.first_outside is not None and huge.first_outside.step == 1


def test_steps_without_tokens_are_refused(tmp_path: Path) -> None:
    a = make(tmp_path, "a", fall)
    text = (a / "metrics.jsonl").read_text()
    (a / "metrics.jsonl").write_text(text.replace('"tokens": 4096', '"tokens": "many"'))
    with pytest.raises(ConfigError, match=r"step 1 has none"):
        compare_runs(a, a)


def test_a_loss_that_is_not_a_number_is_outside(tmp_path: Path) -> None:
    a = make(tmp_path, "a", fall)
    found = compare_runs(a, make(tmp_path, "b", lambda n: math.nan if n == 9 else fall(n)))
    assert found.first_outside is not None and found.first_outside.step == 9
    assert verdict(found) == "DIVERGED: B has no finite loss at step 9"
    drawn = line_chart(difference_chart(found))
    assert drawn.count("<polyline") == 2, "the line is broken there"
    mine = make(tmp_path, "c", lambda n: math.inf if n >= 2 else fall(n))
    assert verdict(compare_runs(mine, mine)) == "DIVERGED: A and B have no finite loss at step 2"
    assert verdict(compare_runs(mine, a)) == "DIVERGED: A has no finite loss at step 2"


def test_the_band_grows_with_rounding_depth_and_step_and_shrinks_with_tokens() -> None:
    def band(precision: str = "bf16", layers: int = 3, tokens: int = 4096, at: int = 1) -> float:
        return loss_band(
            precision, d_model=128, num_layers=layers, tokens=tokens, step=at, loss=4.0
        )  # type: ignore[arg-type]

    e = math.sqrt(2**-16 + 128 * 2**-48)
    assert operation_error("bf16", 128) == pytest.approx(e)
    assert band(at=9) == pytest.approx(4 * (e * math.sqrt(4 * (9 + 0.81)) / 64 + 8 * 2**-24))
    assert band("fp64") < band("fp32") < band("bf16")
    assert band(layers=15) == pytest.approx(2 * band(), rel=1e-2)
    assert band(tokens=4 * 4096) == pytest.approx(band() / 2, rel=1e-2)
    assert band(at=10_000) == pytest.approx(100 * band(at=100) / math.sqrt(2), rel=1e-2)
    with pytest.raises(ConfigError, match=r"compute\.precision = 'bf17': expected one of"):
        band("bf17")
    tensor = tensor_band("fp64", 128, depth=4, step=1)
    assert tensor == pytest.approx(8 * math.sqrt(129) * 2**-53 * 2)


def test_steps_that_were_copied_with_the_folder_are_not_compared(tmp_path: Path) -> None:
    """Both go on from step 20 of one run: there the band begins anew, and evaluations count."""
    a = make(tmp_path, "a", fall, evals={10: 4.0, 30: 3.0})
    b = make(tmp_path, "b", ulps, evals={10: 4.0, 30: 3.5})
    lines = [(folder / "metrics.jsonl").read_text().splitlines() for folder in (a, b)]
    evals = [lines[0][STEPS], *lines[1][STEPS + 1 :]]
    copied = [*lines[0][:20], *lines[1][20:STEPS], *evals]
    (b / "metrics.jsonl").write_text("\n".join(copied))
    whole, parted = compare_runs(a, make(tmp_path, "c", ulps)), compare_runs(a, b)
    assert [pair.step for pair in parted.pairs] == list(range(21, STEPS + 1))
    assert parted.pairs[0].band / parted.pairs[0].a == pytest.approx(
        whole.pairs[0].band / whole.pairs[0].a
    )
    assert parted.evals is not None and parted.evals.differences == (0.5,)
    same = compare_runs(a, a)
    assert len(same.pairs) == STEPS and same.ok


def test_two_seeds_are_far_outside_and_read_other_data(tmp_path: Path) -> None:
    a = make(tmp_path, "a", fall)
    b = make(tmp_path, "b", lambda n: fall(n) + 0.05 * math.sin(n), data=1000)
    found = compare_runs(a, b)
    assert not found.ok
    assert found.unlike_data is not None and len(found.unlike_data) == STEPS
    assert lines(found)[-1].startswith("OTHER DATA: 60 steps")


def test_data_that_was_not_recorded_is_said(tmp_path: Path) -> None:
    found = compare_runs(make(tmp_path, "a", fall, data=None), make(tmp_path, "b", fall))
    assert found.ok and found.unlike_data is None
    assert "data: not recorded by both runs" in lines(found)


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_growth_is_the_exponent_of_the_step(power: float) -> None:
    steps = range(1, 401)
    found = trend(steps, [(-1) ** n * 1e-5 * n**power for n in steps])
    assert found is not None and found.exponent == pytest.approx(power, abs=0.05)


def test_a_drift_one_way_is_told_from_noise() -> None:
    steps = range(1, 101)
    drift = trend(steps, [1e-6 * n for n in steps])
    assert drift is not None and drift.drifts and drift.above == drift.blocks == 20
    assert drift.slope == pytest.approx(1e-6)
    noise = trend(steps, [1e-6 * math.cos(0.6 * n) for n in steps])
    assert noise is not None and not noise.drifts
    same = trend(steps, [0.0] * 100)
    assert same is not None and (same.blocks, same.chance, same.exponent) == (0, 1.0, None)
    assert trend([1], [0.0]) is None


def test_sign_test_by_hand() -> None:
    assert sign_test(6, 0) == 2 / 64
    assert sign_test(1, 4) == 2 * (1 + 5) / 32
    assert sign_test(3, 3) == 1.0


def test_evaluations_cancel_in_the_mean_and_not_in_its_absolute_value() -> None:
    a = [evaluation(n, loss) for n, loss in ((10, 2.0), (20, 0.0), (30, 4.0), (40, math.nan))]
    b = [evaluation(n, loss) for n, loss in ((10, 2.5), (20, 0.25), (30, 3.25), (40, 1.0))]
    found = eval_differences(a, b)
    assert found is not None and found.steps == (10, 20, 30)
    assert found.mean == 0.0
    assert found.mean_absolute == 0.5
    assert found.largest == -0.75
    assert found.percent == (25.0, None, -18.75), "of zero there are no percent"
    assert eval_differences(a, [evaluation(11, 1.0)]) is None


def test_settings_plans_and_machines_that_differ_are_listed(tmp_path: Path) -> None:
    a, b = make(tmp_path, "a", fall), make(tmp_path, "b", fall)
    (b / "config.yaml").write_text(
        (b / "config.yaml").read_text().replace("0.003", "0.004").replace("name: try", "name: b")
    )
    pipeline = replace(TWO_TO_ONE.pipelines[0], microbatch=8)
    plan = replace(TWO_TO_ONE, pipelines=(pipeline, TWO_TO_ONE.pipelines[1]))
    (b / "plan.json").write_text(plan.to_json())
    summary = json.loads((b / "summary.json").read_text())
    summary["environment"]["torch"] = "2.11.0"
    (b / "summary.json").write_text(json.dumps(summary))
    found = compare_runs(a, b)
    assert found.config == (("optim.lr", "0.003", "0.004"),), "a name changes no number"
    assert found.plan == (("pipeline 0: microbatch", "4", "8"),)
    assert found.environment == (("torch", "2.13.0", "2.11.0"),)
    assert found.ok, "unlike settings are said, not judged"


def test_meshes_are_told_as_people_write_them(tmp_path: Path) -> None:
    mesh = Mesh.of(range(2), tp=2)
    line = TWO_TO_ONE.pipelines[0]
    line = replace(line, stages=(replace(line.stages[0], mesh=mesh),))
    plan = replace(TWO_TO_ONE, pipelines=(line,))
    unlike = plan.each(lambda stage: replace(stage, mesh=mesh.with_shares(tp=(3, 1))))
    texts = plan.to_json(), unlike.to_json()
    a, b = (
        make(tmp_path, name, fall, plan_text=text) for name, text in zip("ab", texts, strict=True)
    )
    assert compare_runs(a, b).plan == (("pipeline 0, stage 0: mesh", "tp 2", "tp 2 (3:1)"),)


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    a = make(tmp_path, "a", fall)
    with pytest.raises(ConfigError, match=r"^B = "):
        compare_runs(a, tmp_path)
    with pytest.raises(ConfigError, match=r"^A = .*no/run': .*There is no such folder\.$"):
        compare_runs(tmp_path / "no" / "run", a)
    (a / "plan.json").write_text("{")
    with pytest.raises(ConfigError, match="a run whose files can be read"):
        compare_runs(a, a)


def test_runs_without_a_common_step_are_refused(tmp_path: Path) -> None:
    a, b = make(tmp_path, "a", fall), make(tmp_path, "b", fall)
    writer = JsonlWriter(b / "metrics.jsonl", None)
    writer.write(step(STEPS + 1, 4.0))
    writer.close()
    with pytest.raises(ConfigError, match=r"^B = .* a step that A did too"):
        compare_runs(a, b)


def test_the_page_has_a_picture_and_no_script(tmp_path: Path) -> None:
    found = compare_runs(
        make(tmp_path, "a", fall, evals={30: 4.0}),
        make(tmp_path, "b", ulps, evals={30: 4.5}),
    )
    text = page(found)
    assert "<script" not in text and "default-src 'none'" in text
    assert "<polyline" in text and "<polygon" in text
    assert "+5.000e-01" in text and "+1.250e+01" in text
    assert "first outside" not in text
    pairs = [StepPair(1, 4.0, 4.0, 1.0), StepPair(3, 4.0, 5.5, 1.0)]
    drawn = line_chart(difference_chart(replace(found, pairs=pairs)))
    assert 'points="0,600 1000,0"' in drawn, "from 0 to 1.5 of an axis from -1 to 1.5"
    assert "first outside" in drawn


def test_exit_codes_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = make(tmp_path, "a", fall, evals={30: 4.0}), make(tmp_path, "b", ulps, evals={30: 4.1})
    c = make(tmp_path, "c", lambda n: fall(n) + 0.01, evals={30: 4.3})
    html = tmp_path / "page.html"
    noise = ["--noise", str(a), str(c)]
    assert run(["compare", str(a), str(b), "--json", "--html", str(html), *noise]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["inside"] and found["same_data"] and len(found["steps"]) == STEPS
    assert found["evaluations"]["mean"] == pytest.approx(0.1)
    assert found["noise"]["mean_absolute"] == pytest.approx(0.3)
    assert html.read_text().startswith("<!DOCTYPE html>")
    assert run(["compare", str(a), str(c)]) == 1
    assert "OUTSIDE: step 1 differs by +1.00e-02 nats" in capsys.readouterr().out
    assert run(["compare", str(a), str(tmp_path)]) == 2
    assert run(["compare", str(a), str(b), "--full"]) == 2
    assert run(["compare", str(a), str(b), "--bisect", "--html", str(html)]) == 2
    assert "expected nothing beside --bisect" in capsys.readouterr().err


def test_one_way_is_less_likely_than_one_in_a_hundred() -> None:
    """14 of 20 blocks on one side come by chance in 12 of 100 cases, 17 in 3 of 1000."""
    steps = range(1, 21)
    uneven, one_way = (trend(steps, [1e-6] * n + [-1e-6] * (20 - n)) for n in (14, 17))
    assert uneven is not None and one_way is not None
    assert uneven.chance == pytest.approx(0.115, abs=0.001) and not uneven.drifts
    assert one_way.chance == pytest.approx(0.0026, abs=0.0001) and one_way.drifts


def test_the_same_losses_on_other_data_are_outside(tmp_path: Path) -> None:
    found = compare_runs(make(tmp_path, "a", fall), make(tmp_path, "b", ulps, data=8))
    assert found.first_outside is None
    assert found.unlike_data == tuple(range(1, STEPS + 1))
    assert not found.ok


def test_the_band_is_that_of_the_model_that_ran(tmp_path: Path) -> None:
    folders = [make(tmp_path, name, fall) for name in "ab"]
    narrow = compare_runs(*folders)
    for folder in folders:
        file = folder / "config.yaml"
        config = yaml.safe_load(file.read_text())
        config["model"]["d_model"] = 16 * 256
        file.write_text(yaml.safe_dump(config))
    wide = compare_runs(*folders)
    rounding = SCALAR_SAFETY * PRECISIONS["fp32"].sum_roundoff * fall(STEPS)
    grown = (wide.pairs[-1].band - rounding) / (narrow.pairs[-1].band - rounding)
    assert grown == pytest.approx(4, rel=0.05), "the root of 16 times as many terms"


def test_the_noise_floor_is_the_second_seed_minus_the_first(tmp_path: Path) -> None:
    a = make(tmp_path, "a", fall, evals={30: 4.0})
    c = make(tmp_path, "c", ulps, evals={30: 4.25})
    found = compare_runs(a, c, noise=(a, c))
    assert found.noise is not None and found.noise.mean == 0.25


def test_a_step_without_a_number_says_nothing_about_the_trend() -> None:
    found = trend(range(1, 22), [1e-6] * 10 + [math.nan] + [1e-6] * 10)
    assert found is not None
    assert (found.above, found.blocks) == (20, 20)
    assert found.slope == pytest.approx(0)
