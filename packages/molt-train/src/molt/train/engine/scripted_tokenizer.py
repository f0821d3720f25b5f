"""The scripted engine's own tokenizer: byte-level BPE with real merges and Qwen3's ChatML template, built in place.

A character-level toy would hide the faults that re-encoding causes; this one has merges that cross what an agent
edits, so that `encode(decode(ids))` is not always `ids`.
"""

import json
from importlib.resources import files
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
END_TOKEN = "<|im_end|>"

_WORDS = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SENTENCES = (
    "The quick brown fox jumps over the lazy dog while the answer to the question is forty two.",
    'You may call one or more functions to assist with the user query. {"name": "calculator", "arguments": {"a": 1}}',
    "You are provided with function signatures within XML tags: return a json object with function name and arguments.",
    'import json\n\nfor index in range(10):\n    print(index, "hello world")\n    return result["content"]\n',
    "Let me think about this step by step. First I need to read the file, then I will write the test and run it.",
    "assistant user system tool content text message response the there then than that this thing think thinking",
    "naïve café über straße, 你好世界, привет мир: the weather in Paris is sunny and the temperature is 21 degrees.",
)


def scripted_tokenizer(folder: str | Path) -> Path:
    """Write `tokenizer.json` and `tokenizer_config.json` (with the chat template) into `folder`, and return it.

    The files load with transformers. `<|im_end|>`, `<think>`, `<tool_call>` and their like are single tokens.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_WORDS, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_SENTENCES * 2, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_TOKEN,
        "pad_token": "<|endoftext|>",
        "model_max_length": 32768,
        "clean_up_tokenization_spaces": False,
        "chat_template": files("molt.train.engine").joinpath("scripted_template.jinja").read_text(encoding="utf-8"),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return folder
