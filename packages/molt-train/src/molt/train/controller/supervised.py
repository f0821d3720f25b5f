"""The supervised step: conversations become token rows of which the assistant's tokens are trained.

The rows are what the gateway would have recorded had the policy sampled the assistant's messages: the first prompt
rendered once, every later turn added by the delta rule. What is learned is thus exactly what is served later.
"""

import random
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from molt.train.config import Config
from molt.train.errors import ConfigError
from molt.train.gateway.render import RenderError
from molt.train.records.experience import Experience, Payload, PayloadStore
from molt.train.records.window import Row, StepReport, TrainWindow
from molt.train.window import WindowPlan, lay_out


class Conversation(msgspec.Struct, frozen=True):
    """One row of the data."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []


class Renderer(Protocol):
    """What this step needs of the chat renderer."""

    def first_prompt(
        self, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]], template_kwargs: dict[str, Any]
    ) -> list[int]:
        """Token ids of a whole conversation, ready for the reply."""
        ...

    def delta(
        self, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]], template_kwargs: dict[str, Any]
    ) -> list[int]:
        """Token ids from the end of a reply, through new `messages`, to the next reply."""
        ...

    def reply(
        self, history: Sequence[dict[str, Any]], message: dict[str, Any], tools: list[dict[str, Any]]
    ) -> list[int]:
        """Token ids of the assistant's `message` as the policy would sample them."""
        ...


class SupervisedActor(Protocol):
    """The trained policy."""

    async def train(self, windows: Sequence[TrainWindow], *, supervised: bool) -> StepReport:
        """An optimizer step for each of `windows`."""
        ...


def read_conversations(path: Path) -> list[Conversation]:
    """Read JSONL rows of `messages` and, optionally, `tools`. Raises ConfigError naming file and line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"data.path {str(path)!r} cannot be read: {error.strerror}") from None
    conversations: list[Conversation] = []
    for number, line in enumerate(lines, start=1):
        try:
            conversation = msgspec.json.decode(line, type=Conversation)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}:{number}: not a conversation with `messages`: {error}") from None
        if not all(isinstance(message.get("role"), str) for message in conversation.messages):
            raise ConfigError(f"{path}:{number}: a message without a role; it must have one, such as 'user'")
        if not any(message["role"] == "assistant" for message in conversation.messages):
            raise ConfigError(f"{path}:{number}: no message of the assistant, so there is nothing to learn from")
        conversations.append(conversation)
    if not conversations:
        raise ConfigError(f"data.path {str(path)!r} has no rows")
    return conversations


def to_rows(conversations: Sequence[Conversation], renderer: Renderer, *, path: str) -> list[Payload]:
    """The token rows of the conversations that the lines of `path` hold.

    Raises ConfigError naming the line where the chat template cannot render one.
    """
    rows: list[Payload] = []
    for number, conversation in enumerate(conversations, start=1):
        try:
            rows.append(to_row(conversation, renderer))
        except RenderError as error:
            raise ConfigError(f"{path}:{number}: {error}") from None
    return rows


def to_row(conversation: Conversation, renderer: Renderer) -> Payload:
    """The token row of a conversation, up to its last assistant message. Raises RenderError."""
    messages, tools = conversation.messages, conversation.tools
    replies = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    ids: list[int] = []
    mask: list[bool] = []
    start = 0
    for index in replies:
        new = messages[start:index]
        context = renderer.delta(new, tools, {}) if start else renderer.first_prompt(new, tools, {})
        if ids and context[:1] == ids[-1:]:
            context = context[1:]  # the reply has the terminator already
        reply = renderer.reply(messages[:index], messages[index], tools)
        ids += context + reply
        mask += [False] * len(context) + [True] * len(reply)
        start = index + 1
    length = len(ids)
    return Payload(
        token_ids=np.asarray(ids, np.int32),
        action_mask=np.asarray(mask, bool),
        logprobs=np.zeros(length, np.float32),  # nobody sampled these
        versions=np.full(length, -1, np.int32),
    )


def batches(rows: Sequence[Row], *, size: int, seed: int) -> Iterator[list[Row]]:
    """Endless batches; each epoch in an order of its own, a batch may span two."""
    rng, waiting = random.Random(seed), list[Row]()
    while True:
        while len(waiting) < size:
            waiting += rng.sample(rows, len(rows))
        yield waiting[:size]
        del waiting[:size]


async def train_supervised(
    config: Config, payloads: Sequence[Payload], *, actor: SupervisedActor, store: PayloadStore
) -> AsyncIterator[StepReport]:
    """Make `train.num_updates` optimizer steps of `sft.batch_size` rows each; yields what each of them did."""
    plan = WindowPlan(
        num_ranks=config.actor.num_ranks,
        microbatch_tokens=config.train.microbatch_tokens,
        layout=config.actor.layout,
    )
    rows = [_row(index, payload, store) for index, payload in enumerate(payloads)]
    order = batches(rows, size=config.sft.batch_size, seed=config.run.seed)
    for step in range(1, config.train.num_updates + 1):
        windows = lay_out([_weighed(next(order))], plan, step=step, policy_version=step - 1)
        yield await actor.train(windows, supervised=True)


def _row(index: int, payload: Payload, store: PayloadStore) -> Row:
    num_actions = int(payload.action_mask.sum())
    experience = Experience(
        segment_id=str(index),
        rollout_id=str(index),
        group_id="",
        num_tokens=len(payload.token_ids),
        num_actions=num_actions,
        oldest_version=-1,
        newest_version=-1,
        mean_version=-1.0,
        payload=store.put(payload),
    )
    return Row(experience=experience, rollout=0, weight=0.0, advantages=np.ones(num_actions, np.float32))


def _weighed(batch: Sequence[Row]) -> list[Row]:
    """The rows as those of one step: numbered, and every trained token of the batch weighs the same."""
    num_tokens = sum(row.experience.num_actions for row in batch)
    return [
        msgspec.structs.replace(row, rollout=number, weight=1.0 / max(1, num_tokens))
        for number, row in enumerate(batch)
    ]
