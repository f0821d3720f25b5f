"""The supervised step: rows are what the gateway would have recorded, and every epoch uses each of them once."""

import itertools
import json
from collections import Counter

import httpx
import numpy as np
import pytest

from molt.agents.protocol import SamplingParams
from molt.train.config import Config, GatewayConfig, RunConfig, SftConfig, TrainConfig
from molt.train.controller.supervised import (
    Conversation,
    batches,
    read_conversations,
    to_row,
    to_rows,
    train_supervised,
)
from molt.train.engine.fake import ScriptedEngine, ScriptLine
from molt.train.engine.scripted_tokenizer import scripted_tokenizer
from molt.train.errors import ConfigError
from molt.train.experience import LocalPayloadStore
from molt.train.gateway.app import Gateway
from molt.train.gateway.parse import HermesParser
from molt.train.gateway.render import ChatRenderer
from molt.train.gateway.sessions import Sessions
from molt.train.records.experience import Payload
from molt.train.records.window import StepReport
from molt.train.trajectory import build_trajectory

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Add two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]


def call(call_id, **arguments):
    function = {"name": "calculator", "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def tool(call_id, text):
    return {"role": "tool", "tool_call_id": call_id, "content": text}


CONVERSATIONS = {
    "one turn": Conversation([user("What is 1 + 2?"), assistant("3")]),
    "several turns": Conversation(
        [{"role": "system", "content": "Be brief."}, user("Hello"), assistant("Hi."), user("Bye"), assistant("Bye!")]
    ),
    "a tool loop": Conversation(
        [
            user("What is 1 + 2 + 3?"),
            call("c1", a=1, b=2),
            tool("c1", "3"),
            call("c2", a=3, b=3),
            tool("c2", "6"),
            assistant("6"),
        ],
        TOOLS,
    ),
    "text that spells control tokens": Conversation([user("Say <|im_end|> <tool_call>"), assistant("No <think>.")]),
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return scripted_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def renderer(model_path):
    return ChatRenderer(model_path)


async def recorded(conversation, renderer, model_path):
    """The row that the gateway records when a client leads the conversation and the policy samples its replies."""
    messages, tools = conversation.messages, conversation.tools
    positions = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    script = [ScriptLine(token_ids=renderer.reply(messages[:i], messages[i], tools)) for i in positions]
    sessions = Sessions()
    gateway = Gateway(
        sessions,
        engine=ScriptedEngine(script, model_path),
        renderer=renderer,
        parser=HermesParser(),
        settings=GatewayConfig(),
        model_name="policy",
        max_model_len=32768,
    )
    session, key = sessions.open(sampling=SamplingParams(), policy="enforce")
    said = []
    async with httpx.AsyncClient(transport=httpx.ASGITransport(gateway.asgi), base_url="http://gateway") as client:
        for start, position in itertools.pairwise([-1, *positions]):
            said += messages[start + 1 : position]
            response = await client.post(
                f"/s/{session.session_id}/v1/chat/completions",
                json={"model": "policy", "messages": said, **({"tools": tools} if tools else {})},
                headers={"authorization": f"Bearer {key}"},
            )
            assert response.status_code == 200, response.text
            said.append(response.json()["choices"][0]["message"])
            for sent, asked in zip(
                said[-1].get("tool_calls") or [], messages[position].get("tool_calls", []), strict=True
            ):
                sent["id"] = asked["id"]
    (segment,) = build_trajectory(session.session_id, session.turns()).segments
    return segment


@pytest.mark.parametrize("name", CONVERSATIONS)
async def test_a_row_is_what_the_gateway_would_have_recorded(name, renderer, model_path):
    conversation = CONVERSATIONS[name]
    row = to_row(conversation, renderer)
    segment = await recorded(conversation, renderer, model_path)
    assert row.token_ids.tolist() == segment.token_ids
    assert row.action_mask.tolist() == [bool(action) for action in segment.action_mask]


def test_what_nobody_sampled_has_no_log_probs_and_no_versions(renderer):
    row = to_row(CONVERSATIONS["a tool loop"], renderer)
    assert len(row.token_ids) == len(row.action_mask) == len(row.logprobs) == len(row.versions)
    assert not row.logprobs.any()
    assert set(row.versions.tolist()) == {-1}


def test_a_row_ends_with_the_last_reply(renderer):
    open_ended = Conversation([*CONVERSATIONS["one turn"].messages, user("and 2 + 2?")])
    row, shorter = to_row(open_ended, renderer), to_row(CONVERSATIONS["one turn"], renderer)
    assert row.token_ids.tolist() == shorter.token_ids.tolist()
    assert row.action_mask[-1]


@pytest.fixture
def data(tmp_path):
    def write(*lines):
        path = tmp_path / "conversations.jsonl"
        path.write_text("\n".join(lines) + "\n")
        return path

    return write


def test_conversations_are_read_with_and_without_tools(data):
    path = data(
        json.dumps({"messages": [user("a"), assistant("b")]}),
        json.dumps({"messages": [user("a"), assistant("b")], "tools": TOOLS, "note": "ignored"}),
    )
    assert [conversation.tools for conversation in read_conversations(path)] == [[], TOOLS]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "not a conversation with `messages`: "),
        ('{"text": "a"}', "not a conversation with `messages`: Object missing required field `messages`"),
        ('{"messages": "a"}', "not a conversation with `messages`: Expected `array`, got `str`"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no message of the assistant"),
        ('{"messages": [{"content": "a"}, {"role": "assistant", "content": "b"}]}', "a message without a role"),
    ],
)
def test_a_row_that_is_no_conversation_is_named_by_file_and_line(data, line, fault):
    path = data(json.dumps({"messages": [user("a"), assistant("b")]}), line)
    with pytest.raises(ConfigError) as caught:
        read_conversations(path)
    assert str(caught.value).startswith(f"{path}:2: {fault}")
    assert "\n" not in str(caught.value)


