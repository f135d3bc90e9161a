"""The device is built once a machine, by whoever comes first, and never waited for in vain."""

import subprocess
import sys
from pathlib import Path

import pytest
from chipb import build

COMPILER = """\
#!/bin/sh
echo call >> {calls}
while [ $# -gt 1 ]; do [ "$1" = -o ] && out="$2"; shift; done
echo {content} > "$out"
exit {status}
"""
BUILD = "from pathlib import Path; from chipb.build import built; built(Path({folder!r}))"
TIMEOUT_S = 600


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every call of a compiler that takes anything leaves a line here."""
    file = tmp_path / "calls"
    use_compiler(tmp_path, monkeypatch, status=0)
    return file


def use_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, *, status: int) -> None:
    script = folder / f"compiler-{status}"
    script.write_text(COMPILER.format(calls=folder / "calls", content=status, status=status))
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))


def test_processes_that_come_together_build_once(tmp_path: Path, calls: Path) -> None:
    folder = tmp_path / "cache"
    code = BUILD.format(folder=str(folder))
    command = [sys.executable, "-c", f"import sys; sys.path.append('tests'); {code}"]
    root = Path(__file__).parents[2]
    processes = [subprocess.Popen(command, cwd=root) for _ in range(2)]
    assert [process.wait(TIMEOUT_S) for process in processes] == [0, 0]
    assert calls.read_text() == "call\n"
    assert len(list(folder.glob("*.so"))) == 1


def test_what_a_killed_build_left_is_in_nobodys_way(tmp_path: Path, calls: Path) -> None:
    """Its lock file and half a library; only a living process holds the lock."""
    folder = tmp_path / "cache"
    library = build.built(folder)
    library.rename(folder / "tmp-half-done.so")
    assert library.with_suffix(".lock").exists()
    assert build.built(folder) == library
    assert library.read_text() == "0\n"
    assert calls.read_text() == "call\ncall\n"


def test_a_source_that_does_not_compile_leaves_nothing(
    tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    use_compiler(tmp_path, monkeypatch, status=1)
    with pytest.raises(build.BuildError):
        build.built(folder)
    assert [path.suffix for path in folder.iterdir()] == [".lock"]
    use_compiler(tmp_path, monkeypatch, status=0)
    assert build.built(folder).read_text() == "0\n"


def test_another_source_is_another_library(
    tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = build.built(tmp_path)
    (tmp_path / "device.cpp").write_text(build.SOURCE.read_text() + "\n")
    monkeypatch.setattr(build, "SOURCE", tmp_path / "device.cpp")
    assert build.built(tmp_path) != before
    assert calls.read_text() == "call\ncall\n"


def test_without_a_compiler_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.compiler() is None
