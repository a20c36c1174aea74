"""What ``rock-opd check`` found: one line each, for people or as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from rock_opd.runlog import to_json

Level = Literal["ok", "info", "warn", "fail"]
SHOWN = {"ok": "ok", "info": "info", "warn": "warn", "fail": "FAIL"}


@dataclass(frozen=True)
class Finding:
    """One check: its first line says it all, the lines behind it show what was seen."""

    level: Level
    text: str
    facts: dict[str, float | int | str | None] = field(default_factory=dict)
    """The numbers in it, by name, for scripts."""

    def __str__(self) -> str:
        first, *rest = self.text.splitlines()
        return "\n".join([f"{SHOWN[self.level]:<5} {first}", *(f"      {line}" for line in rest)])


@dataclass
class CheckReport:
    """What was found, in order."""

    findings: list[Finding] = field(default_factory=list)
    show: Callable[[Finding], None] | None = None
    """Told each finding when it is made."""

    @property
    def lines(self) -> list[str]:
        return [str(finding) for finding in self.findings]

    @property
    def failed(self) -> bool:
        """Whether the recipe cannot run as it is."""
        return any(finding.level == "fail" for finding in self.findings)

    def add(self, level: Level, text: str, **facts: float | int | str | None) -> None:
        self.extend([Finding(level, text, facts)])

    def extend(self, findings: list[Finding]) -> None:
        self.findings += findings
        if self.show is not None:
            for finding in findings:
                self.show(finding)

    def to_json(self) -> str:
        """``failed`` and the findings, each with ``level``, ``text`` and its ``facts``."""
        rows = [{"level": f.level, "text": f.text, **f.facts} for f in self.findings]
        return json.dumps(
            to_json({"failed": self.failed, "findings": rows}), ensure_ascii=False, indent=1
        )
