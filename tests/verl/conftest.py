"""verl on CPU for this folder: its environment is set before anything imports verl."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))
os.environ.update(
    VERL_PLATFORM="rock_cpu",
    VERL_USE_EXTERNAL_MODULES="cpu_platform",
    VERL_ENGINE_DEVICE="cuda",  # verl 0.9 registers its FSDP engines for cuda and npu only
)


@pytest.fixture(scope="session")
def verl_ray():
    """A Ray of our own whose workers find ``cpu_platform`` and ``hosts``, and a TransferQueue."""
    import ray

    patch = pytest.MonkeyPatch()
    known = os.environ.get("PYTHONPATH")
    patch.setenv("PYTHONPATH", os.pathsep.join([str(FOLDER), *([known] if known else [])]))
    # A place is not a process: on a small machine processes come when they are asked for.
    patch.setenv("RAY_prestart_worker_first_driver", "0")
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        object_store_memory=2 * 10**8,
        log_to_driver=False,
    )
    yield ray
    ray.shutdown()
    patch.undo()
