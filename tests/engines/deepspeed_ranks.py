"""Student ranks in processes of their own, shared by the tests.

``ranks(world_size)`` gives the group; ``call`` runs a method of ``Rank`` on every rank at once. Run
as a script, this file is one rank.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import pickle
import socket
import subprocess
import sys
import time
from functools import cache
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

ANSWER_S = 240
REPOSITORY = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class RankFailure(Exception):
    """What the ranks raised: ``errors`` has one exception, or None, per rank."""

    def __init__(self, errors: list[Exception | None]) -> None:
        super().__init__(str(errors))
        self.errors = errors


class Ranks:
    """A process group of student ranks."""

    def __init__(self, world_size: int, *, timeout_s: float = 60.0, device: str = "cpu") -> None:
        port = free_port()
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
        self.world_size, self.processes, self.connections = world_size, [], []
        for rank in range(world_size):
            with Listener(("127.0.0.1", 0), authkey=b"ranks") as listener:
                arguments = [listener.address[1], rank, world_size, port, timeout_s, device]
                self.processes.append(
                    subprocess.Popen([sys.executable, __file__, *map(str, arguments)], env=env)
                )
                self.connections.append(listener.accept())

    def send(self, rank: int, method: str, *args: Any, **kwargs: Any) -> None:
        self.connections[rank].send_bytes(pickle.dumps((method, args, kwargs)))

    def answer(self, rank: int) -> tuple[Any, Exception | None]:
        if not self.connections[rank].poll(ANSWER_S):
            raise TimeoutError(f"rank {rank} of {self.world_size} did not answer in {ANSWER_S} s")
        return pickle.loads(self.connections[rank].recv_bytes())

    def call(self, method: str, *args: Any, each: list[tuple] | None = None, **kwargs: Any) -> list:
        """Runs it on every rank with the same arguments, or with ``each[rank]`` behind them."""
        for rank in range(self.world_size):
            self.send(rank, method, *args, *(each[rank] if each else ()), **kwargs)
        answers = [self.answer(rank) for rank in range(self.world_size)]
        if any(error for _, error in answers):
            raise RankFailure([error for _, error in answers])
        return [value for value, _ in answers]

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.terminate()
            process.wait(20)


@cache
def ranks(world_size: int, device: str = "cpu") -> Ranks:
    group = Ranks(world_size, device=device)
    atexit.register(group.close)
    return group


class Rank:
    """What a rank can be asked to do: mostly, to call its engine."""

    def __init__(
        self, rank: int, world_size: int, port: int, timeout_s: float, device: str
    ) -> None:
        self._place = {
            "rank": rank,
            "world_size": world_size,
            "local_rank": 0,
            "master_addr": "127.0.0.1",
            "master_port": port,
            "device": device,
            "timeout_s": timeout_s,
        }
        self.engine: Any = None

    def build(self, model: str, *, teacher_head=None, **settings: Any) -> None:
        """A new engine in place of the old one; settings by their recipe field."""
        from rock_opd.config import LossConfig, OptimConfig, StudentConfig
        from rock_opd.engines.deepspeed_student import StudentEngine

        def part(cls: type, **fixed: Any) -> Any:
            names = {field.name for field in dataclasses.fields(cls)}
            return cls(**{k: settings.pop(k) for k in list(settings) if k in names}, **fixed)

        arguments = {"dtype": "float32", "num_updates": 10, "num_real_ids": 1024, "seed": 0}
        for name in arguments:
            arguments[name] = settings.pop(name, arguments[name])
        student = part(StudentConfig, model=model)
        optim, loss = part(OptimConfig), part(LossConfig)
        assert not settings, settings
        self.engine = None
        self.engine = StudentEngine(
            student, optim, loss, model=model, teacher_head=teacher_head, **arguments, **self._place
        )
        self._layer_calls = 0
        self.engine._hf_model.model.layers[0].register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self._layer_calls += 1

    def layer_calls(self) -> int:
        """Forwards of the first layer since the engine was built."""
        return self._layer_calls

    def train_step(self, *args: Any, **kwargs: Any):
        return self.engine.train_step(*args, **kwargs)

    def measure(self, *args: Any, **kwargs: Any):
        return self.engine.measure(*args, **kwargs)

    def gradients(self, parts: list, num_rows: int, limits: dict):
        """Of the types of all rows; ``parts`` are (batches, teacher rows) of one ``keep`` each."""
        rows = self.engine.gradient_rows(num_rows, **limits)
        for batches, teacher in parts:
            rows.keep(batches, teacher)
        for index in range(rows.begin()):
            rows.step(index)
        return rows.result()

    def save_hf(self, path: str, *shard_bytes: int, background: bool = False) -> None:
        self.engine.save_hf(path, *shard_bytes, background=background)

    def save_state(self, path: str, *, background: bool = False) -> None:
        self.engine.save_state(path, background=background)

    def written(self, path: str) -> dict | None:
        return self.engine.written(path)

    def held(self) -> list[tuple]:
        """Every range of float32 weights and moments on this rank: kind, name, start, values."""
        return [
            (kind, part.name, part.start, tensor.cpu().clone())
            for part in self.engine._parts()
            for kind, tensor in part.tensors.items()
        ]

    def load_state(self, path: str) -> None:
        self.engine.load_state(path)

    def counters(self) -> tuple[int, int]:
        return self.engine.policy_version, self.engine.num_updates_done

    def weights(self, max_bytes: int = 1 << 30) -> list[dict]:
        """The buckets, as given out."""
        return [
            {name: tensor.cpu().clone() for name, tensor in bucket}
            for bucket in self.engine.weight_buckets(max_bytes)
        ]

    def gathered(self, max_bytes: int) -> tuple[dict, list]:
        """What this rank can hand over on its own device, and the list that announces it."""
        given = self.engine.gathered_weights(max_bytes)
        return {name: tensor.cpu().clone() for name, tensor in given}, self.engine.param_infos()

    def first_moments(self) -> dict:
        """Adam's first moment of every parameter: with beta 0, the gradient of the last step."""
        from deepspeed.utils import safe_get_full_optimizer_state

        engine = self.engine._engine
        out = {}
        for name, parameter in self.engine._hf_model.named_parameters():
            if engine.zero_optimization_stage() == 0:
                moment = engine.optimizer.state[parameter]["exp_avg"]
            else:
                moment = safe_get_full_optimizer_state(parameter, "exp_avg")
            out[name] = (
                moment.detach().cpu().clone().reshape(getattr(parameter, "ds_shape", moment.shape))
            )
        return out

    def buffer_dtypes(self) -> set:
        return {buffer.dtype for buffer in self.engine._hf_model.buffers()}

    def leave_and_come_back(self) -> None:
        """What ``offload`` and ``reload`` do on a GPU, where device memory is real."""
        self.engine._leave_device()
        self.engine._return_to_device()

    def train_step_waiting_for_rows(self, batches: list, seconds: float) -> None:
        """A step whose teacher does not hand over the rows."""

        def rows():
            time.sleep(seconds)
            yield None

        self.engine.train_step(batches, rows(), total_weight=72.0, mask_version=0)

    def memory(self) -> tuple[int, int]:
        """Parameters that would get a gradient, and whether DeepSpeed's engine was built."""
        trained = [p for p in self.engine._hf_model.parameters() if p.requires_grad]
        return len(trained), hasattr(self.engine._engine, "optimizer")

    def exit(self) -> None:
        os._exit(1)


def main() -> None:
    address, rank, world_size, port = (int(x) for x in sys.argv[1:5])
    served = Rank(rank, world_size, port, float(sys.argv[5]), sys.argv[6])
    with Client(("127.0.0.1", address), authkey=b"ranks") as connection:
        while True:
            try:
                method, args, kwargs = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            try:
                answer = (getattr(served, method)(*args, **kwargs), None)
            except Exception as error:
                try:
                    pickle.loads(pickle.dumps(error))
                except Exception:
                    error = RuntimeError(f"{type(error).__name__}: {error}")
                answer = (None, error)
            connection.send_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    main()
