"""Do the reference, the teacher and the critic read token ids as the policy means them?"""

from transformers import PreTrainedTokenizerFast

from molt.train.config import Config
from molt.train.errors import ConfigError


def check_same_tokens(config: Config) -> None:
    """Compare the tokenizers of all models that are given the policy's token ids; tokens besides the policy's are fine.

    Raises:
        ConfigError: A model has no fast tokenizer, or a token of the policy's has another id there, or none.
    """
    algorithm = config.algorithm
    others = {
        "algorithm.reference_path": algorithm.reference_path if algorithm.kl_coef > 0 else "",
        "algorithm.teacher_path": algorithm.teacher_path if algorithm.estimator == "distillation" else "",
        "critic.path": config.critic.path if algorithm.estimator == "gae" else "",
    }
    given = {key: path for key, path in others.items() if path and path != config.model.path}
    if not given:
        return
    own = _tokens("model.path", config.model.path)
    for key, path in given.items():
        theirs = _tokens(key, path)
        differing = sorted((index, token) for token, index in own.items() if theirs.get(token) != index)
        if differing:
            index, token = differing[0]
            raise ConfigError(
                f"{key} {path!r} reads token ids otherwise than model.path {config.model.path!r}: token {index} "
                f"({token!r}) and {len(differing) - 1} others; give a model of the same tokenizer"
            )


def _tokens(key: str, path: str) -> dict[str, int]:
    try:
        return PreTrainedTokenizerFast.from_pretrained(path).get_vocab()
    except (OSError, ValueError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{key} {path!r} has no fast tokenizer (tokenizer.json): {reason}") from None
