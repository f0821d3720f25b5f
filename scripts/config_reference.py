"""Write docs/configuration.md from the configuration's own definitions: its types, defaults and docstrings.

uv run python scripts/config_reference.py
"""

import ast
import inspect
import itertools
import sys
import textwrap
from collections.abc import Iterator
from itertools import starmap
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

import msgspec

from molt.train.config import Config

TARGET = Path(__file__).parents[1] / "docs" / "configuration.md"
WIDTH = 120
TYPE_NAMES = {int: "integer", float: "number", str: "string", bool: "boolean"}
HEAD = """\
# Configuration

Every key of `molt-train server`, `run`, `sft` and `demo`, with its type, its default and its meaning. This page is made
from `packages/molt-train/src/molt/train/config` by `scripts/config_reference.py`; change it there.
[algorithms.md](algorithms.md) says what the keys of `[algorithm]` do and when to use them, [data.md](data.md) the same
of data sets, their order, staleness, filtering and oversampling.

A configuration is a TOML file, one table an owner. `model.path`, `run.dir` and `data.path` or `data.sets` must be
given, and for `molt-train run` `agent.path`; the demo fills all four in. After the file, the commands take overrides,
`key.path=value`, of which the last one wins; the value is read as TOML where it is TOML, else as text, so paths need no
quotes. Paths are relative to the working directory. A key whose default is None has another meaning when it is given;
TOML cannot write None, so leave it out. `algorithm.preset` sets keys of several tables, beneath those that are given.

Bad input ends a command with exit code 2 and one line, before anything is started. An unknown key names the nearest
known one; a value of the wrong type or out of range names the key, the value and what is expected. `server`, `run` and
`demo` refuse besides, since it would bias the learning or do nothing:

- `rollout.group_size` 1 with an estimator that compares the rollouts of a group;
- `rollout.top_p` below 1 with a correction: the engine's log-probs are then of another distribution than the actor's;
- `train.max_staleness` above 0 with `algorithm.correction` `none`;
- `rollout.sampling_policy` other than `enforce`;
- `algorithm.loss` `policy_gradient` with several steps a window, which has no ratio to correct the later ones, and
  `gspo` or `cispo` with one, where the ratio is always 1;
- bounds of a correction or a gate that leave out what an on-policy token or rollout has;
- keys that act only with others (`gamma`, `lam`, `[critic]`, clips, KL, teacher, lengths, gates) without those;
- `algorithm.updates_per_window` that does not divide `train.groups_per_update`;
- `path` and `sets` in one table, and sets that share a name;
- `train.drop_degenerate` with an estimator that does not compare groups;
- `server.host` that other machines can reach without `server.token`, or with one of fewer than 16 characters.
"""


def render() -> str:
    """The whole page."""
    return HEAD + "".join(starmap(_section, _tables(Config, Config(), "")))


def _tables(schema: type[msgspec.Struct], defaults: Any, path: str) -> Iterator[tuple[str, type[msgspec.Struct], Any]]:
    """Every table of a configuration: its heading, its struct, and its defaults where it has any. Outer ones first."""
    for field in msgspec.structs.fields(schema):
        value = getattr(defaults, field.name, None)
        if isinstance(value, msgspec.Struct):
            yield f"[{path}{field.name}]", type(value), value
            yield from _tables(type(value), value, f"{path}{field.name}.")
        elif item := _item_of(field.type):
            yield f"[[{path}{field.name}]]", item, None


def _item_of(field_type: Any) -> type[msgspec.Struct] | None:
    """The struct of which a key takes a list of tables."""
    item = next(iter(get_args(field_type)), None)
    return item if isinstance(item, type) and issubclass(item, msgspec.Struct) else None


def _section(heading: str, schema: type[msgspec.Struct], defaults: Any) -> str:
    meanings = field_docstrings(schema)
    entries = [
        _entry(f"{field.name} ({_type_name(field.type)}, {_default(field, defaults)})", meanings.get(field.name))
        for field in msgspec.structs.fields(schema)
        if not isinstance(getattr(defaults, field.name, None), msgspec.Struct) and not _item_of(field.type)
    ]
    return f"\n## `{heading}`\n\n{inspect.getdoc(schema)}\n\n" + "".join(entries)


def _default(field: msgspec.structs.FieldInfo, defaults: Any) -> str:
    if defaults is None and field.required:
        return "required"
    value = getattr(defaults, field.name) if defaults is not None else field.default
    if value is msgspec.NODEFAULT:
        value = field.default_factory()
    return f"default `{_toml(value)}`"


def _entry(head: str, meaning: str | None) -> str:
    name, rest = head.split(" ", 1)
    text = f"- `{name}` {rest}" + (f": {meaning}" if meaning else "")
    return textwrap.fill(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False) + "\n"


def field_docstrings(schema: type[msgspec.Struct]) -> dict[str, str]:
    """The string under each field of a struct in its module, on one line. A field without one is left out."""
    module = ast.parse(inspect.getsource(sys.modules[schema.__module__]))
    body = next(node.body for node in module.body if isinstance(node, ast.ClassDef) and node.name == schema.__name__)
    found: dict[str, str] = {}
    for statement, after in itertools.pairwise(body):
        match statement, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found


def _type_name(field_type: Any) -> str:
    if name := TYPE_NAMES.get(field_type):
        return name
    choices = get_args(field_type)
    if get_origin(field_type) is dict:
        return "table of strings"
    if NoneType in choices:
        return _type_name(choices[0])
    return "one of " + ", ".join(f"`{choice}`" if choice else '`""`' for choice in choices)


def _toml(value: Any) -> str:
    return "None" if value is None else msgspec.json.encode(value).decode()  # JSON is TOML here, but for null


if __name__ == "__main__":
    TARGET.write_text(render())
