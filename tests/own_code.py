"""A model that comes with Python code of its own, which leaves a mark when it runs."""

from __future__ import annotations

import json
from pathlib import Path


def with_own_code(source: Path, folder: Path) -> tuple[Path, Path]:
    """A copy of the model whose config and class are Python files beside it, and the file that
    they make when they run."""
    model, mark = folder / "own_code", folder / "mark"
    model.mkdir()
    for file in source.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    (model / "own.py").write_text(
        "from transformers import Qwen3Config, Qwen3ForCausalLM\n"
        f"open({str(mark)!r}, 'a').close()\n"
        "class OwnConfig(Qwen3Config):\n    model_type = 'own_qwen3'\n"
        "class OwnForCausalLM(Qwen3ForCausalLM):\n    config_class = OwnConfig\n"
    )
    config = json.loads((model / "config.json").read_text())
    config |= {
        "model_type": "own_qwen3",
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},
    }
    (model / "config.json").write_text(json.dumps(config))
    return model, mark
