"""The text of a recorded reply is what its client saw of it."""

import pytest

from molt.train.engine.scripted_tokenizer import scripted_tokenizer
from molt.train.gateway.parse import HermesParser
from molt.train.gateway.render import ChatRenderer
from molt.train.gateway.reply_text import reply_text
from molt.train.records.turn import Turn


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return ChatRenderer(scripted_tokenizer(tmp_path_factory.mktemp("model")))


@pytest.fixture
def text_of(renderer):
    def text(sampled, *, prompt="<|im_start|>assistant\n", stop=()):
        token_ids = renderer.encode_raw(sampled)
        turn = Turn(
            turn_id="t",
            session_id="s",
            wire="chat",
            parent_turn_id=None,
            opened_by="start",
            response_id="r",
            status="delivered",
            adopted=True,
            auxiliary=False,
            finish_reason="stop",
            prompt_length=1,
            context_ids=renderer.encode_raw(prompt),
            token_ids=token_ids,
            logprobs=[0.0] * len(token_ids),
            versions=[0] * len(token_ids),
            sampling={"stop": list(stop)},
        )
        return reply_text(turn, renderer, HermesParser())

    return text


def test_the_end_token_is_no_text(text_of):
    assert text_of("Forty-two, naïvely.<|im_end|>") == "Forty-two, naïvely."


def test_reasoning_is_none_whoever_opened_it(text_of):
    assert text_of("<think>\nseven?\n</think>\n\nEight.<|im_end|>") == "Eight."
    assert text_of("seven?\n</think>\n\nEight.<|im_end|>", prompt="<|im_start|>assistant\n<think>\n") == "Eight."


def test_a_tool_call_is_none(text_of):
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert text_of(f"Let me see.\n{call}<|im_end|>") == "Let me see."


def test_the_text_ends_before_a_stop_string(text_of):
    assert text_of("one two END three", stop=("END",)) == "one two"
