"""From a TOML file and dotted overrides to a frozen config; unknown keys are errors that name the nearest known one."""

import difflib
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard, TypeVar, cast, get_args

import msgspec

from molt.train.config.presets import expand_preset
from molt.train.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)


def load_config(path: Path | None, overrides: Sequence[str], schema: type[T]) -> T:
    """Read `path` (TOML), apply `key.path=value` overrides, add `algorithm.preset`, and convert to `schema`.

    What the preset sets lies beneath the file and the overrides. Paths inside the file are relative to the file's
    folder only where the owner of the key says so; here nothing is resolved. Raises ConfigError with one line naming
    the key, the value and the fix.
    """
    table = _read_toml(path) if path is not None else {}
    for override in overrides:
        _apply(table, override)
    _refuse_unknown(table, schema, prefix="")
    expand_preset(table)
    try:
        return msgspec.convert(table, schema, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error), table)) from None


def to_toml(config: msgspec.Struct) -> str:
    """The resolved config as TOML that `load_config` reads back to an equal one. What is None is left out."""
    return "\n".join(_toml_table(msgspec.to_builtins(config), prefix="")) + "\n"


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"config file {str(path)!r} does not exist") from None
    except OSError as error:
        raise ConfigError(f"config file {str(path)!r} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {str(path)!r} is not TOML: {error}") from None


def _apply(table: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not all(key.split(".")):
        raise ConfigError(f"override {override!r} is not of the form key.path=value")
    *parents, leaf = key.split(".")
    for parent in parents:
        child = table.setdefault(parent, {})
        if not _is_table(child):
            raise ConfigError(f"override {override!r}: {parent!r} is a value, not a table")
        table = child
    table[leaf] = _parse_value(text)


def _parse_value(text: str) -> Any:
    """A TOML value where it is one, else the text itself, so that paths need no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _refuse_unknown(table: dict[str, Any], schema: type[msgspec.Struct], prefix: str) -> None:
    fields = {field.name: field.type for field in msgspec.structs.fields(schema)}
    for key, value in table.items():
        if key not in fields:
            path = _first_leaf(f"{prefix}{key}", value)
            near = difflib.get_close_matches(path, known_keys(schema, prefix), n=1, cutoff=0.0)
            raise ConfigError(f"unknown key {path!r}; the nearest known key is {near[0]!r}")
        child, item = fields[key], _item_type(fields[key])
        if isinstance(child, type) and issubclass(child, msgspec.Struct):
            if not _is_table(value):
                raise ConfigError(f"{prefix + key} is {value!r}; it must be a table of keys")
            _refuse_unknown(value, child, prefix=f"{prefix}{key}.")
        elif item is not None and isinstance(value, list):
            for number, entry in enumerate(cast("list[Any]", value)):
                if not _is_table(entry):
                    raise ConfigError(f"{prefix}{key}[{number}] is {entry!r}; it must be a table of keys")
                _refuse_unknown(entry, item, prefix=f"{prefix}{key}.")


def _item_type(kind: Any) -> type[msgspec.Struct] | None:
    """The struct of which a key takes a list of tables; None for any other key."""
    item = next(iter(get_args(kind)), None)
    return item if isinstance(item, type) and issubclass(item, msgspec.Struct) else None


def _first_leaf(path: str, value: Any) -> str:
    """The dotted path of the first value under `path`: a misspelt table is recognised by what is in it."""
    while _is_table(value) and value:
        key, value = next(iter(value.items()))
        path = f"{path}.{key}"
    return path


def known_keys(schema: type[msgspec.Struct], prefix: str = "") -> list[str]:
    """Every dotted leaf key of `schema`."""
    keys: list[str] = []
    for field in msgspec.structs.fields(schema):
        table = field.type if isinstance(field.type, type) else _item_type(field.type)
        if isinstance(table, type) and issubclass(table, msgspec.Struct):
            keys += known_keys(table, f"{prefix}{field.name}.")
        else:
            keys.append(f"{prefix}{field.name}")
    return keys


def _explain(message: str, table: dict[str, Any]) -> str:
    """Turn msgspec's "... - at `$.a.b`" into "a.b is VALUE: ..."."""
    text, _, where = message.partition(" - at `$")
    path = where.rstrip("`").lstrip(".")
    value: Any = table
    for key in re.findall(r"[^.\[\]]+", path):
        if isinstance(value, list):
            value = cast("list[Any]", value)[int(key)] if key.isdecimal() else None
        else:
            value = value.get(key) if _is_table(value) else None
    return f"{path} is {value!r}: {text[:1].lower()}{text[1:]}"


def _is_table(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _is_tables(value: object) -> TypeGuard[tuple[dict[str, Any], ...]]:
    """Whether it is a list of tables, as `msgspec.to_builtins` makes it of a tuple of structs."""
    return isinstance(value, tuple) and value != () and isinstance(value[0], dict)


def _toml_table(table: dict[str, Any], prefix: str) -> list[str]:
    leaves = [(key, value) for key, value in table.items() if not _is_table(value) and not _is_tables(value)]
    lines = [f"{key} = {_toml_value(value)}" for key, value in leaves if value is not None]  # TOML has no null
    for key, value in table.items():
        if _is_table(value):
            lines += ["", f"[{prefix}{key}]", *_toml_table(value, f"{prefix}{key}.")]
        elif _is_tables(value):
            for entry in value:
                lines += ["", f"[[{prefix}{key}]]", *_toml_table(entry, f"{prefix}{key}.")]
    return lines


def _toml_value(value: Any) -> str:
    # JSON strings, numbers, booleans and lists are TOML as they stand, but for DEL, which TOML wants escaped; nan and
    # inf do not occur in a valid config.
    return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")
