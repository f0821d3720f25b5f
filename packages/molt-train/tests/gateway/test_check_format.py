"""A template and a parser that disagree are refused at start (verifiers#2027, verl#7177, NeMo-RL#2378)."""

import json
import logging
import shutil
from importlib.resources import files

import pytest

from molt.train.config import Config
from molt.train.config.sections import ModelConfig, ServerConfig
from molt.train.errors import ConfigError
from molt.train.gateway.check_format import FormatError, check_format
from molt.train.gateway.parse import HermesParser
from molt.train.launch.gateway import Script, run_gateway
from molt.train.launch.reply_format import choose_parser

QWEN3 = files("molt.train.engine").joinpath("scripted_template.jinja").read_text(encoding="utf-8")


def test_the_template_of_qwen3_and_the_hermes_parser_agree(renderer):
    check_format(renderer, HermesParser())
    assert isinstance(choose_parser(ModelConfig(path="m"), renderer), HermesParser)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('\'<tool_call>\\n{"name": "\'', '\'<function_call>\\n{"name": "\''),
        ('", "arguments": \'', '", "parameters": \''),
        ("tool_call.arguments | tojson", "tool_call.arguments | string"),
        ("tool_call.arguments | tojson", "tool_call.arguments | tojson | tojson"),
    ],
    ids=["another mark", "another key", "python instead of json", "json in a string"],
)
def test_tool_calls_that_come_back_as_something_else_are_refused(with_template, old, new):
    assert old in QWEN3
    renderer = with_template(QWEN3.replace(old, new))
    with pytest.raises(FormatError, match=r"writes a tool call as .* which is read as"):
        check_format(renderer, HermesParser())
    with pytest.raises(ConfigError, match=r"model\.path 'm'.*model\.tool_parser='auto'") as error:
        choose_parser(ModelConfig(path="m"), renderer)
    assert "\n" not in str(error.value)


def test_reasoning_that_comes_back_as_text_is_refused(with_template):
    renderer = with_template(QWEN3.replace("<think>", "<reason>").replace("</think>", "</reason>"))
    with pytest.raises(FormatError, match="writes reasoning as"):
        check_format(renderer, HermesParser())


def test_reasoning_that_the_generation_prompt_opens_is_read(with_template):
    opened = "{{- '<|im_start|>assistant\n<think>\n' }}"
    check_format(with_template(QWEN3.replace("{{- '<|im_start|>assistant\\n' }}", opened)), HermesParser())


def test_a_template_without_tools_is_fine_and_says_so(with_template, caplog):
    caplog.set_level(logging.INFO, logger="molt.train.gateway.check_format")
    template = (
        "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
    )
    check_format(with_template(template), HermesParser())
    assert caplog.messages == ["the chat template has no place for tools: requests with tools will be refused"]


def test_a_template_that_writes_no_calls_into_its_history_is_not_checked_and_says_so(with_template, caplog):
    template = QWEN3.replace("{%- if message.tool_calls %}", "{%- if message.tool_calls %}{{ raise_exception('no') }}")
    check_format(with_template(template), HermesParser())
    assert "its tool format is not checked" in caplog.text


def test_the_command_refuses_before_anything_is_started(model_path, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(model_path, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = QWEN3.replace('", "arguments": \'', '", "parameters": \'')
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "script.jsonl").write_text('{"text": "hello"}\n')
    config = Config(model=ModelConfig(path=str(folder)), server=ServerConfig(token="t" * 24))
    with pytest.raises(ConfigError, match="which is read as"):
        run_gateway(config, script=Script(tmp_path / "script.jsonl", None))
