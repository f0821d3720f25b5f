"""Every error that Molt's trainer raises on purpose.

    MoltError
    +-- ConfigError (ValueError)           bad input: one line that names the field, the value and the fix; exit code 2
    +-- RunError (RuntimeError)            the run cannot go on; exit code 1
    |   +-- ActorError                     an actor rank died or refused a step
    |   +-- StallError (TimeoutError)      a named wait passed its limit
    +-- EngineError (RuntimeError)         one generation failed
        +-- EngineDeadError                the engine is gone
        +-- EngineOverloadedError          the engine takes no more requests now
        +-- EngineRequestError             the engine cannot serve the request as it stands

All of them pickle, since they cross Ray.
"""


class MoltError(Exception):
    """Root of the errors that Molt raises on purpose."""


class ConfigError(MoltError, ValueError):
    """Bad input from the user. The message is one line: the field, the value, the fix."""


class RunError(MoltError, RuntimeError):
    """The run cannot go on."""


class ActorError(RunError):
    """An actor rank died or refused a step."""


class StallError(RunError, TimeoutError):
    """A named wait passed its limit."""


class EngineError(MoltError, RuntimeError):
    """One generation failed."""


class EngineDeadError(EngineError):
    """The engine process is gone; another engine, or a restarted one, can take the request."""


class EngineOverloadedError(EngineError):
    """The engine takes no more requests for now."""


class EngineRequestError(EngineError):
    """The request itself is at fault: no engine would serve it. `field` is that of EngineSampling or EngineRequest."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message, field)
        self.field = field

    def __str__(self) -> str:
        return str(self.args[0])
