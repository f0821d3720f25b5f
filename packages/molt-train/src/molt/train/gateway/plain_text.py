"""The view of a reply to a raw prompt: its text as it is, without reasoning or tool calls to be found in it."""

from collections.abc import Sequence

from molt.train.gateway.call import Content, Event


class PlainText:
    """A `Reading` that shows everything."""

    by_token: bool = False

    def __init__(self) -> None:
        self.counters: dict[str, int] = {}

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[Event]:  # noqa: ARG002 - the text is all
        """See `Reading.feed`."""
        return [Content(text)]

    def finish(self) -> list[Event]:
        """See `Reading.finish`."""
        return []
