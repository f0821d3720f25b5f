"""The policy: a Qwen3 of 0.1 M parameters with its own tokenizer and a ChatML template with tools, made in place."""

import json
import logging
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|im_end|>"
PAD = "<|endoftext|>"
CONTROL_TOKENS = [PAD, "<|im_start|>", END, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
VOCABULARY = 264

CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
tools:{% for tool in tools %} {{ tool.function.name }}({{ tool.function.parameters.properties | join(', ') }})\
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>{{ message.content }}</tool_response>
{%- if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>
{% endif %}
{%- else %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments if call.function.arguments is string \
else call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def build_tokenizer(corpus: list[str], folder: Path) -> None:
    """Train a BPE of `VOCABULARY` tokens on `corpus` and save it, with the chat template, as a Hugging Face folder.

    Digits stay single tokens, so that numbers are copied digit by digit; everything else may merge across words,
    which keeps a tool call short.
    """
    tokenizer = Tokenizer(models.BPE(unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    printable = [chr(code) for code in range(32, 127)] + ["\n"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=CONTROL_TOKENS, initial_alphabet=printable, show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": 1024,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def render(conversations: list[dict[str, Any]]) -> list[str]:
    """The conversations as the template writes them."""
    from transformers.utils.chat_template_utils import render_jinja_template

    texts: list[str] = []
    for conversation in conversations:
        rendered, _ = render_jinja_template(
            [conversation["messages"]], tools=conversation["tools"], chat_template=CHAT_TEMPLATE
        )
        texts += rendered
    return texts


def build_model(folder: Path, *, seed: int) -> None:
    """Write a Qwen3 with random weights beside the tokenizer in `folder`."""
    # torch says at import what its own libraries should mend.
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=1024,
        initializer_range=0.08,  # with 0.02 a model this small does not learn to copy numbers
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).save_pretrained(folder)
