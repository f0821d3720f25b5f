"""Every error that molt-agent raises on purpose.

MoltAgentError
+-- InfrastructureError (RuntimeError)            an agent raises it: the attempt ends as `infrastructure`
+-- InvalidResultError (ValueError)               an agent returned no valid Result: the attempt ends as `failed`
+-- InputError (ValueError)                       bad input: one line, exit code 2
|   +-- AgentLoadError                            the agent module cannot be loaded
|   +-- TaskError                                 a task row is malformed
|   +-- NoGraderError                             an answer is to be graded, and the agent has no `grade`
+-- ServerError (RuntimeError)                    an HTTP endpoint refused a request, or answered nonsense
    +-- ServerUnavailableError (ConnectionError)  it gave no usable answer for longer than the limit
    +-- AuthenticationError                       it refused the token
    +-- FencedError                               the attempt is no longer this worker's; its result does not count
"""


class MoltAgentError(Exception):
    """Root of the errors that molt-agent raises on purpose."""


class InfrastructureError(MoltAgentError, RuntimeError):
    """Raise it from an agent whose sandbox, network or tool host broke: no fault of the policy.

    The attempt is reported as `infrastructure`, which a trainer may run again and never counts as a bad reward.
    """


class InvalidResultError(MoltAgentError, ValueError):
    """What the agent returned is no Result, or its reward, score or info cannot be used."""


class InputError(MoltAgentError, ValueError):
    """Bad input from the user. The message is one line: what, where, and the fix."""


class AgentLoadError(InputError):
    """The agent module is missing, fails to import, or exports no usable `AgentRunner`."""


class TaskError(InputError):
    """A task row is no JSON object, or a field of it has the wrong shape."""


class NoGraderError(InputError):
    """An answer is to be graded by an agent that has no `grade`."""


class ServerError(MoltAgentError, RuntimeError):
    """An HTTP endpoint refused a request, or its answer could not be read.

    Attributes:
        status: The HTTP status; None when there was no answer.
        code: The `code` or `type` of the endpoint's error body, where it has one.
    """

    def __init__(self, message: str, *, status: int | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class ServerUnavailableError(ServerError, ConnectionError):
    """No usable answer within the named limit: connection refused or cut, time-outs, 429 or 5xx."""


class AuthenticationError(ServerError):
    """The endpoint refused the bearer token (401 or 403)."""


class FencedError(ServerError):
    """The attempt no longer belongs to this worker (409): another one runs it, or the run is over."""
