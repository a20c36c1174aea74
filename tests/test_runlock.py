"""Two runs never share a folder; a claim ends with its process, however that ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rock_opd.driver import settle_run_dir
from rock_opd.recipe_file import build_recipe
from rock_opd.runlock import NAME, STALE_S, RunTaken, claim

HOLDER = """
import sys, time
from pathlib import Path
from rock_opd.runlock import claim
print(claim(Path(sys.argv[1])).taken_over, flush=True)
sys.stdin.readline()
"""


class Holder:
    """Another process that claims a folder and keeps it until it is told."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said = self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.communicate("\n", timeout=60)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=60)


def recipe(folder: Path, *overrides: str):
    base = {
        "run": {"name": "t", "dir": str(folder)},
        "data": {"prompts": "p"},
        "student": {"model": "s"},
        "teacher": {"model": "t"},
    }
    return build_recipe(base, list(overrides))


def test_a_folder_that_a_living_process_holds_is_refused_and_named(tmp_path):
    holder = Holder(tmp_path / "t")
    try:
        assert holder.said == "None"
        with pytest.raises(RunTaken, match=rf"belongs to process {holder.process.pid} on .* since"):
            claim(tmp_path / "t")
        with pytest.raises(RunTaken):
            settle_run_dir(recipe(tmp_path))
        named = settle_run_dir(recipe(tmp_path, "run.on_existing=new"))
        assert named.run.name == "t-2"
        claim(named.run_dir).release()
    finally:
        holder.end()
    assert not list(tmp_path.iterdir())  # nothing was begun: nothing is left
    lock = claim(tmp_path / "t")
    assert lock.taken_over is None
    lock.release()


def test_a_claim_of_a_process_that_was_killed_is_taken_over_and_said(tmp_path):
    holder = Holder(tmp_path / "t")
    holder.kill()
    assert (tmp_path / "t" / NAME).is_file()
    lock = claim(tmp_path / "t")
    assert f"taken over from process {holder.process.pid} on" in lock.taken_over
    assert json.loads((tmp_path / "t" / NAME).read_text())["pid"] == os.getpid()
    assert claim(tmp_path / "t") is lock  # once is enough
    lock.release()


def test_of_many_that_start_at_once_one_gets_the_name_and_the_others_the_next(tmp_path):
    script = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_runlock import recipe
from rock_opd.driver import settle_run_dir
named = settle_run_dir(recipe(Path(sys.argv[1]), "run.on_existing=new"))
print(named.run.name, flush=True)
sys.stdin.readline()
"""
    arguments = [sys.executable, "-c", script, str(tmp_path), str(Path(__file__).parent)]
    started = [
        subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    names = [process.stdout.readline().strip() for process in started]
    for process in started:
        process.communicate("\n", timeout=60)
    assert sorted(names) == ["t", "t-2", "t-3", "t-4"]


def test_a_claim_from_another_machine_holds_while_it_is_touched(tmp_path):
    folder = tmp_path / "t"
    folder.mkdir()
    lock = folder / NAME
    lock.write_text(json.dumps({"host": "elsewhere", "pid": 1, "since": "noon"}))
    with pytest.raises(RunTaken, match="process 1 on elsewhere, since noon"):
        claim(folder)
    old = time.time() - STALE_S - 1
    os.utime(lock, (old, old))
    mine = claim(folder)
    assert "taken over from process 1 on elsewhere" in mine.taken_over
    mine.release()
    assert not folder.exists()


@pytest.mark.parametrize(
    "content",
    [
        b'{"host": "el',
        b"[]",
        b"null",
        b"[" * 100_000,
        b"\xff\xfe",
        b'{"host": "elsewhere", "pid": 1e400, "since": "noon"}',
        b'{"host": "elsewhere", "pid": [], "since": "noon"}',
    ],
    ids=["cut short", "list", "null", "deep", "no text", "endless number", "no number"],
)
def test_a_lock_that_says_nothing_of_sense_is_nobodys(tmp_path, content):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / NAME).write_bytes(content)
    lock = claim(tmp_path / "t")
    assert lock.taken_over is None
    (tmp_path / "t" / "kept").write_text("")
    lock.release()
    assert [p.name for p in (tmp_path / "t").iterdir()] == ["kept"]
