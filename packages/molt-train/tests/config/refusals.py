"""What the checks say of a configuration."""

from molt.train.config import Config, check, load_config
from molt.train.errors import ConfigError


def refusal(*overrides):
    """Why a config is refused; None when it is accepted."""
    try:
        check(load_config(None, overrides, Config))
    except ConfigError as error:
        message = str(error)
        assert "\n" not in message
        return message
    return None
