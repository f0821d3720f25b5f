"""vLLM's own parsers behind the gateway: chosen by name, fed token by token, under the gateway's rules."""

import json
import shutil
from importlib.resources import files
from itertools import pairwise

import pytest

from molt.train.config.sections import ModelConfig
from molt.train.engine.scripted_tokenizer import scripted_tokenizer
from molt.train.errors import ConfigError
from molt.train.gateway.call import Content, Reasoning, ToolCallArguments, ToolCallEnd, ToolCallStart
from molt.train.gateway.detokenize import TokenReader, hidden_tokens
from molt.train.gateway.render import ChatRenderer
from molt.train.launch.reply_format import choose_parser

TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "f",
        "parameters": {"type": "object", "properties": {"n": {"type": "integer"}, "text": {"type": "string"}}},
    },
}
PARAMETERS = "<parameter=n>\n3\n</parameter>\n<parameter=text>\né <b>\n</parameter>\n"
XML_CALL = f"<tool_call>\n<function=f>\n{PARAMETERS}</function>\n</tool_call>"
JSON_TEMPLATE = files("molt.train.engine").joinpath("scripted_template.jinja").read_text(encoding="utf-8")
WRITES_JSON = JSON_TEMPLATE[
    JSON_TEMPLATE.index("{{- '<tool_call>\\n{\"name") : JSON_TEMPLATE.index(
        "            {%- endfor %}\n        {%- endif %}\n        {{- '<|im_end|>\\n' }}"
    )
]
WRITES_XML = """{{- '<tool_call>\n<function=' + tool_call.name + '>\n' }}
{%- for key, value in tool_call.arguments | items %}
    {{- '<parameter=' + key + '>\n' + (value if value is string else value | tojson) + '\n</parameter>\n' }}
{%- endfor %}
{{- '</function>\n</tool_call>' }}
"""


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return ChatRenderer(scripted_tokenizer(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def coder(renderer, tmp_path_factory):
    """The scripted tokenizer with a template that writes calls as Qwen3-Coder does."""
    folder = tmp_path_factory.mktemp("coder") / "model"
    shutil.copytree(renderer.model_path, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = JSON_TEMPLATE.replace(WRITES_JSON, WRITES_XML)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return ChatRenderer(folder)


@pytest.fixture(scope="module")
def coder_parser(coder):
    return choose_parser(ModelConfig(path="m", tool_parser="qwen3_coder", reasoning_parser="qwen3"), coder)


def read(renderer, parser, *chunks, tools=(TOOL,), max_calls=None):
    reading = parser.start(offers_tools=bool(tools), tools=list(tools), max_calls=max_calls)
    reader = TokenReader(reading, decode=renderer.decode, hidden=hidden_tokens(renderer, parser))
    reasoning, content, calls = "", "", []
    for event in [event for chunk in chunks for event in reader.feed(chunk)] + reader.finish(None):
        match event:
            case Reasoning(text):
                reasoning += text
            case Content(text):
                content += text
            case ToolCallStart(name):
                calls.append((name, "", "open"))
            case ToolCallArguments(text):
                calls.append(
                    (calls.pop()[0], text, "open")
                    if not calls[-1][1]
                    else (calls[-1][0], calls.pop()[1] + text, "open")
                )
            case ToolCallEnd():
                calls.append(calls.pop()[:2])
    return reasoning, content, calls, reading.counters


def ids_of(renderer, text):
    return renderer.tokenizer.encode(text, add_special_tokens=False)


def test_a_template_of_another_format_needs_its_parser_named(coder):
    with pytest.raises(ConfigError, match=r"writes a tool call as .*<function=.*qwen3_coder"):
        choose_parser(ModelConfig(path="m"), coder)
    with pytest.raises(ConfigError, match=r"model\.tool_parser is 'nope', which vLLM does not know: .*qwen3_coder"):
        choose_parser(ModelConfig(path="m", tool_parser="nope"), coder)
    with pytest.raises(ConfigError, match=r"model\.reasoning_parser is 'nope'"):
        choose_parser(ModelConfig(path="m", tool_parser="qwen3_coder", reasoning_parser="nope"), coder)


def test_reasoning_text_and_calls_of_xml(coder, coder_parser):
    ids = ids_of(coder, f"<think>\nwhy\n</think>\n\nSay.\n{XML_CALL}\n{XML_CALL}<|im_end|>")
    call = ("f", '{"n": 3, "text": "é <b>"}')
    assert read(coder, coder_parser, ids) == ("why", "Say.", [call, call], {})
    assert read(coder, coder_parser, ids, max_calls=1) == ("why", "Say.", [call], {"tool_call_hidden": 1})


def test_every_two_way_split_of_tokens_reads_as_the_whole(coder, coder_parser):
    # vllm#55082, vllm#41967: vLLM's own streaming gave other calls for other chunks
    ids = ids_of(coder, f"<think>\nwhy 你\n</think>\n\nSay.\n{XML_CALL}\nmore{XML_CALL}<|im_end|>")
    whole = read(coder, coder_parser, ids)
    assert len(whole[2]) == 2
    for cut in range(1, len(ids)):
        assert read(coder, coder_parser, ids[:cut], ids[cut:]) == whole
    assert read(coder, coder_parser, *[ids[a:b] for a, b in pairwise([0, *range(1, len(ids), 7), len(ids)])]) == whole


def test_without_tools_a_call_is_text(coder, coder_parser):
    # tt-inference-server#4386
    assert read(coder, coder_parser, ids_of(coder, f"<think>\nwhy\n</think>\n\n{XML_CALL}"), tools=()) == (
        "why", XML_CALL, [], {}
    )  # fmt: skip


def test_a_call_that_the_reply_cuts_has_no_end(renderer):
    parser = choose_parser(ModelConfig(path="m", tool_parser="hermes", reasoning_parser="qwen3"), renderer)
    ids = ids_of(renderer, '<think>\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"text": "ab')
    reasoning, content, calls, counters = read(renderer, parser, ids)
    assert (reasoning, content, counters) == ("", "", {"tool_call_cut": 1})
    assert [name for name, *_ in calls] == ["f"]
    assert len(calls[0]) == 3
