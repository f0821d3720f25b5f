"""`molt-train sft`: what its configuration may say."""

import pytest

from molt.train.config import Config, load_config
from molt.train.errors import ConfigError
from molt.train.launch.supervised import run_supervised


@pytest.mark.parametrize("key", ["data.epochs=2", "data.shuffle=false", 'data.sets=[{name="a", path="a.jsonl"}]'])
def test_what_would_have_no_effect_is_refused_before_anything_is_made(key, tmp_path):
    folder = tmp_path / "run"
    config = load_config(None, [key, f"run.dir={folder}", "model.path=m"], Config)
    with pytest.raises(ConfigError, match=f"^{key.partition('=')[0]} has no effect on molt-train sft"):
        run_supervised(config)
    assert not folder.exists()
