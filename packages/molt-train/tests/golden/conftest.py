"""What other people's programs computed, and their rows on our flat axis of action tokens."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from molt.train.window.aggregate import rollout_weights

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Golden:
    """One file: its cases, and the rows that they share."""

    content: dict[str, Any]

    def cases(self, **wanted: Any) -> list[dict[str, Any]]:
        """Those with the given values; never none, so that a test cannot pass by comparing nothing."""
        found = [case for case in self.content["cases"] if wanted.items() <= case.items()]
        assert found, f"no case with {wanted}"
        return found

    @property
    def num_actions(self) -> list[int]:
        return [sum(row) for row in self.content["mask"]]

    def actions(self, matrix: list[list[float]]) -> torch.Tensor:
        """The action slots of a matrix of rows, row by row, float64 [N]."""
        rows = zip(matrix, self.content["mask"], strict=True)
        slots = [value for row, mask in rows for value, m in zip(row, mask, strict=True) if m]
        return torch.tensor(slots, dtype=torch.float64)

    def each_token(self, values: Any) -> torch.Tensor:
        """One value a row, at each of its action tokens, [N]."""
        return torch.as_tensor(values).repeat_interleave(torch.tensor(self.num_actions))

    def weights(self, aggregation: Any) -> torch.Tensor:
        """What each token counts, [N], where every row is a rollout of a prompt of its own."""
        rows = list(range(len(self.num_actions)))
        weights = rollout_weights(self.num_actions, rows, aggregation=aggregation, length=self.content["length"])
        return self.each_token(weights)


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Golden]:
    """The values that a program left, by its name."""
    return lambda name: Golden(json.loads((HERE / f"{name}.json").read_text()))
