"""Everything of bad input that is known, area by area; ``docs/troubleshooting.md`` shows it."""

from __future__ import annotations

import bad_datasets
import bad_files
import bad_models
import bad_recipes
from case import Case

CASES: list[Case] = [
    *bad_recipes.CASES,
    *bad_datasets.CASES,
    *bad_models.CASES,
    *bad_files.CASES,
]
