r"""From what a request demands of its reply to the grammar that bounds the sampling.

    reasoning, where the model may reason
    then, as the request has it:
      calls           tool choice required, or a named tool
      text | calls    a response format, with tools that may be called instead
      text            a response format
      free text, calls as they come    some tools only, one call at most, strict arguments

A request that only offers tools has no grammar: the policy samples freely, and learns from what it samples. A grammar
rules tokens out, so its turn is flagged as off-policy. It is part of the task rather than of the sampling, and holds
under every sampling policy; but `strict` arguments, which SDKs demand without being asked, hold only where the session
leaves the sampling to its clients.

The JSON is that of xgrammar's structural tags, https://xgrammar.mlc.ai/docs/structural_tag/structural_tag_format.html.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from molt.train.engine.protocol import Grammar
from molt.train.errors import EngineRequestError
from molt.train.gateway.call import Count, ModelCall, ResponseFormat, ToolChoice
from molt.train.gateway.call_error import CallError
from molt.train.gateway.parse import CallFormat, Parser
from molt.train.gateway.sessions import SamplingPolicy

Format = dict[str, Any]
"""A node of a structural tag."""

Reasoning = Literal["none", "optional", "open"]
"""Whether the reply may begin with reasoning; `open`: the prompt has begun it."""

_FREE = ToolChoice()
_ANY_OBJECT = {"type": "object"}
_BLANK_LINES: Format = {"type": "regex", "pattern": r"\n{0,2}"}
"""What models put between the parts of a reply."""


def reply_grammar(
    call: ModelCall,
    tools: Sequence[dict[str, Any]],
    *,
    parser: Parser,
    reasoning: Reasoning,
    policy: SamplingPolicy,
    count: Count,
) -> Grammar | None:
    """The grammar of the reply to `call`; None where it is free.

    Args:
        call: The request.
        tools: Its tools as function schemas.
        parser: The model family's reply format.
        reasoning: Whether the reply may begin with reasoning.
        policy: Of the session: whether `strict` alone is reason enough.
        count: Given `strict_not_enforced`, and where no grammar knows the model's calls `parallel_calls_not_prevented`.

    Raises:
        CallError: The request demands what cannot be.
    """
    choice, wanted = call.tool_choice, call.response_format
    if wanted is None and choice == _FREE:
        return None
    offered = _offered(call, tools)
    if wanted is not None and choice.mode != "required":
        if call.prefill:
            message = "the reply is bound to a format and begun by the last message: leave one of them out"
            raise CallError("invalid_request", message, param=wanted.param)
        if wanted.kind == "structural_tag" or (reasoning == "none" and not offered):
            return _plain(wanted)
        text = _text(wanted)
        body = {"type": "or", "elements": [_calls(call, offered, parser), text]} if offered else text
    elif choice.mode == "required":
        body = _calls(call, offered, parser)
    elif offered and (choice.names or _limits_calls(choice, parser, policy, count)):
        body = _calls_in_text(call, offered, parser, reasoning)
    else:
        return None
    return _tag(_after_reasoning(body, parser, reasoning))


def request_error(error: EngineRequestError, call: ModelCall) -> CallError:
    """What the client is told of a request that the engine refuses, with the field of its own that is at fault."""
    param = error.field
    if param == "grammar":
        param = call.response_format.param if call.response_format else "tools"
    elif param == "num_top_logprobs":
        param = "top_logprobs"
    return CallError("invalid_request", str(error), param=param)


def _offered(call: ModelCall, tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The functions that the reply may call."""
    choice = call.tool_choice
    if choice.mode == "none":
        return []
    functions = [tool["function"] for tool in tools]
    if choice.names:
        functions = [function for function in functions if function["name"] in choice.names]
    if not functions and choice.mode == "required":
        message = "a tool call is required, but no tool is offered that may be called: send it in tools"
        raise CallError("invalid_request", message, param="tool_choice")
    return functions


