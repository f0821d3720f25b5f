"""Consecutive messages of one speaker as one turn, as Anthropic's wire has them."""

from collections.abc import Sequence

from molt.train.gateway.call import Message


def join_turns(messages: Sequence[Message]) -> list[Message]:
    """`messages` with those of one user, or one assistant, that follow one another joined: one line break between.

    System messages and tool results stay as they are.
    """
    joined: list[Message] = []
    for message in messages:
        last = joined[-1] if joined else None
        if last is None or message["role"] != last["role"] or message["role"] not in ("user", "assistant"):
            joined.append(message)
        else:
            joined[-1] = last | _both(last, message)
    return joined


def _both(first: Message, second: Message) -> Message:
    both: Message = {"content": "\n".join(text for text in (first["content"], second["content"]) if text)}
    if thoughts := [message["reasoning_content"] for message in (first, second) if "reasoning_content" in message]:
        both["reasoning_content"] = "\n".join(thoughts)
    if calls := [*first.get("tool_calls", ()), *second.get("tool_calls", ())]:
        both["tool_calls"] = calls
    return both
