"""Stage 10, refit: what became of the engines' generations, and which version they serve now."""

import msgspec


class Interrupted(msgspec.Struct, frozen=True, kw_only=True):
    """Generations that new weights found under way, by what became of them."""

    held: int = 0
    """Went on after the update with what they had sampled."""
    anew: int = 0
    """Began again at their prompt, under the new version."""
    awaited: int = 0
    """Ended before the update began."""

    def __add__(self, other: "Interrupted") -> "Interrupted":
        return Interrupted(
            held=self.held + other.held, anew=self.anew + other.anew, awaited=self.awaited + other.awaited
        )


class RefitReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a refit did."""

    version: int
    """Of the weights that the actor holds."""
    sent: bool = True
    """False: they were older than what was asked for, and no engine was touched."""
    interrupted: Interrupted = Interrupted()
    """Over all engines."""
