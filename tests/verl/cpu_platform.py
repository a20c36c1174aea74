"""A CPU platform for verl's device layer, for tests only: verl 0.9 has cuda, npu and rocm.

Loaded by name (``VERL_USE_EXTERNAL_MODULES=cpu_platform VERL_PLATFORM=rock_cpu``, with this folder
on ``PYTHONPATH``: see ``conftest``), never found by verl's detection. Can go once verl itself
runs its training workers on CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


class _CpuModule(ModuleType):
    """``torch.cpu`` with the answers that verl asks ``torch.cuda`` for."""

    def __init__(self) -> None:
        super().__init__("rock_cpu_device")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def get_device_name(self, device: object = None) -> str:
        return "CPU"

    def memory_allocated(self, device: object = None) -> int:
        return 0

    max_memory_allocated = max_memory_reserved = memory_reserved = memory_allocated

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        return 0, 0

    def empty_cache(self) -> None:
        pass

    ipc_collect = reset_peak_memory_stats = empty_cache

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        torch.set_rng_state(state)


_MODULE = _CpuModule()


@PlatformRegistry.register(platform="rock_cpu")
class PlatformCpu(PlatformBase):
    device_name = "cpu"
    vendor_name = "rock_cpu"
    device_module = _MODULE

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False  # what detection asks

    def current_device(self) -> str:
        return "cpu"  # an index would mean a CUDA device to ``Tensor.to``

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: object) -> None:
        pass

    def synchronize(self, device_index: object = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "ROCK_CPU_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