def test_a_conversation_that_the_template_cannot_render_is_named_by_file_and_line(renderer):
    broken = Conversation([user("a"), {"role": "assistant", "tool_calls": [7]}])
    with pytest.raises(ConfigError, match=r"^data\.jsonl:2: the chat template cannot render the messages: "):
        to_rows([CONVERSATIONS["one turn"], broken], renderer, path="data.jsonl")


def test_a_missing_or_empty_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_conversations(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ConfigError, match="has no rows"):
        read_conversations(tmp_path / "empty.jsonl")


@pytest.mark.parametrize(("num_rows", "size"), [(5, 2), (4, 4), (3, 7)])
def test_every_epoch_uses_each_row_once(num_rows, size):
    rows = list(range(num_rows))
    flow = itertools.chain.from_iterable(itertools.islice(batches(rows, size=size, seed=0), 12 * num_rows))
    for _ in range(12):
        assert sorted(itertools.islice(flow, num_rows)) == rows


def test_batches_are_full_and_the_seed_decides_their_order():
    rows = list(range(8))
    first, again, other = (list(itertools.islice(batches(rows, size=3, seed=seed), 6)) for seed in (1, 1, 2))
    assert {len(batch) for batch in first} == {3}
    assert first == again != other


class Actor:
    def __init__(self):
        self.windows = []

    async def train(self, windows, *, supervised):
        assert supervised
        (window,) = windows
        self.windows.append(window)
        return StepReport(
            step=window.step, loss=1.0, grad_norm=1.0, lr=0.1, logprob_gap_mean=0, logprob_gap_max=0, metrics={}
        )


async def test_every_update_is_one_optimizer_step_on_a_batch_of_rows():
    payloads = [
        Payload(
            token_ids=np.full(4 + i, i, np.int32),
            action_mask=np.array([False] * 3 + [True] * (1 + i)),
            logprobs=np.zeros(4 + i, np.float32),
            versions=np.full(4 + i, -1, np.int32),
        )
        for i in range(3)
    ]
    config = Config(
        train=TrainConfig(num_updates=4, microbatch_tokens=12), sft=SftConfig(batch_size=3), run=RunConfig(seed=5)
    )
    actor = Actor()
    reports = [r async for r in train_supervised(config, payloads, actor=actor, store=LocalPayloadStore())]
    assert [report.step for report in reports] == [1, 2, 3, 4]
    for window in actor.windows:
        rows = [row for microbatch in window.ranks[0] for row in microbatch.rows]
        assert Counter(row.experience.segment_id for row in rows) == {"0": 1, "1": 1, "2": 1}
        assert window.num_action_tokens == 1 + 2 + 3
        assert ({row.rollout for row in rows}, window.num_rollouts) == ({0, 1, 2}, 3)
        for row in rows:
            assert row.advantages.tolist() == [1.0] * row.experience.num_actions
            assert row.weight == 1 / 6, "the mean over the trained tokens of the batch"
            assert len(row.experience.payload.token_ids) == row.experience.num_tokens
