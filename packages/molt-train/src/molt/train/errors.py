"""Every error that Molt's trainer raises on purpose.

    MoltError
    +-- ConfigError (ValueError)           bad input: one line that names the field, the value and the fix; exit code 2
    +-- RunError (RuntimeError)            the run cannot go on; exit code 1
    |   +-- ActorError                     an actor rank failed or refused a step
    |   |   +-- ActorDeadError             a rank is gone, or does not answer: new ranks can go on from a checkpoint
    |   +-- StallError (TimeoutError)      a named wait passed its limit
    |   +-- RunStoppedError                somebody told it to stop
    |   +-- LedgerFullError                a write of the ledger found no room, and changed nothing
    |   +-- PayloadDamagedError            what the ledger names is not in its payload file
    +-- DataExhausted                      `data.epochs` are used up: the training is done
    +-- PayloadLostError (LookupError)     what a row is made of is gone; the ledger can make it again
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
    """An actor rank failed or refused a step."""


class ActorDeadError(ActorError):
    """A rank's process is gone, or does not answer; new ranks can go on from the last checkpoint."""


class StallError(RunError, TimeoutError):
    """A named wait passed its limit."""


class RunStoppedError(RunError):
    """The run was told to stop; it can be gone on with."""


class DataExhausted(MoltError):  # noqa: N818 - it ends a run, but nothing went wrong
    """There are no more tasks to train on: `data.epochs` are used up."""


class PayloadLostError(MoltError, LookupError):
    """The payload of an experience is gone from the object store; the ledger can make it again."""


class LedgerFullError(RunError):
    """A write of the ledger found no room on the disk. Nothing has changed, and it may be tried again."""


class PayloadDamagedError(RunError):
    """A record in a payload file of the ledger is cut, overwritten or gone. The message names file and offset."""


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
