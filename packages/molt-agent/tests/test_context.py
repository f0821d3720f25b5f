"""From a task row to a context."""

from typing import Any

import pytest

from molt.agents import Context, TaskError
from molt.agents.context import make_context
from molt.agents.protocol import Lease, SamplingParams, SessionCredentials


def context_of(row: dict[str, Any]) -> Context:
    session = SessionCredentials(
        session_id="s1",
        session_url="http://host/s/1",
        base_url="http://host/s/1/v1",
        api_key="secret-key",
        model_name="policy",
    )
    lease = Lease(
        lease_id="l1",
        rollout_id="r1",
        group_id="g1",
        attempt=2,
        task=row,
        session=session,
        sampling_params=SamplingParams(max_tokens=7),
        timeout_s=9.0,
    )
    return make_context(lease, deadline=123.5)


def test_a_prompt_becomes_one_user_message():
    ctx = context_of({"prompt": "2 + 2 =", "label": "4", "extra": [1]})
    assert ctx.messages == ({"role": "user", "content": "2 + 2 ="},)
    assert (ctx.prompt, ctx.label, ctx.tools, ctx.images) == ("2 + 2 =", "4", (), ())
    assert ctx.data == {"prompt": "2 + 2 =", "label": "4", "extra": [1]}


def test_the_lease_is_all_there():
    ctx = context_of({})
    assert (ctx.session_id, ctx.rollout_id, ctx.attempt, ctx.deadline) == ("s1", "r1", 2, 123.5)
    assert (ctx.session_url, ctx.base_url) == ("http://host/s/1", "http://host/s/1/v1")
    assert (ctx.api_key, ctx.model_name, ctx.sampling_params.max_tokens) == ("secret-key", "policy", 7)
    assert (ctx.messages, ctx.prompt, ctx.label) == ((), "", None)


def test_messages_are_passed_on_and_the_last_user_text_is_the_prompt():
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {
            "role": "user",
            "content": [{"type": "text", "text": "se"}, {"type": "image_url"}, {"type": "text", "text": "c"}],
        },
        {"role": "assistant", "content": "third"},
    ]
    ctx = context_of({"messages": messages, "prompt": "not used", "tools": [{"type": "function"}]})
    assert list(ctx.messages) == messages
    assert ctx.prompt == "sec"
    assert ctx.tools == ({"type": "function"},)


def test_images_go_before_the_prompt_they_belong_to():
    ctx = context_of({"prompt": "What is it?", "images": ["data:image/png;base64,AA=="]})
    assert ctx.messages[0]["content"] == [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
        {"type": "text", "text": "What is it?"},
    ]
    assert ctx.images == ("data:image/png;base64,AA==",)
    assert ctx.prompt == "What is it?"


def test_the_key_does_not_show_in_logs():
    assert "secret-key" not in repr(context_of({"prompt": "hi"}))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": ["hi"]}, "`prompt` is a list"),
        ({"messages": "hi"}, "`messages` must be a list of objects"),
        ({"messages": [{"content": "hi"}]}, r"messages\[0\] has no `role`"),
        ({"tools": {"type": "function"}}, "`tools` must be a list of objects"),
        ({"images": [{"url": "x"}]}, "`images` must be a list of URLs"),
    ],
)
def test_a_malformed_row_names_the_field(row: dict[str, Any], reason: str):
    with pytest.raises(TaskError, match=reason):
        context_of(row)
