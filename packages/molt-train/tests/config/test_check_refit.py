"""A prefix cache that outlives its weights is no way to be on policy."""
# ruff: noqa: TID252 - the folders of tests are no installed package

from .refusals import refusal


def test_a_stale_cache_is_refused_where_every_token_is_to_be_on_policy():
    says = refusal("engine.keep_stale_cache=true", "train.max_staleness=0")
    assert says.startswith("engine.keep_stale_cache is true, but with train.max_staleness 0")
    assert refusal("engine.keep_stale_cache=true", "train.max_staleness=1") is None
    assert refusal("train.max_staleness=0") is None
