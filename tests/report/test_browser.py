"""All pages in a real browser, 500 pixels wide, light and dark, with names an attacker picks."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from mix.mix_cases import BIG, SMALL, WORK, chips_of, part_trial
from report_cases import CLUSTER, CONFIG, UNLIKE, change_summary, make_run
from test_report_page import EVIL

from weft.cli.main import run
from weft.mix.chips import Kind
from weft.mix.mix import MixReport, Rates
from weft.mix.page import page as mix_page
from weft.mix.questions import Question, ask
from weft.report.compare_page import page as compare_page
from weft.report.compare_runs import compare_runs
from weft.report.page import write_report

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH = 500
LONG = EVIL + "n" * 300

FRAMES = """<!DOCTYPE html><body><script>
const pages = %s;
for (const page of pages) for (const scheme of ["light", "dark"]) {
  const frame = document.createElement("iframe");
  Object.assign(frame, {width: %d, height: 900, src: page, id: `${page} ${scheme}`});
  frame.style.colorScheme = scheme;
  document.body.append(frame);
}
const inside = (text, box) => {
  const [a, b] = [text.getBoundingClientRect(), box.getBoundingClientRect()];
  return a.left >= b.left - 1 && a.right <= b.right + 1;
};
onload = () => {
  const found = [...document.querySelectorAll("iframe")].map((frame) => {
    const page = frame.contentDocument;
    const texts = [...page.querySelectorAll(".plot text, .row text")];
    return {
      page: frame.id,
      width: page.documentElement.scrollWidth,
      background: getComputedStyle(page.body).backgroundColor,
      heading: page.querySelector("h1").textContent,
      pictures: page.querySelectorAll("svg").length,
      cut: texts.filter((t) => !inside(t, t.closest(".plot, .row"))).map((t) => t.textContent),
      small: texts.filter((t) => parseFloat(getComputedStyle(t).fontSize) < 11).length,
    };
  });
  const told = document.createElement("pre");
  told.textContent = JSON.stringify(found);
  document.body.replaceChildren(told);
};
</script></body>"""


def write_pages(folder: Path) -> list[str]:
    """One page of each kind, full of hostile text."""
    a, b = make_run(folder), shutil.copytree(folder / "try", folder / LONG[-200:])
    config = yaml.safe_load(CONFIG) | {"name": LONG, "data": {"path": LONG}}
    node = CLUSTER["nodes"][0] | {"host": LONG, "cpu": LONG}
    (a / "plan.json").write_text(UNLIKE.to_json().replace('"npu"', json.dumps(EVIL)))
    (a / "config.yaml").write_text(json.dumps(config))
    (a / "cluster.json").write_text(json.dumps({"nodes": [node]}))
    change_summary(a, samples=[{"prompt": LONG, "text": LONG}], environment={LONG: LONG})
    write_report(a).rename(folder / "report.html")
    (a / "plan.json").write_text(UNLIKE.to_json())
    (folder / "compare.html").write_text(compare_page(compare_runs(a, b)))
    chip = {"name": EVIL, "vendor": LONG, "peak_tflops": {"bf16": 320, "fp32": 20}}
    chip |= {"memory_gib": 64, "memory_gb_s": 1600, "link_gb_s": 200, "power_w": 400}
    pools = [{"chip": name, "nodes": 1, "chips_per_node": 8} for name in (EVIL, "A100-SXM4-80GB")]
    cluster = folder / "cluster.yaml"
    cluster.write_text(
        json.dumps({"chips": [chip], "pools": [p | {"network_gbit": 200} for p in pools]})
    )
    stages = "plan.stages=[{dp: 4, tp: 2, zero: 1, recompute: full}, {dp: 4, tp: 2, zero: 1}]"
    words = [
        "model.size=llama3-8b",
        "data.seq_len=2048",
        "batch.samples=64",
        "batch.micro=4",
        stages,
    ]
    page = ["--cluster", str(cluster), "--html", str(folder / "plan.html")]
    assert run(["plan", "demo", *words, *page]) == 0
    both = ask(Question("1", 2), WORK, chips_of())
    parts = {
        name: Rates(trial, [rate], timelines=chips_of(kind).time(trial.plan, WORK).timelines)
        for name, kind, rate in ((LONG, "big", 1000.0), ("small", "small", 800.0))
        for trial in [part_trial(kind)]
    }
    mixed = Rates(both, [1500.0], timelines=chips_of().time(both.plan, WORK).timelines)
    text = mix_page(MixReport(parts, [mixed]), [Kind(LONG, BIG.ranks), SMALL])
    (folder / "mix.html").write_text(text)
    return ["report.html", "compare.html", "plan.html", "mix.html"]


def browser() -> str:
    """One that starts: a package may install no more than a hint where to find it."""
    for found in filter(None, map(shutil.which, BROWSERS)):
        if subprocess.run([found, "--version"], capture_output=True, check=False).returncode == 0:
            return found
    pytest.skip(f"none of {', '.join(BROWSERS)} is installed")


def test_pages_in_a_browser(tmp_path: Path) -> None:
    """No complaint on the console, nothing wider than the page, nothing cut off, nothing run."""
    chromium, pages = browser(), write_pages(tmp_path)
    (tmp_path / "frames.html").write_text(FRAMES % (json.dumps(pages), WIDTH))
    command = [chromium, "--headless", "--disable-gpu", "--hide-scrollbars", "--dump-dom"]
    command += ["--allow-file-access-from-files", "--enable-logging=stderr"]
    command += ["--no-first-run", "--disable-dev-shm-usage"]
    command += ["--no-sandbox"] if os.getuid() == 0 else []
    command += [f"--user-data-dir={tmp_path / 'profile'}", str(tmp_path / "frames.html")]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    (told,) = re.findall("<pre>(.*)</pre>", shown.stdout)
    found = json.loads(html.unescape(told))
    assert [line for line in shown.stderr.splitlines() if "CONSOLE" in line] == []
    assert len(found) == 2 * len(pages)
    for each in found:
        assert each["width"] <= WIDTH, each
        assert not each["cut"] and not each["small"], each
        dark = each["page"].endswith("dark")
        assert each["background"] == ("rgb(15, 20, 27)" if dark else "rgb(255, 255, 255)"), each
        assert each["pictures"] >= 4, each
    assert found[0]["heading"] == LONG
