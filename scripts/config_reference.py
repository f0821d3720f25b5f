"""Write docs/configuration.md from the configuration's own definitions: its types, defaults and docstrings.

uv run python scripts/config_reference.py
"""

import ast
import inspect
import itertools
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec

from molt.train.config import Config, sections

TARGET = Path(__file__).parents[1] / "docs" / "configuration.md"
WIDTH = 120
TYPE_NAMES = {int: "integer", float: "number", str: "string", bool: "boolean"}
HEAD = """\
# Configuration

Every key of `molt-train server`, `run`, `sft` and `demo`, with its type, its default and its meaning. This page is made
from `packages/molt-train/src/molt/train/config/sections.py` by `scripts/config_reference.py`; change it there.

A configuration is a TOML file, one table an owner. `model.path`, `data.path` and `run.dir` must be given, and for
`molt-train run` `agent.path`; the demo fills all four in. After the file, the commands take overrides,
`key.path=value`, of which the last one wins; the value is read as TOML where it is TOML, else as text, so paths need no
quotes. Paths are relative to the working directory.

Bad input ends a command with exit code 2 and one line, before anything is started. An unknown key names the nearest
known one; a value of the wrong type or out of range names the key, the value and what is expected. `server`, `run` and
`demo` refuse besides, since it would bias the learning or do nothing:

- `rollout.group_size` 1 with an estimator that compares the rollouts of a group;
- `rollout.top_p` below 1 with a correction: the engine's log-probs are then of another distribution than the actor's;
- `train.max_staleness` above 0 with `algorithm.correction` `none`;
- `rollout.sampling_policy` other than `enforce`;
- `algorithm.gamma` other than 1 with an estimator that discounts nothing;
- other bounds of the PPO clip with `algorithm.updates_per_window` 1, where the ratio is always 1;
- `algorithm.updates_per_window` that does not divide `train.groups_per_update`;
- `server.host` that other machines can reach without `server.token`, or with one of fewer than 16 characters.
"""


def render() -> str:
    """The whole page."""
    return HEAD + "".join(_section(path, schema) for path, schema in _tables(Config, ""))


def _tables(schema: type[msgspec.Struct], path: str) -> Iterator[tuple[str, type[msgspec.Struct]]]:
    """Every table of `schema` with its dotted name, outer ones first."""
    for field in msgspec.structs.fields(schema):
        if _is_table(field.type):
            name = f"{path}{field.name}"
            yield name, field.type
            yield from _tables(field.type, f"{name}.")


def _section(path: str, schema: type[msgspec.Struct]) -> str:
    meanings = field_docstrings(schema)
    entries = [
        _entry(f"{field.name} ({_type_name(field.type)}, default `{_toml(field.default)}`)", meanings.get(field.name))
        for field in msgspec.structs.fields(schema)
        if not _is_table(field.type)
    ]
    return f"\n## `[{path}]`\n\n{inspect.getdoc(schema)}\n\n" + "".join(entries)


def _entry(head: str, meaning: str | None) -> str:
    name, rest = head.split(" ", 1)
    text = f"- `{name}` {rest}" + (f": {meaning}" if meaning else "")
    return textwrap.fill(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False) + "\n"


def field_docstrings(schema: type[msgspec.Struct]) -> dict[str, str]:
    """The string under each field of a struct in `sections.py`, on one line. A field without one is left out."""
    module = ast.parse(inspect.getsource(sections))
    body = next(node.body for node in module.body if isinstance(node, ast.ClassDef) and node.name == schema.__name__)
    found: dict[str, str] = {}
    for statement, after in itertools.pairwise(body):
        match statement, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found


def _is_table(field_type: Any) -> bool:
    return isinstance(field_type, type) and issubclass(field_type, msgspec.Struct)


def _type_name(field_type: Any) -> str:
    return TYPE_NAMES.get(field_type) or "one of " + ", ".join(f"`{choice}`" for choice in get_args(field_type))


def _toml(value: Any) -> str:
    return msgspec.json.encode(value).decode()  # of strings, numbers and booleans JSON is TOML


if __name__ == "__main__":
    TARGET.write_text(render())
