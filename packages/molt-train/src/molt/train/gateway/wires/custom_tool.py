"""OpenAI's custom tools, which take free text: offered as a function of one string, and read back as the text."""

import json
import re
from typing import Any

INPUT = "input"
"""Name of the one argument."""

_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_DECIDED = re.compile(r"[^:]*:\s*\S")
"""Arguments that read this far and are no opening are no custom input."""
_UNITS = re.compile(
    r"""(?: [^"\\]
          | \\ ["\\/bfnrt]
          | \\u (?![dD][89abAB]) [0-9a-fA-F]{4}
          | \\u [dD][89abAB][0-9a-fA-F]{2}
            (?: \\u[dD][c-fC-F][0-9a-fA-F]{2} | (?= [^\\] | \\[^u] | \\u[0-9a-fA-F]{4} ) )
        )*""",
    re.VERBOSE,
)
"""As much of a JSON string as later text cannot change. The halves of a character beyond U+FFFF stay together."""


def as_function(name: str, description: str | None) -> dict[str, Any]:
    """The function schema under which a template offers a custom tool."""
    parameters = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
    described = {} if description is None else {"description": description}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters}}


class CustomInput:
    """The text that a custom tool is given, read while its arguments come.

    Arguments that are no object beginning with `input` are the text themselves.
    """

    def __init__(self) -> None:
        self._held = ""
        self._read = self._opening

    def feed(self, arguments: str) -> str:
        """More text, as far as `arguments` complete it."""
        self._held += arguments
        return self._read()

    def _opening(self) -> str:
        if opening := _OPENING.match(self._held):
            self._held, self._read = self._held[opening.end() :], self._string
        elif _DECIDED.match(self._held):
            self._read = self._verbatim
        else:
            return ""
        return self._read()

    def _string(self) -> str:
        found = _UNITS.match(self._held)
        units = found[0] if found else ""
        self._held = self._held[len(units) :]
        text = json.loads(f'"{units}"', strict=False)
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def _verbatim(self) -> str:
        text, self._held = self._held, ""
        return text


def input_of(arguments: str) -> str:
    """The text of a custom tool's whole arguments."""
    return CustomInput().feed(arguments)
