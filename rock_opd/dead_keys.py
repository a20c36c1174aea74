"""Keys that a recipe sets and its run never reads: what was meant by them does not happen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any

from rock_opd.config import PolicyConfig, Recipe

_EVERY = {field.name for field in fields(PolicyConfig)}
_FREEZES = {"lam", "audit_share", "guard_file", "guard_special", "window_radius"}
READ_BY = {
    "all": {"name", "decay"},
    "list": {"name", "decay", "ids_file", "window_threshold", *_FREEZES},
    "rock_freeze": _EVERY - {"ids_file", "control_may_use_dropped"},
    "random_matched": _EVERY - {"ids_file"},
}
"""Policy -> the keys of ``policy`` that decide what trains (``decay``: what the registry says)."""
CONDITIONS: dict[str, tuple[Callable[[PolicyConfig], bool], str]] = {
    "window_threshold": (lambda p: p.window_radius > 0, "policy.window_radius=0"),
    "audit_share": (lambda p: p.lam == 0, "policy.lam above 0, where frozen tokens are measured"),
    "control_may_use_dropped": (
        lambda p: p.drop_most_frequent > 0,
        "policy.drop_most_frequent=0",
    ),
}
"""Key -> when it is read, by a policy that may read it, and what it is when it is not."""


def dead_keys(recipe: Recipe) -> list[str]:
    """One line for each reason why keys that differ from their defaults are not read, naming
    them."""
    policy = recipe.policy
    changed = _changed(policy)
    unread = [key for key in changed if key not in READ_BY[policy.name]]
    lines = []
    if unread:
        lines.append(
            f"policy.name={policy.name} does not read {_listed('policy', policy, unread)}: they "
            "decide nothing in this run (rocks, cutoff and study may read them)"
        )
    for key, (is_read, reason) in CONDITIONS.items():
        if key in changed and key not in unread and not is_read(policy):
            lines.append(f"{_listed('policy', policy, [key])} is not read with {reason}")
    probed = _changed(recipe.probe)
    if probed and not recipe.uses_probe:
        lines.append(
            f"no probe set is kept with policy.name={policy.name} and policy.score={policy.score}, "
            f"so {_listed('probe', recipe.probe, probed)} decide nothing in this run"
        )
    return lines


def _changed(section: Any) -> list[str]:
    assert all(field.default is not MISSING for field in fields(section))
    return [f.name for f in fields(section) if getattr(section, f.name) != f.default]


def _listed(name: str, section: Any, keys: list[str]) -> str:
    return ", ".join(f"{name}.{key}={getattr(section, key)}" for key in keys)
