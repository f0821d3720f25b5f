"""Where things lie on this machine."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """What can be made again, kept between runs: `$XDG_CACHE_HOME/molt`, `~/.cache/molt` by default."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "molt"
