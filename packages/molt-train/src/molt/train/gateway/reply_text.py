"""The text of a recorded reply, as its client saw it."""

from molt.train.gateway.call import Content
from molt.train.gateway.detokenize import TokenReader, hidden_tokens
from molt.train.gateway.parse import Parser
from molt.train.gateway.render import Renderer
from molt.train.records.turn import Turn

_PROMPT_END = 64
"""Tokens of the prompt that say whether it has opened the reasoning."""


def reply_text(turn: Turn, renderer: Renderer, parser: Parser) -> str:
    """What a turn said to its user: no reasoning, no tool calls, no control tokens, nothing after a stop string."""
    prompt_end = turn.context_ids[-_PROMPT_END:]
    opened = renderer.decode(prompt_end).rstrip()
    reading = parser.start(
        offers_tools=True,
        in_reasoning=bool(parser.opens_reasoning) and opened.endswith(parser.opens_reasoning),
        prompt_end=prompt_end,
    )
    stops = tuple(str(stop) for stop in turn.sampling.get("stop") or ())
    reader = TokenReader(reading, decode=renderer.decode, hidden=hidden_tokens(renderer, parser), stops=stops)
    sampled = renderer.decode(turn.token_ids)
    # A reply that holds a stop string was ended by it.
    stopped_by = min((stop for stop in stops if stop in sampled), key=sampled.find, default=None)
    events = [*reader.feed(turn.token_ids), *reader.finish(stopped_by)]
    return "".join(event.text for event in events if isinstance(event, Content)).strip()
