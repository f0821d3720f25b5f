"""What every section of the configuration is."""

import msgspec


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A TOML table; unknown keys are errors."""
