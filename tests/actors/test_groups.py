"""What the coordinator sees of Ray: time limits, errors, ports. A real Ray, no engines."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from rock_opd.errors import DataError, RoleError, RoleTimeout

ray = pytest.importorskip("ray")
from rock_opd.actors.groups import _chunks  # noqa: E402  (needs ray)
from rock_opd.actors.starting import settle  # noqa: E402
from rock_opd.actors.waiting import gather  # noqa: E402
from rock_opd.actors.workers import StudentWorker  # noqa: E402


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
    with pytest.raises(RoleTimeout, match=r"teacher 1: no answer in phase 'score' within 5 s"):
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


def flaky_worker(times: int, folder: Path):
    class Flaky:
        def start(self, number: int) -> None:
            import pathlib

            tries = pathlib.Path(folder) / f"tries_{number}"
            tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
            if len(tries.read_text()) <= times:
                raise RuntimeError("bind: [Errno 98] Address already in use")

    return ray.remote(Flaky).options(num_cpus=0)


def test_an_engine_whose_port_was_taken_starts_again_on_another(tmp_path):
    kind, said = flaky_worker(1, tmp_path), []

    def spawn():
        handles = [kind.remote(), kind.remote()]
        return handles, [h.start.remote(i) for i, h in enumerate(handles)]

    handles, refs = spawn()
    first = list(handles)
    settle("rollout", spawn, handles, refs, timeout_s=60, say=said.append)
    assert said == ["rollout: another process took a port meanwhile; starting again on others"]
    assert not set(first) & set(handles)
    assert (tmp_path / "tries_0").read_text() == (tmp_path / "tries_1").read_text() == "xx"


def test_a_port_that_stays_taken_ends_the_start_and_other_errors_do_at_once(tmp_path):
    kind = flaky_worker(99, tmp_path)

    def spawn():
        handles = [kind.remote()]
        return handles, [handles[0].start.remote(0)]

    with pytest.raises(RoleError, match=r"(?s)rollout 0 failed in phase 'start'.*already in use"):
        settle("rollout", spawn, *spawn(), timeout_s=60, say=lambda text: None)
    assert (tmp_path / "tries_0").read_text() == "xxx"

    asked = []
    with pytest.raises(DataError):
        settle(
            "teacher",
            lambda: asked.append(1),
            [worker()],
            [worker().bad_row.remote()],
            timeout_s=60,
            say=lambda text: None,
        )
    assert not asked


def test_the_ranks_meet_at_a_port_nobody_can_take_before_they_do(tmp_path):
    """Named, then a greedy process tries to have it, then both ranks meet there."""

    def meet(host: str, port: int, rank: int) -> int:
        import os

        import torch

        os.environ.update(
            TORCHELASTIC_USE_AGENT_STORE="True",
            MASTER_ADDR=host,
            MASTER_PORT=str(port),
            RANK=str(rank),
            WORLD_SIZE="2",
        )
        torch.distributed.init_process_group("gloo")
        total = torch.tensor(rank + 1)
        torch.distributed.all_reduce(total)
        return int(total)

    ranks = [ray.remote(StudentWorker).options(num_cpus=0).remote() for _ in range(2)]
    host, port = ray.get(ranks[0].open_address.remote(), timeout=120)
    for address in ("", host):
        with socket.socket() as greedy, pytest.raises(OSError, match="in use"):
            greedy.bind((address, port))
    met = [ray.remote(meet).options(num_cpus=0).remote(host, port, rank) for rank in range(2)]
    assert ray.get(met, timeout=120) == [3, 3]
    for rank in ranks:
        ray.kill(rank)


def test_chunks_are_contiguous_and_even():
    assert _chunks(list(range(5)), 3) == [[0, 1], [2, 3], [4]]
    assert _chunks([1], 3) == [[1], [], []]
