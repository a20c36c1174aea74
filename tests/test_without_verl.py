"""verl is an extra: nothing of ours but ``integrations.verl`` may need it, or even import it."""

from __future__ import annotations

import json
import pkgutil
import re
import subprocess
import sys

import rock_opd

VERLS = ("verl", "tensordict", "transfer_queue", "hydra")
IMPORT_ALL = """
import importlib, json, sys

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named '{{name}}'", name=name)

if {block!r}:
    sys.meta_path.insert(0, NotInstalled())
failed = {{}}
for module in {modules!r}:
    try:
        importlib.import_module(module)
    except ImportError as error:
        failed[module] = str(error)
loaded = sorted({{m.partition('.')[0] for m in sys.modules}} & set({names!r}))
print(json.dumps([failed, loaded]))
"""


def modules() -> list[str]:
    found = [m.name for m in pkgutil.walk_packages(rock_opd.__path__, "rock_opd.")]
    assert {"rock_opd.cli", "rock_opd.engines.deepspeed_student"} <= set(found)
    return [m for m in found if m not in ("rock_opd.__main__",)]


def imported(names: list[str], *, block: bool) -> tuple[dict[str, str], list[str]]:
    code = IMPORT_ALL.format(names=VERLS, block=block, modules=names)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    return tuple(json.loads(done.stdout.splitlines()[-1]))


def test_all_modules_import_where_verl_is_not_installed():
    ours = [m for m in modules() if not m.startswith("rock_opd.integrations.verl.")]
    failed, loaded = imported(ours, block=True)
    assert not failed and not loaded


def test_what_is_registered_with_verl_asks_for_it_by_name():
    """And only that: the plug-in's list and the check import without it."""
    failed, _ = imported(
        ["rock_opd.integrations.verl.plugin", "rock_opd.integrations.verl.check"], block=True
    )
    assert not failed
    failed, _ = imported(["rock_opd.integrations.verl.losses"], block=True)
    assert "No module named" in failed["rock_opd.integrations.verl.losses"]


def test_importing_all_of_rock_opd_never_imports_verl():
    ours = [m for m in modules() if not m.startswith("rock_opd.integrations.verl.")]
    failed, loaded = imported(ours, block=False)
    assert not failed and "verl" not in loaded and "transfer_queue" not in loaded


def test_verl_check_says_that_there_is_no_verl():
    """In one line: not installed, or, as here when it is, not to be imported."""
    code = IMPORT_ALL.format(names=VERLS, block=True, modules=[])
    code += "sys.argv = ['rock-opd', 'verl-check']\nimport rock_opd.cli\nrock_opd.cli.main()\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert re.fullmatch(
        "error: verl (is not installed: pip install 'rock-opd\\[verl\\]'|"
        "[0-9.]+ cannot be imported: No module named 'verl')\n",
        done.stderr,
    )
