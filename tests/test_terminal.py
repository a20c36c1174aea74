"""Who reads a command's output may leave; a closed terminal is no kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rock_opd.driver import deaf_to_hangup

TALKER = """
import sys
import click
from rich.console import Console
from rock_opd.terminal import outlive_readers
outlive_readers()
print("first", flush=True)
print("first", file=sys.stderr, flush=True)
sys.stdin.readline()
for i in range(200):
    click.echo("x" * 1000)
    click.echo("x" * 1000, err=True)
    Console().print("y" * 1000)
    Console(stderr=True).print("y" * 1000)
    print("z" * 1000)
    print("z" * 1000, file=sys.stderr)
open(sys.argv[1], "w").write("went on")
sys.exit(7)
"""


@pytest.mark.parametrize("left", [("stdout",), ("stderr",), ("stdout", "stderr")])
def test_a_reader_that_leaves_changes_neither_the_work_nor_the_status(tmp_path, left):
    with subprocess.Popen(
        [sys.executable, "-c", TALKER, str(tmp_path / "end")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE if "stdout" in left else subprocess.DEVNULL,
        stderr=subprocess.PIPE if "stderr" in left else subprocess.DEVNULL,
        text=True,
    ) as process:
        for name in left:
            assert getattr(process, name).readline() == "first\n"
            getattr(process, name).close()
        process.stdin.write("\n")
        process.stdin.close()
        assert process.wait(60) == 7
    assert (tmp_path / "end").read_text() == "went on"


def test_what_is_printed_to_those_who_stay_arrives_whole(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", TALKER, str(tmp_path / "end")],
        input="\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 7
    for said in (done.stdout, done.stderr):
        assert said.count("x") == said.count("z") == said.count("y") == 200_000


def test_a_full_disk_behind_the_output_ends_nothing(tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", TALKER, str(tmp_path / "end")],
            input="\n",
            stdout=full,
            stderr=full,
            text=True,
            check=False,
            timeout=60,
        )
    assert done.returncode == 7 and (tmp_path / "end").exists()


def test_a_reader_that_does_not_block_gets_all_of_it_late(tmp_path):
    """As under tools that set their pipes to O_NONBLOCK."""
    script = textwrap.dedent(
        """
        import sys
        from rock_opd.terminal import outlive_readers
        outlive_readers()
        print("x" * 1_000_000)
        """
    )
    read, write = os.pipe()
    os.set_blocking(write, False)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=write)
    os.close(write)
    with os.fdopen(read) as file:
        assert len(file.read()) == 1_000_001
    assert process.wait(60) == 0


def ignores_hangup() -> bool:
    script = "import signal; print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    return done.stdout == b"True\n"


def test_processes_of_a_cluster_of_our_own_ignore_the_end_of_the_terminal():
    before = signal.getsignal(signal.SIGHUP)
    with deaf_to_hangup():
        assert ignores_hangup()
    assert signal.getsignal(signal.SIGHUP) == before
    assert before == signal.SIG_IGN or not ignores_hangup()
