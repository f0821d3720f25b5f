"""Which parser reads the model's replies: the one that reads what the model's chat template writes."""

from molt.train.config.sections import ModelConfig
from molt.train.errors import ConfigError
from molt.train.gateway.check_format import FormatError, check_format
from molt.train.gateway.parse import HermesParser, Parser
from molt.train.gateway.render import ChatRenderer

_HERMES = ("auto", "hermes")
_NO_REASONING = ("auto", "none")


def choose_parser(model: ModelConfig, renderer: ChatRenderer) -> Parser:
    """The parser of `model.tool_parser` and `model.reasoning_parser`, checked against the chat template.

    Raises:
        ConfigError: There is no such parser, or it does not read what the template writes.
    """
    hermes = model.tool_parser in _HERMES and model.reasoning_parser == "auto"
    parser = HermesParser() if hermes else _vllm_parser(model, renderer)
    try:
        check_format(renderer, parser)
    except FormatError as error:
        raise ConfigError(
            f"model.path {model.path!r}: its chat template {error}, with model.tool_parser={model.tool_parser!r} and "
            f"model.reasoning_parser={model.reasoning_parser!r}: name the parsers that `vllm serve` would be given "
            "for this model, such as qwen3_coder, llama3_json, deepseek_v31, glm45, kimi_k2, openai"
        ) from None
    return parser


def _vllm_parser(model: ModelConfig, renderer: ChatRenderer) -> Parser:
    from molt.train.engine.vllm_parser import VllmFormat
    from molt.train.gateway.parse_foreign import ForeignParser

    form = VllmFormat(
        renderer.tokenizer,
        tool_parser="hermes" if model.tool_parser in _HERMES else model.tool_parser,
        reasoning_parser="" if model.reasoning_parser in _NO_REASONING else model.reasoning_parser,
    )
    marks = [text for text, token_id in renderer.control_tokens.items() if token_id not in renderer.end_token_ids]
    return ForeignParser(form, marks=marks)
