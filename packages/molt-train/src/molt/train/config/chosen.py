"""Which keys of a configuration somebody chose: those that differ from what their preset, or nothing at all, gives."""

from typing import Any

import msgspec

from molt.train.config.presets import expand_preset
from molt.train.config.sections import Config


def chosen_keys(config: Config) -> dict[str, Any]:
    """Every dotted key whose value is neither the default nor its preset's, with the value.

    A run folder's configuration has every key written out, so this cannot go by what was written.
    """
    table: dict[str, Any] = {"algorithm": {"preset": config.algorithm.preset}}
    expand_preset(table)
    plain, preset = leaf_values(Config()), leaf_values(msgspec.convert(table, Config))
    return {key: value for key, value in leaf_values(config).items() if value not in (plain[key], preset[key])}


def leaf_values(section: msgspec.Struct, prefix: str = "") -> dict[str, Any]:
    """Every value under its dotted key."""
    found: dict[str, Any] = {}
    for field in msgspec.structs.fields(section):
        value = getattr(section, field.name)
        if isinstance(value, msgspec.Struct):
            found |= leaf_values(value, f"{prefix}{field.name}.")
        else:
            found[prefix + field.name] = value
    return found
