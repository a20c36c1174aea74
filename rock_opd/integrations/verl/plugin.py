"""What verl loads of us, from the entry-point group ``verl.plugins``: the list of what we give it.

Importing this module registers everything, because loading an entry point is all verl does. It
imports neither verl nor torch: each part is registered when verl imports the module that holds its
registry, so that a process which only wants ``verl.DataProto`` pays nothing, and no device is
looked for before verl does it.

Refuses to stay silent. verl drops a failing plug-in into a debug log (0.9.1, ``verl/__init__.py``),
so what could not be registered is warned of here and kept in ``FAILED`` for ``rock-opd
verl-check``; verl goes on without it.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from rock_opd.errors import ConfigError, RockOPDError

SUPPORTED_VERL = ">=0.9,<0.10"
"""Versions whose plug-in points we were written against; the same as in the extra ``verl``."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One thing that verl gets from us."""

    name: str
    registry: str
    """verl's module that holds the registry; the part is registered when this is imported."""
    module: str
    """Ours: its ``register()`` fills the registry; it ends with ``plugin.complete(__name__)``."""
    names: tuple[str, ...]
    """What verl then knows, as ``rock-opd verl-check`` looks it up."""
    needs: tuple[str, ...] = ()
    """Modules that must be installed beside verl."""


PARTS = (
    Part(
        name="losses",
        registry="verl.trainer.distillation.losses",
        module="rock_opd.integrations.verl.losses",
        names=(
            *("rock_k1", "rock_k2", "rock_k3", "rock_forward_kl_topk"),
            *("rock_reverse_kl_topk", "rock_reverse_kl_topk_renorm"),
        ),
    ),
    Part(
        name="engine",
        registry="verl.workers.engine",
        module="rock_opd.integrations.verl.engine",
        names=("deepspeed on cuda", "deepspeed on cpu"),
        needs=("deepspeed",),
    ),
    Part(
        name="trainer",
        registry="verl.trainer.ppo.v1.trainer_base",
        module="rock_opd.integrations.verl.trainer",
        names=("rock_opd",),
    ),
    Part(
        name="stock trainer",
        registry="verl.trainer.ppo.v1.trainer_sync",
        module="rock_opd.integrations.verl.stock",
        names=("rock_opd_sync",),
    ),
)

FAILED: dict[str, str] = {}
"""Part -> why it was not registered, in this process."""
REGISTERED: list[str] = []
"""Parts registered so far in this process."""
_WAITING: list[Part] = []
"""Parts whose registry is there and whose own module is not yet executed to its end."""

_logger = logging.getLogger(__name__)


def check_verl_version() -> str:
    """The installed version of verl.

    Raises:
        ConfigError: none, or one outside ``SUPPORTED_VERL``.
    """
    try:
        found = version("verl")
    except PackageNotFoundError:
        raise ConfigError("verl is not installed: pip install 'rock-opd[verl]'") from None
    from packaging.specifiers import SpecifierSet  # verl itself needs packaging

    if not SpecifierSet(SUPPORTED_VERL).contains(found, prereleases=True):
        raise ConfigError(
            f"verl {found} is installed, rock_opd's plug-in was written against verl "
            f"{SUPPORTED_VERL}: pip install 'verl{SUPPORTED_VERL}'"
        )
    return found


class _AfterImport(MetaPathFinder):
    """Calls back once a module has been executed, and is otherwise not there."""

    def __init__(self, callbacks: dict[str, Callable[[], None]]) -> None:
        self._callbacks = callbacks

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        callback = self._callbacks.pop(name, None)
        if callback is None:
            return None
        spec = importlib.util.find_spec(name)  # by the other finders: this one has no more of it
        if spec is not None and spec.loader is not None:
            # The loader serves this one module; its type and its other methods stay as they are.
            spec.loader.exec_module = partial(_execute, spec.loader.exec_module, callback)
        return spec


def _execute(
    exec_module: Callable[[ModuleType], None], callback: Callable[[], None], module: ModuleType
) -> None:
    exec_module(module)
    callback()


def complete(module: str) -> None:
    """Told by a part's module at its end: when that module is the first to import verl, its
    registry comes while it has no ``register`` yet."""
    for part in [part for part in _WAITING if part.module == module]:
        _WAITING.remove(part)
        _register(part)


def _begun(module: str) -> bool:
    """Whether the module is being executed just now."""
    spec = getattr(sys.modules.get(module), "__spec__", None)
    return getattr(spec, "_initializing", False)


def _on_registry(part: Part) -> None:
    if _begun(part.module):
        _WAITING.append(part)
    else:
        _register(part)


def _register(part: Part) -> None:
    """Registers one part; what goes wrong is told and kept, and verl's own import goes on."""
    try:
        for needed in part.needs:
            if importlib.util.find_spec(needed) is None:
                raise ConfigError(
                    f"{needed} is not installed: pip install {needed} (the extras [cpu] and [gpu] "
                    "of rock_opd have it)"
                )
        importlib.import_module(part.module).register()
    except RockOPDError as error:
        _fail(part, str(error))
    except Exception as error:  # whatever it is, people who do not use the part need not stop
        _fail(part, f"{type(error).__name__}: {error}")
    else:
        REGISTERED.append(part.name)


def _fail(part: Part, reason: str) -> None:
    FAILED[part.name] = reason
    _logger.warning("rock_opd registered no %s with verl: %s", part.name, reason)


def _install() -> None:
    try:
        check_verl_version()
    except ConfigError as error:
        for part in PARTS:
            _fail(part, str(error))
        return
    callbacks: dict[str, Callable[[], None]] = {}
    for part in PARTS:
        if part.registry in sys.modules and not _begun(part.registry):
            _on_registry(part)
        else:
            callbacks[part.registry] = partial(_on_registry, part)
    sys.meta_path.insert(0, _AfterImport(callbacks))


_install()
