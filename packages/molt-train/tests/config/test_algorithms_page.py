"""docs/algorithms.md names everything there is, and every configuration that it shows is sound."""

import re
import tomllib
from pathlib import Path
from typing import get_args

import pytest

from molt.train.config import ESTIMATORS, AlgorithmConfig, Config, check, correction_rule, known_keys, load_config
from molt.train.config.algorithm import Correction, Preset
from molt.train.config.presets import PRESETS

DOCS = Path(__file__).parents[4] / "docs"
PAGE = (DOCS / "algorithms.md").read_text()
EXAMPLE = DOCS / "examples" / "custom_estimator.py"
SHOWN = re.findall(r"^```toml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def choices(field):
    return [choice for choice in get_args(AlgorithmConfig.__annotations__[field]) if choice not in ("", "none")]


def section(title):
    return next(part for part in PAGE.split("\n## ") if part.startswith(f"{title}\n"))


@pytest.mark.parametrize("block", SHOWN)
def test_a_configuration_that_is_shown_is_sound(block, tmp_path):
    path = tmp_path / "shown.toml"
    path.write_text(block)
    config = load_config(path, [], Config)
    check(config)
    assert tomllib.loads(block), "it says something"


@pytest.mark.parametrize(("title", "names"), [("Estimators", ESTIMATORS), ("Losses", choices("loss"))])
def test_every_estimator_and_loss_has_a_section_with_formula_source_and_configuration(title, names):
    sections = section(title).split("\n### ")[1:]
    for name in names:
        body = next(part for part in sections if part.startswith(f"`{name}`\n"))
        assert re.search(r"^    \S", body, re.MULTILINE), f"{name} has no formula"
        assert re.search(r"arxiv\.org|Williams 1992|github\.com", body), f"{name} has no source"
        assert f'{"estimator" if title == "Estimators" else "loss"} = "{name}"' in body


@pytest.mark.parametrize(
    ("title", "names"),
    [
        ("Aggregation", choices("aggregation")),
        ("Corrections", get_args(Correction)),
        ("Presets", [name for name in get_args(Preset) if name]),
    ],
)
def test_every_aggregation_correction_and_preset_has_a_row(title, names):
    rows = re.findall(r"^\| `([^`]+)` \|", section(title), re.MULTILINE)
    assert [row for row in rows if row != title.lower().rstrip("s")] == list(names)


@pytest.mark.parametrize("field", ["correction_level", "correction_mode", "gate"])
def test_every_part_of_a_correction_is_explained(field):
    assert all(f"`{choice}`" in section("Corrections") for choice in choices(field))


def test_the_table_of_presets_is_what_they_set():
    table = section("Presets").partition("\n| `preset`")[2].splitlines()
    rows = {cells[0].strip("` "): cells[1:] for cells in (line.strip("|").split("|") for line in table if "`" in line)}
    for name in PRESETS:
        algorithm = load_config(None, [f"algorithm.preset={name}"], Config).algorithm
        estimator, loss, aggregation, steps = [cell.strip() for cell in rows[name][:4]]
        assert estimator.startswith(f"`{algorithm.estimator}`")
        assert loss.startswith(f"`{algorithm.loss}`")
        assert (aggregation, steps) == (f"`{algorithm.aggregation}`", str(algorithm.updates_per_window))


def test_the_bounds_in_the_table_of_corrections_are_the_rules():
    rows = {line.split("`")[1]: line for line in section("Corrections").splitlines() if line.startswith("| `")}
    for name in ("tis", "icepop", "seq-mask-tis", "mis", "k3-gate", "decoupled-ppo"):
        rule = correction_rule(AlgorithmConfig(correction=name))
        assert f"{rule.level}, {rule.mode}" in rows[name]
        assert f"{rule.high:g}" in rows[name]
        assert rule.gate == "none" or f"{rule.gate}, " in rows[name]


def test_keys_that_the_page_names_exist():
    keys = set(known_keys(Config))
    tables = {key.partition(".")[0] for key in keys}
    named = {name for name in re.findall(r"`([a-z_]+\.[a-z_.]+)`", PAGE) if name.partition(".")[0] in tables}
    assert named
    assert named <= keys


def test_the_example_is_on_the_page_as_it_is_and_short():
    assert f"```python\n{EXAMPLE.read_text()}```" in PAGE
    assert len(EXAMPLE.read_text().splitlines()) <= 40