def _limits_calls(choice: ToolChoice, parser: Parser, policy: SamplingPolicy, count: Count) -> bool:
    """Whether calls that the model may make or not are bound all the same; counts what is asked for in vain."""
    if parser.call_format is not None and (choice.max_calls or (choice.strict and policy != "enforce")):
        return True
    if choice.max_calls:
        count("parallel_calls_not_prevented")
    if choice.strict:
        count("strict_not_enforced")
    return False


def _plain(wanted: ResponseFormat) -> Grammar:
    match wanted.kind:
        case "json_object":
            return Grammar(kind="json_object")
        case "json_schema" | "choice" | "structural_tag":
            return Grammar(kind=wanted.kind, text=_json(wanted.spec))
        case "regex" | "grammar":
            return Grammar(kind=wanted.kind, text=str(wanted.spec))


def _text(wanted: ResponseFormat) -> Format:
    """What `_plain` says, as a part of a tag; a tag of the client's own has its parts already."""
    match wanted.kind:
        case "json_object":
            return _schema(_ANY_OBJECT)
        case "json_schema":
            return _schema(wanted.spec)
        case "regex":
            return {"type": "regex", "pattern": wanted.spec}
        case "choice":
            return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in wanted.spec]}
        case _:
            return {"type": "grammar", "grammar": wanted.spec}


def _schema(schema: Any) -> Format:
    return {"type": "json_schema", "json_schema": schema}


def _calls(call: ModelCall, functions: Sequence[dict[str, Any]], parser: Parser) -> Format:
    """One call or more, and nothing else."""
    return {
        "type": "tags_with_separator",
        "tags": _call_tags(call, functions, parser),
        "separator": _call_format(parser).between,
        "at_least_one": True,
        "stop_after_first": call.tool_choice.max_calls == 1,
    }


def _calls_in_text(
    call: ModelCall, functions: Sequence[dict[str, Any]], parser: Parser, reasoning: Reasoning
) -> Format:
    """Free text, in which the mark of a call begins an allowed one."""
    marks = [parser.opens_reasoning, parser.closes_reasoning] if reasoning != "none" else []
    return {
        "type": "triggered_tags",
        "triggers": [_call_format(parser).trigger],
        "tags": _call_tags(call, functions, parser),
        "stop_after_first": call.tool_choice.max_calls == 1,
        "excludes": marks,
    }


def _call_tags(call: ModelCall, functions: Sequence[dict[str, Any]], parser: Parser) -> list[Format]:
    form, strict = _call_format(parser), call.tool_choice.strict
    return [
        {
            "type": "tag",
            "begin": form.begin + _json(function["name"]) + form.middle,
            "content": _schema(
                function.get("parameters") or _ANY_OBJECT if function["name"] in strict else _ANY_OBJECT
            ),
            "end": form.end,
        }
        for function in functions
    ]


def _call_format(parser: Parser) -> CallFormat:
    if parser.call_format is None:
        message = "the calls of this model cannot be bound: use tool_choice 'auto' or 'none'"
        raise CallError("invalid_request", message, param="tool_choice")
    return parser.call_format


def _after_reasoning(body: Format, parser: Parser, reasoning: Reasoning) -> Format:
    if reasoning == "none":
        return body
    marks = [parser.opens_reasoning, parser.closes_reasoning]
    thought = {
        "type": "tag",
        "begin": "" if reasoning == "open" else parser.opens_reasoning,
        "content": {"type": "any_text", "excludes": marks},
        "end": parser.closes_reasoning,
    }
    first = thought if reasoning == "open" else {"type": "optional", "content": thought}
    space = [] if body["type"] == "triggered_tags" else [_BLANK_LINES]
    return {"type": "sequence", "elements": [first, *space, body]}


def _tag(form: Format) -> Grammar:
    return Grammar(kind="structural_tag", text=_json({"type": "structural_tag", "format": form}))


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
