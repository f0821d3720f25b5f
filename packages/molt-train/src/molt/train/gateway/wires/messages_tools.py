"""Anthropic Messages: tools as function schemas.

Tools that a client runs under a type of Anthropic's (`bash_20250124`) come without a schema, since Anthropic's models
were trained on it: it is given to the template here. Tools that Anthropic's servers would run are left out.
"""

from typing import Any

import msgspec

from molt.train.gateway.call import Count
from molt.train.gateway.wires.body import decode

Schema = dict[str, Any]


class _Tool(msgspec.Struct):
    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: Schema | None = None
    strict: bool | None = None
    display_width_px: int = 0
    display_height_px: int = 0


_decode_tools = msgspec.json.Decoder(list[_Tool] | None)


def convert_tools(raw: bytes, count: Count) -> list[Schema]:
    """Function schemas of a request's tools, in their order; counts those that are left out.

    Raises:
        CallError: A tool is malformed.
    """
    schemas: list[Schema] = []
    for tool in decode(_decode_tools, raw, "tools") or ():
        function = _function(tool)
        if function is None:
            count("tool_without_schema_omitted")
        else:
            schemas.append({"type": "function", "function": function})
    return schemas


def offered_names(raw: bytes) -> list[str]:
    """Names of the tools that the model is offered. Raises CallError."""
    return [tool.name for tool in decode(_decode_tools, raw, "tools") or () if _function(tool)]


def strict_names(raw: bytes) -> tuple[str, ...]:
    """Names of the tools whose arguments must follow their schema. Raises CallError."""
    if b'"strict"' not in raw:  # nearly always: a list of tools need not be read again for it
        return ()
    return tuple(tool.name for tool in decode(_decode_tools, raw, "tools") or () if tool.strict and _function(tool))


def _function(tool: _Tool) -> Schema | None:
    description, parameters = tool.description, tool.input_schema
    if parameters is None:
        description, parameters = _built_in(tool)
    if not tool.name or parameters is None:
        return None
    function = {"name": tool.name, "description": description, "parameters": parameters}
    return {key: value for key, value in function.items() if value is not None}


def _built_in(tool: _Tool) -> tuple[str, Schema | None]:
    """Description and parameters of a tool whose type says them; None for parameters that nobody knows."""
    family, _, version = (tool.type or "").rpartition("_")
    match family:
        case "bash":
            return "Run a command in a bash shell that keeps its state between calls.", _BASH
        case "text_editor":
            return "View, create and edit text files.", _text_editor(version)
        case "memory":
            return "Keep notes in files that outlast the conversation.", _MEMORY
        case "computer":
            screen = f"a screen of {tool.display_width_px} x {tool.display_height_px} pixels"
            return f"Use mouse and keyboard on {screen}, and take screenshots of it.", _computer(version)
        case _:
            return "", None


def _object(required: list[str], **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": required}


def _string(description: str) -> Schema:
    return {"type": "string", "description": description}


def _integer(description: str) -> Schema:
    return {"type": "integer", "description": description}


def _command(*names: str) -> Schema:
    return {"type": "string", "enum": list(names)}


def _integers(description: str, size: int) -> Schema:
    items = {"type": "integer"}
    return {"type": "array", "items": items, "minItems": size, "maxItems": size, "description": description}


_BASH = _object(
    [],
    command=_string("The command; required unless the shell is restarted."),
    restart={"type": "boolean", "description": "Restart the shell."},
)

_EDITED = {
    "file_text": _string("Content of the file; required by create."),
    "old_str": _string("Text to replace, which the file has exactly once; required by str_replace."),
    "new_str": _string("Text to put in its place."),
    "view_range": _integers("First and last line that view shows, counted from 1; -1 is the last of the file.", 2),
    "insert_line": _integer("Line behind which insert puts its text; 0 is the beginning of the file."),
}
_INSERTED = _string("Text to insert; required by insert.")

_MEMORY = _object(
    ["command"],
    command=_command("view", "create", "str_replace", "insert", "delete", "rename"),
    path=_string("File or directory, under /memories; required by all but rename."),
    old_path=_string("What rename renames."),
    new_path=_string("Its new path."),
    insert_text=_INSERTED,
    **_EDITED,
)


def _text_editor(version: str) -> Schema:
    commands = ["view", "create", "str_replace", "insert"]
    if version < "20250429":
        commands.append("undo_edit")
    # Before 20250728, insert took its text as `new_str`.
    inserted = {"insert_text": _INSERTED} if version >= "20250728" else {}
    path = _string("Absolute path of a file or directory.")
    return _object(["command", "path"], command=_command(*commands), path=path, **_EDITED, **inserted)


_FIRST_ACTIONS = ["key", "type", "mouse_move", "left_click", "left_click_drag", "right_click", "middle_click"]
_FIRST_ACTIONS += ["double_click", "screenshot", "cursor_position"]
_LATER_ACTIONS = ["left_mouse_down", "left_mouse_up", "triple_click", "scroll", "hold_key", "wait"]


def _computer(version: str) -> Schema:
    actions, properties = [*_FIRST_ACTIONS], dict[str, Schema]()
    if version >= "20250124":
        actions += _LATER_ACTIONS
        properties |= {
            "start_coordinate": _integers("x and y where left_click_drag begins.", 2),
            "scroll_direction": _command("up", "down", "left", "right"),
            "scroll_amount": _integer("Clicks of the wheel."),
            "duration": {"type": "number", "description": "Seconds, of hold_key and wait."},
        }
    if version >= "20251124":
        actions.append("zoom")
        properties["region"] = _integers("x0, y0, x1, y1 of what zoom shows.", 4)
    return _object(
        ["action"],
        action=_command(*actions),
        coordinate=_integers("x and y in pixels from the upper left corner.", 2),
        text=_string("Text to type, keys to press, or keys to hold while clicking or scrolling."),
        **properties,
    )
