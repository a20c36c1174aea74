"""A run is started again, or is not: coordinators that die, stand still, give up. A real Ray and
real signals; the coordinator's actor is a stand-in that reads from a file what to do."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rock_opd.errors import NumericsError, RoleError, RoleLost, RoleTimeout
from rock_opd.progress import Progress
from rock_opd.recipe_file import build_recipe

ray = pytest.importorskip("ray")
from rock_opd.actors.placement import GROUP_PREFIX  # noqa: E402
from rock_opd.actors.processes import _states  # noqa: E402
from rock_opd.supervisor import Patience, Wish, _release_groups, supervise  # noqa: E402  (needs ray)


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    yield
    ray.shutdown()


def coordinator_class(folder: Path, plan: list[dict[str, Any]]):
    """Its n-th life does what the n-th entry of the plan says."""

    class Child:
        def identify(self, role: str, index: int) -> Any:
            from rock_opd.actors.processes import this_process

            return this_process(role, index)

    class Stand:
        def __init__(self) -> None:
            from rock_opd.actors.processes import this_process

            self._stop = False
            self._progress = Progress(processes=(this_process("coordinator", 0),))

        def run(self, recipe: Any, inputs: Any, restarts: Any) -> dict[str, Any]:
            from ray.util.placement_group import placement_group

            # Two of them find no room beside one another.
            group = placement_group([{"CPU": 1.5}], name=f"{GROUP_PREFIX}test")
            assert group.wait(60), "what the last life held has not been given back"
            lives = folder / "lives.jsonl"
            number = len(lives.read_text().splitlines()) if lives.exists() else 0
            child = ray.remote(Child).options(num_cpus=0).remote()
            process = ray.get(child.identify.remote("student rank", 0))
            own = self._progress.processes[0]
            row = {"own": (own.pid, own.started), "child": (process.pid, process.started)}
            with lives.open("a") as file:
                file.write(json.dumps(row | {"restarts": [r.cause for r in restarts]}) + "\n")
            what = plan[number]
            self._progress.processes = (*self._progress.processes, process)
            self._progress.first_step = what.get("from")
            self._progress.step = what.get("from", 0)
            self._progress.phase = "train"
            self._progress.say(f"life {number}")
            time.sleep(1.0)  # heard by the driver
            if what.get("child_stands_still"):
                os.kill(process.pid, signal.SIGSTOP)
            if "signal" in what:
                os.kill(os.getpid(), what["signal"])
            if "raises" in what:
                raise what["raises"]
            began = time.monotonic()
            while time.monotonic() - began < what.get("seconds", 0) and not self._stop:
                time.sleep(0.05)
            return {"finished": not self._stop, "num_steps": number}

        def progress(self, seen: int) -> Progress:
            from dataclasses import replace

            return replace(self._progress, lines=self._progress.lines[seen:])

        def request_stop(self) -> None:
            self._stop = not plan[0].get("deaf", False)

    return Stand


class Trial:
    def __init__(self, folder: Path) -> None:
        self.folder, self.said = folder, []

    def go(self, *plan: dict[str, Any], run: tuple[str, ...] = (), grace_s: float = 30.0) -> Any:
        recipe = build_recipe(
            {
                "run": {"dir": str(self.folder), "device": "cpu"},
                "data": {"prompts": "p.jsonl"},
                "student": {"model": "s"},
                "teacher": {"model": "t"},
                "placement": {f"{role}_cpus": 0.1 for role in ("rollout", "teacher", "student")},
            },
            list(run),
        )
        with Wish(grace_s) as wish:
            return supervise(
                coordinator_class(self.folder, list(plan)),
                recipe,
                None,
                wish=wish,
                show=lambda progress: self.said.extend(progress.lines),
            )

    @property
    def lives(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "lives.jsonl").read_text().splitlines()]


@pytest.fixture
def trial(tmp_path):
    yield Trial(tmp_path)
    _release_groups()  # where the end of the job would


def state(process: list[int]) -> str:
    """As the operating system names it; "" is gone. A process is its pid and its start."""
    return _states([(process[0], process[1])])[0]


LOST = {"raises": RoleLost("student rank 1 (10.0.0.1, pid 7) died in phase 'train'")}


def test_a_run_that_goes_well_is_started_once(trial):
    assert trial.go({"from": 0}) == {"finished": True, "num_steps": 0}
    assert len(trial.lives) == 1 and trial.said == ["life 0"]


def test_a_killed_coordinator_is_started_again_when_nothing_of_it_is_left(trial):
    """Its placement group, which Ray keeps, and its child, which stands still, are gone before."""
    summary = trial.go(
        {"from": 3, "signal": signal.SIGKILL, "child_stands_still": True}, {"from": 3}
    )
    assert summary["num_steps"] == 1
    first, second = trial.lives
    assert state(first["child"]) == state(first["own"]) == ""
    (cause,) = second["restarts"]
    assert cause.startswith("coordinator 0 (") and f"pid {first['own'][0]}) died in step 3" in cause
    assert any("starting again from the last checkpoint (1 of at most 3" in s for s in trial.said)


def test_a_coordinator_that_stands_still_is_ended_and_started_again(trial):
    began = time.monotonic()
    trial.go({"from": 0, "signal": signal.SIGSTOP}, {"from": 0}, run=("run.stall_timeout_s=2",))
    assert time.monotonic() - began < 90
    assert state(trial.lives[0]["own"]) == ""
    assert "stands still: stopped for 2 s" in trial.lives[1]["restarts"][0]


def test_a_lost_role_starts_the_run_again_and_it_is_told_of_all_before(trial):
    trial.go({"from": 2} | LOST, {"from": 4} | LOST, {"from": 6})
    assert [len(life["restarts"]) for life in trial.lives] == [0, 1, 2]


@pytest.mark.parametrize("error", [NumericsError("step 3: NaN"), ZeroDivisionError("ours")])
def test_what_starting_again_does_not_mend_ends_the_run_at_once(trial, error):
    with pytest.raises(RoleError if isinstance(error, ZeroDivisionError) else type(error)):
        trial.go({"from": 3, "raises": error})
    assert len(trial.lives) == 1


# --- how often ------------------------------------------------------------------------------------


def lost(number: int) -> RoleLost:
    return RoleLost(f"loss {number} (10.0.0.1, pid 7)\nthe remote text")


def test_a_run_that_comes_no_further_ends_with_the_first_cause():
    patience = Patience(2)
    assert [patience.after(lost(i), begun=4) for i in (1, 2)] == [1, 2]
    with pytest.raises(RoleLost, match=r"^loss 1 .*pid 7\) \(started again 2 times from step 4"):
        patience.after(lost(3), begun=4)


def test_restarts_are_counted_from_each_new_step():
    patience = Patience(1)
    assert [patience.after(lost(i), begun=2 * i) for i in range(50)] == [1] * 50
    with pytest.raises(RoleLost, match="loss 49"):
        patience.after(lost(50), begun=98)


def test_an_attempt_that_does_not_come_to_its_first_step_gets_no_further():
    patience = Patience(2)
    assert [patience.after(lost(i), begun=None) for i in (1, 2)] == [1, 2]
    with pytest.raises(RoleLost, match=r"loss 1 .*from step 0 and came no further"):
        patience.after(lost(3), begun=None)


def test_no_restarts_where_none_are_allowed():
    with pytest.raises(RoleLost, match=r"^loss 1 \(10.0.0.1, pid 7\)\nthe remote text$"):
        Patience(0).after(lost(1), begun=7)


def test_a_first_start_that_fails_of_what_is_no_loss_is_not_tried_again():
    for error in (RoleError("no module named x"), RoleTimeout("no answer in phase 'start'")):
        with pytest.raises(type(error)):
            Patience(3).after(error, begun=None)
        later = Patience(3)
        assert later.after(lost(1), begun=5) == 1
        assert later.after(error, begun=None) == 2  # it did start once: try again


# --- what the person wants ------------------------------------------------------------------------


def when_it_runs(trial: Trial, *numbers: int) -> None:
    """Sends these signals to this process, one a second."""

    def send() -> None:
        while not any("life 0" in line for line in trial.said):
            time.sleep(0.1)
        for number in numbers:
            time.sleep(1)
            if isinstance(getattr(signal.getsignal(number), "__self__", None), Wish):
                os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()


def test_ctrl_c_waits_for_the_step_however_long(trial):
    when_it_runs(trial, signal.SIGINT)
    assert trial.go({"from": 0, "seconds": 60}, grace_s=0)["finished"] is False
    assert "stopping after this step (once more to abandon it)" in trial.said


def test_sigterm_leaves_when_the_grace_is_over(trial):
    when_it_runs(trial, signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        trial.go({"from": 5, "seconds": 100, "deaf": True}, grace_s=2)
    assert "step 5, phase 'train', did not end within run.grace_s=2 s" in trial.said[-1]


def test_a_second_ctrl_c_abandons_the_step(trial):
    when_it_runs(trial, signal.SIGINT, signal.SIGINT)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        trial.go({"from": 0, "seconds": 100, "deaf": True})
    assert time.monotonic() - began < 60


def test_the_placement_groups_of_others_in_the_same_job_stay():
    """verl's task runner starts us in a job in which its queue has a group of its own."""
    from ray.util.placement_group import (
        placement_group,
        placement_group_table,
        remove_placement_group,
    )

    ours, theirs = (
        placement_group([{"CPU": 0.5}], name=name) for name in (f"{GROUP_PREFIX}run", "queue")
    )
    assert ours.wait(60) and theirs.wait(60)
    _release_groups()
    table = placement_group_table()
    states = {g["name"]: g["state"] for g in table.values()}
    assert states["queue"] == "CREATED" and states[f"{GROUP_PREFIX}run"] == "REMOVED"
    remove_placement_group(theirs)


def test_the_end_of_the_terminal_is_told_as_a_sigterm_is_unless_it_is_to_be_outlived():
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with Wish(0.0) as wish:
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.01)
            assert wish.stop and wish.out_of_time
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
        with Wish(0.0) as wish:
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.01)
            assert not wish.stop
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_run_that_can_no_longer_be_shown_goes_on(trial):
    class Deaf(list):
        def extend(self, lines):
            super().extend(lines)
            if self:
                raise BrokenPipeError(32, "Broken pipe")

    trial.said = Deaf()
    assert trial.go({"from": 0, "seconds": 2})["finished"]
    assert trial.said == ["life 0"]
