"""docs/configuration.md is what scripts/config_reference.py makes of the configuration."""

import runpy
from pathlib import Path

from molt.train.config import Config, known_keys

ROOT = Path(__file__).parents[4]
REFERENCE = runpy.run_path(str(ROOT / "scripts" / "config_reference.py"))
PAGE = (ROOT / "docs" / "configuration.md").read_text()


def test_the_page_is_up_to_date():
    assert REFERENCE["render"]() == PAGE, "run `uv run python scripts/config_reference.py`"


def test_every_key_is_there_under_its_table_with_a_meaning():
    tables = {}
    for part in PAGE.split("\n## ")[1:]:
        title, _, body = part.partition("\n")
        tables[title.strip("`[]")] = body
    for key in known_keys(Config):
        table, _, name = key.rpartition(".")
        entry = next(item for item in tables[table].split("\n- ") if item.startswith(f"`{name}` ("))
        assert "): " in entry, f"{key} has no docstring in config/sections.py"
