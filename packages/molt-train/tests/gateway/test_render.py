"""Prompts of the model's own template, deltas behind an assistant's text, and templates that cannot do either."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import shutil

import pytest

from molt.train.errors import ConfigError
from molt.train.gateway.render import ChatRenderer, RenderError

from .replies import CALCULATOR

USER = {"role": "user", "content": "hi"}
CHATML = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)


def test_the_first_prompt_is_the_models_own(renderer):
    messages = [{"role": "system", "content": "S"}, USER]
    own = renderer.tokenizer.apply_chat_template(
        messages, tools=[CALCULATOR], add_generation_prompt=True, tokenize=False
    )
    assert renderer.decode(renderer.first_prompt(messages, [CALCULATOR], {})) == own
    assert renderer.count(messages, [CALCULATOR]) == len(renderer.first_prompt(messages, [CALCULATOR], {}))


def test_row_and_delta_are_the_whole_conversation(renderer):
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    asked = {"role": "assistant", "content": "Let me.", "tool_calls": [call]}
    new = [{"role": "tool", "content": "1", "tool_call_id": "x"}, {"role": "tool", "content": "2", "tool_call_id": "y"}]
    new.append({"role": "user", "content": "go on"})
    whole = renderer.first_prompt([USER, asked, *new], [], {})
    delta = renderer.delta(new, [], {})
    assert whole[-len(delta) :] == delta
    assert delta[0] == renderer.control_tokens["<|im_end|>"]
    assert delta[0] in renderer.end_token_ids


def test_a_reply_is_what_the_policy_would_sample(renderer):
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    reply = renderer.reply(
        [USER], {"role": "assistant", "content": "ok <|im_end|>", "tool_calls": [call]}, [CALCULATOR]
    )
    assert renderer.decode(reply) == (
        "<think>\n\n</think>\n\nok <|im_end|>\n"
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    )
    assert [token_id in renderer.end_token_ids for token_id in reply] == [False] * (len(reply) - 1) + [True]


def test_template_arguments_reach_the_template_and_no_further(renderer):
    closed = renderer.first_prompt([USER], [], {"enable_thinking": False})
    assert renderer.decode(closed).endswith("<think>\n\n</think>\n\n")
    for name in ("chat_template", "tokenize", "tools"):
        with pytest.raises(RenderError, match=name):
            renderer.first_prompt([USER], [], {name: "x"})


def test_no_tokenizer_and_no_template_are_config_errors(tmp_path, model_path):
    with pytest.raises(ConfigError, match=r"no fast tokenizer") as error:
        ChatRenderer(tmp_path)
    assert "\n" not in str(error.value)
    shutil.copy(model_path / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    with pytest.raises(ConfigError, match=r"no chat template.*chat_template"):
        ChatRenderer(tmp_path)


def test_a_template_that_cannot_render_is_a_config_error(with_template):
    with pytest.raises(ConfigError, match="not today"):
        with_template("{{ raise_exception('not today') }}")


def test_generation_config_names_further_end_tokens(model_path, tmp_path):
    shutil.copytree(model_path, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [570, 572]}')
    assert ChatRenderer(tmp_path / "model").end_token_ids == {570, 572}


def test_a_template_that_only_knows_a_leading_system_message_gets_later_ones_in_the_user_turn(with_template):
    late = "{%- if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{%- endif %}"
    strict = "{%- for m in messages %}" + late + "{%- endfor %}"
    renderer = with_template(strict + CHATML)
    system = {"role": "system", "content": "S"}
    prompt = renderer.decode(
        renderer.first_prompt([system, system, USER, {"role": "assistant", "content": "a"}, system], [], {})
    )
    assert prompt == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nS\n\nhi<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
        "<|im_start|>user\nS<|im_end|>\n<|im_start|>assistant\n"
    )
    assert renderer.decode(renderer.delta([system, USER], [], {})) == (
        "<|im_end|>\n<|im_start|>user\nS\n\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_that_rewrites_assistant_text_has_no_delta(with_template):
    renderer = with_template(CHATML.replace("m.content", "(m.content | upper)"))
    with pytest.raises(RenderError, match="as it is"):
        renderer.delta([USER], [], {})


def test_a_template_that_puts_tools_behind_the_last_user_message_gets_them_in_the_delta(with_template):
    renderer = with_template(CHATML.replace("{%- if add", "{{ 'tools: %d' % (tools | length) if tools }}{%- if add"))
    assert "tools: 1" in renderer.decode(renderer.delta([USER], [CALCULATOR], {}))


def test_reading_a_tokenizer_imports_nothing_heavy(model_path):
    import subprocess
    import sys

    program = (
        "import sys\n"
        "import molt.train.gateway.app\n"
        "from molt.train.gateway.render import ChatRenderer\n"
        f"ChatRenderer({str(model_path)!r}).first_prompt([{USER!r}], [], {{}})\n"
        "print([name for name in ('torch', 'ray', 'vllm') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
