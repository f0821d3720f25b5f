"""One cell of the matrix: a client on a wire, and what the scripted model answers it."""

import json
from collections.abc import Callable
from dataclasses import dataclass

from molt.agents.protocol import SessionCredentials
from molt.train.errors import MoltError
from molt.train.records.turn import Wire

NOTES, ANSWER = "notes.txt", "answer.txt"
SUM = "42"
FINAL_TEXT = f"The sum is in {ANSWER}."


class CellError(MoltError):
    """What a client did, or was given, is not what it should be."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The task for one client on one wire.

    `replies` are what the scripted model samples, in order. Every text that the model is shown must name the cell, for
    the script to know whom it answers: the prompt does, and the notes.
    """

    client: str
    wire: Wire
    mode: str = ""
    """`streamed` or `whole`; empty where the client decides."""
    replies: tuple[str, ...]
    drive: Callable[["Cell", SessionCredentials], None]
    """Has the client do the task. Whatever it raises fails the cell."""

    @property
    def name(self) -> str:
        """Unique in the matrix."""
        return "/".join(part for part in (self.client, self.wire, self.mode) if part)

    @property
    def prompt(self) -> str:
        """The task."""
        return f"[{self.name}] Read {NOTES}, then write the sum of its two numbers, and nothing else, to {ANSWER}."

    @property
    def notes(self) -> str:
        """What the file to read says."""
        return f"[{self.name}] The numbers are 17 and 25.\n"


def tool_call(tool: str, /, **arguments: str) -> str:
    """A call as Qwen3 and Hermes write it."""
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"
