"""What becomes of actors that die, stand still or are late. A real Ray, real signals; no engine."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rock_opd.errors import DataError, RoleError, RoleLost, RoleTimeout

ray = pytest.importorskip("ray")
from rock_opd.actors.fleet import Fleet, Limits  # noqa: E402  (needs ray)
from rock_opd.actors.processes import Lookout, end  # noqa: E402
from rock_opd.actors.receivers import Receivers  # noqa: E402
from rock_opd.actors.waiting import Stopped, Watch, collect, gather  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    yield
    ray.shutdown()


@dataclass(frozen=True)
class Place:
    options: dict[str, Any] = field(default_factory=lambda: {"num_cpus": 0})
    gpus: list[int] | None = None


def worker_class(folder: Path):
    """Answers with what it was asked, and writes down each time it was asked."""

    class Worker:  # local, so that Ray ships it by value: actors cannot import the tests
        def __init__(self, gpus: list[int] | None) -> None:
            self._started = 0

        def identify(self, role: str, index: int) -> Any:
            from rock_opd.actors.processes import this_process

            self._index = index
            return this_process(role, index)

        def start(self, seconds: float) -> None:
            if (folder / "cannot_start").exists():
                raise RuntimeError("out of memory")
            time.sleep(seconds)

        def work(self, batch: list[int], seconds: float) -> list[int]:
            with (folder / f"asked_{self._index}").open("a") as file:
                file.write(f"{batch}\n")
            # Only the first life of a worker is long: its replacement answers at once.
            times = len((folder / f"asked_{self._index}").read_text().splitlines())
            time.sleep(seconds if times == 1 or (folder / "always_slow").exists() else 0)
            return [x * x for x in batch]

        def bad_row(self) -> None:
            raise DataError("row 7 is empty")

        def take(self, what: str) -> str:
            if (folder / f"refuse_{self._index}").exists():
                raise DataError(f"{what}: another checksum")
            return what

    return Worker


class Bench:
    """A fleet, and what was said of it."""

    def __init__(self, folder: Path, num: int = 2, **limits: float) -> None:
        self.replaced: list[Any] = []
        self.joined: list[Any] = []
        bounds = {"start_s": 60, "phase_s": 60, "stall_s": 60, "max_replacements": 2} | limits
        self.fleet = Fleet(
            "rollout worker",
            worker_class(folder),
            [Place()] * num,
            lambda handle: handle.start.remote(0),
            Limits(**bounds),
            joined=self.joined.append,
            replaced=self.replaced.append,
        )
        gather("rollout worker", "start", self.fleet.spawn()[1], 60)
        self.folder = folder

    def asked(self, index: int) -> list[str]:
        path = self.folder / f"asked_{index}"
        return path.read_text().splitlines() if path.exists() else []

    def signal_when_asked(self, index: int, number: int) -> None:
        """Sends a signal to a worker once it works."""
        process = self.fleet.processes[index]

        def send() -> None:
            while not self.asked(index):
                time.sleep(0.02)
            os.kill(process.pid, number)

        threading.Thread(target=send, daemon=True).start()

    def work(self, seconds: dict[int, float] | None = None) -> dict[int, list[int]]:
        seconds = seconds or {}
        return self.fleet.each(
            "generate",
            {
                i: lambda h, i=i: h.work.remote([i, i + 10], seconds.get(i, 0))
                for i in range(len(self.fleet.handles))
            },
        )


@pytest.fixture
def bench(tmp_path):
    made: list[Bench] = []

    def make(num: int = 2, **limits: float) -> Bench:
        made.append(Bench(tmp_path, num, **limits))
        return made[-1]

    yield make
    for one in made:
        one.fleet.kill()


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_killed_worker_is_replaced_and_asked_again_and_the_others_are_not(bench):
    it = bench()
    before = it.fleet.processes[0]
    it.signal_when_asked(0, signal.SIGKILL)
    assert it.work({0: 60}) == {0: [0, 100], 1: [1, 121]}
    assert it.asked(0) == ["[0, 10]", "[0, 10]"] and it.asked(1) == ["[1, 11]"]
    (told,) = it.replaced
    assert told.process == it.fleet.processes[0] == it.joined[-1] and told.process != before
    assert told.cause.startswith(f"rollout worker 0 ({before.ip}, pid {before.pid}) died in phase")
    assert told.cause.endswith("its worker process has died") and "\n" not in told.cause
    assert told.phase == "generate" and 0 < told.seconds < 60
    assert it.fleet.fresh == {0}
    assert it.work() == {0: [0, 100], 1: [1, 121]} and len(it.replaced) == 1


def test_a_stopped_worker_is_ended_for_certain_and_replaced(bench):
    it = bench(stall_s=2)
    before = it.fleet.processes[1]
    it.signal_when_asked(1, signal.SIGSTOP)
    began = time.monotonic()
    assert it.work({1: 300})[1] == [1, 121]
    assert time.monotonic() - began < 60
    assert "stands still in phase 'generate': stopped for 2 s" in it.replaced[0].cause
    assert is_gone(before.pid)


def test_a_worker_that_is_late_is_replaced(bench):
    it = bench(phase_s=3)
    assert it.work({0: 300})[0] == [0, 100]
    assert "no answer in phase 'generate' within 3 s (1 of 2 answered)" in it.replaced[0].cause


def test_losing_both_at_once_replaces_both(bench):
    it = bench()
    it.signal_when_asked(0, signal.SIGKILL)
    it.signal_when_asked(1, signal.SIGKILL)
    assert it.work({0: 60, 1: 60}) == {0: [0, 100], 1: [1, 121]}
    assert sorted(told.process.index for told in it.replaced) == [0, 1]


def test_an_error_of_our_own_is_raised_and_nobody_is_replaced(bench):
    it = bench()
    with pytest.raises(DataError, match=r"rollout worker 1 \(.*pid \d+\), phase 'score': row 7 is"):
        it.fleet.each("score", {1: lambda h: h.bad_row.remote()})
    assert it.replaced == []


def test_who_is_lost_again_and_again_ends_the_role_with_the_cause(bench, tmp_path):
    it = bench(1, phase_s=2, max_replacements=1)
    (tmp_path / "always_slow").touch()
    with pytest.raises(RoleTimeout, match="lost 2 times in a row"):
        it.work({0: 300})
    assert len(it.replaced) == 1


def test_a_replacement_that_cannot_start_says_why(bench, tmp_path):
    it = bench(1)
    (tmp_path / "cannot_start").touch()
    os.kill(it.fleet.processes[0].pid, signal.SIGKILL)
    with pytest.raises(RoleError, match=r"(?s)no other one could be started.*out of memory"):
        it.work()


def test_who_is_lost_between_two_phases_is_found_and_replaced_in_the_next(bench):
    it = bench()
    os.kill(it.fleet.processes[0].pid, signal.SIGKILL)
    assert it.fleet.tell("clear", lambda h: h.take.remote("x")) == {1: "x"}
    assert it.replaced == []
    seen: list[set[int]] = []
    it.fleet.each(
        "score",
        {i: lambda h: h.take.remote("y") for i in (0, 1)},
        before=lambda: seen.append(set(it.fleet.fresh)),
    )
    assert seen == [set(), {0}]  # the second round knows whom to bring up to date


def test_a_receiver_lost_during_a_sync_is_left_out_and_named(bench):
    it = bench(3)
    receivers = Receivers(dict(enumerate(it.fleet.handles)), 7, 30, it.fleet.watch())
    assert receivers.ask("begin", lambda h: h.take.remote("begin")).keys() == {0, 1, 2}
    os.kill(it.fleet.processes[1].pid, signal.SIGKILL)
    assert receivers.ask("bucket", lambda h: h.take.remote("bucket")).keys() == {0, 2}
    assert receivers.ask("end", lambda h: h.take.remote("end")).keys() == {0, 2}
    receivers.check()
    assert receivers.lost.keys() == {1}
    assert "died in phase 'weight sync of v7, bucket'" in receivers.lost[1].cause
    with pytest.raises(RoleLost, match="weight sync of v7"):
        receivers.check(all_here=True)


def test_a_receiver_that_refuses_is_an_error_after_all_were_asked(bench, tmp_path):
    it = bench(2)
    (tmp_path / "refuse_0").touch()
    receivers = Receivers(dict(enumerate(it.fleet.handles)), 7, 30, it.fleet.watch())
    assert receivers.ask("bucket", lambda h: h.take.remote("bucket")) == {1: "bucket"}
    with pytest.raises(DataError, match=r"rollout worker 0 .*another checksum"):
        receivers.check()


def test_somebody_others_wait_for_who_stands_still_is_named(bench):
    it = bench(2)
    os.kill(it.fleet.processes[1].pid, signal.SIGSTOP)
    watch = Watch(stall_s=2, processes={0: it.fleet.processes[0]}, others=[it.fleet.processes[1]])
    with pytest.raises(RoleLost, match=r"rollout worker 1 .* stands still in phase 'train'"):
        collect(
            "student rank", "train", {0: it.fleet.handles[0].work.remote([], 60)}, 60, watch=watch
        )
    assert end([it.fleet.processes[1]]) == []


def test_a_process_that_goes_on_in_time_does_not_count_as_stalled(bench):
    it = bench(1)
    lookout = Lookout([it.fleet.processes[0]], 3)
    os.kill(it.fleet.processes[0].pid, signal.SIGSTOP)
    began, found = time.monotonic(), []
    while time.monotonic() - began < 8:
        found += lookout.stalled()
        if time.monotonic() - began > 1.5:
            os.kill(it.fleet.processes[0].pid, signal.SIGCONT)
        time.sleep(0.1)
    assert found == []
    assert it.work()[0] == [0, 100]


def test_a_wish_to_stop_ends_the_wait_for_engines_in_seconds(bench):
    it = bench(1)
    refs, began = [it.fleet.handles[0].start.remote(120)], time.monotonic()
    with pytest.raises(Stopped):
        gather("teacher", "start", refs, 120, stop=lambda: time.monotonic() - began > 1)
    assert time.monotonic() - began < 5
