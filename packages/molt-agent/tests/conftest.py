"""Fixtures for the tests of molt-agent."""

from collections.abc import AsyncIterator

import pytest

from molt.agents.testing import ScriptedModel


@pytest.fixture
async def model() -> AsyncIterator[ScriptedModel]:
    """A model that answers "4" to everything."""
    async with ScriptedModel(["4"]) as scripted:
        yield scripted
