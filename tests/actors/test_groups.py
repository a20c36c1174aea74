"""What the coordinator sees of Ray: time limits, errors, placement. A real Ray, no engines."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rock_opd.config import build_recipe
from rock_opd.errors import DataError, PlacementError, RoleError, RoleTimeout

ray = pytest.importorskip("ray")
from rock_opd.actors.groups import _chunks  # noqa: E402  (needs ray)
from rock_opd.actors.placement import Placement  # noqa: E402
from rock_opd.actors.waiting import gather  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    yield
    ray.shutdown()


def worker():
    class Worker:  # local, so that Ray ships it by value: actors cannot import the tests
        def quick(self) -> int:
            return 1

        def slow(self) -> None:
            time.sleep(60)

        def bad_row(self) -> None:
            raise DataError("row 7 is empty")

        def broken(self) -> None:
            raise ZeroDivisionError("nobody expected this")

        def die(self) -> None:
            import os

            os._exit(1)

    return ray.remote(Worker).options(num_cpus=0).remote()


def test_a_late_actor_is_named_with_its_phase_and_the_limit():
    handles = [worker(), worker()]
    with pytest.raises(RoleTimeout, match=r"teacher \[1\]: no answer in phase 'score' within 5 s"):
        gather("teacher", "score", [handles[0].quick.remote(), handles[1].slow.remote()], 5.0)
    for handle in handles:
        ray.kill(handle)


def test_our_own_errors_come_back_as_they_are_with_who_and_when():
    with pytest.raises(DataError, match=r"^teacher 0, phase 'score': row 7 is empty$"):
        gather("teacher", "score", [worker().bad_row.remote()], 30.0)


def test_a_failure_is_told_at_once_though_others_are_still_at_work():
    started = time.monotonic()
    handles = [worker(), worker()]
    ray.get([h.quick.remote() for h in handles])
    with pytest.raises(DataError, match=r"student rank 1, phase 'train': row 7"):
        gather("student rank", "train", [handles[0].slow.remote(), handles[1].bad_row.remote()], 50)
    assert time.monotonic() - started < 40
    for handle in handles:
        ray.kill(handle)


def test_a_death_explains_the_errors_of_the_others():
    handles = [worker(), worker()]
    ray.get([h.quick.remote() for h in handles])
    with pytest.raises(RoleError, match=r"student rank 1 died in phase 'train'"):
        gather("student rank", "train", [handles[0].broken.remote(), handles[1].die.remote()], 50)


def test_an_unknown_error_carries_the_remote_text():
    with pytest.raises(RoleError, match=r"(?s)student rank 0 failed in phase 'train'.*nobody exp"):
        gather("student rank", "train", [worker().broken.remote()], 30.0)


def test_a_death_is_named():
    with pytest.raises(RoleError, match=r"rollout worker 0 died in phase 'generate'"):
        gather("rollout worker", "generate", [worker().die.remote()], 30.0)


def recipe(folder: Path, *overrides: str):
    base = {
        "run": {"dir": str(folder), "device": "cpu"},
        "data": {"prompts": "p.jsonl"},
        "student": {"model": "s"},
        "teacher": {"model": "t"},
    }
    return build_recipe(base, list(overrides))


def test_a_cluster_too_small_is_said_at_once_with_a_table(tmp_path):
    started = time.monotonic()
    with pytest.raises(PlacementError, match=r"(?s)CPU asked 7, there 2.*rollout +5 +1") as error:
        Placement(
            recipe(tmp_path, "rollout.num_workers=5"), "cpu", ("student", "rollout", "teacher")
        )
    assert time.monotonic() - started < 5
    assert "placement.*_cpus" in str(error.value)


def test_gpus_asked_of_a_cluster_without_any_are_named(tmp_path):
    wanted = recipe(
        tmp_path,
        "run.device=cuda",
        "placement.colocate=all",
        "student.num_ranks=4",
        "rollout.num_workers=4",
    )
    with pytest.raises(PlacementError, match="GPU asked 4, there 0"):
        Placement(wanted, "cuda", ("student", "rollout", "teacher"))


def test_what_fits_is_placed_and_given_back(tmp_path):
    small = [f"placement.{role}_cpus=0.5" for role in ("rollout", "teacher", "student")]
    placement = Placement(recipe(tmp_path, *small), "cpu", ("student", "rollout", "teacher"))
    (slot,) = placement.slots("teacher")
    assert slot.options["num_cpus"] == 0.5 and slot.gpus is None
    assert slot.options["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] == "1"
    placement.release()


def test_chunks_are_contiguous_and_even():
    assert _chunks(list(range(5)), 3) == [[0, 1], [2, 3], [4]]
    assert _chunks([1], 3) == [[1], [], []]
