"""`/v1/models` in the shape of either vendor: one model, the policy."""

from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

Vendor = Literal["openai", "anthropic"]


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The policy as clients see it."""

    name: str
    max_model_len: int
    """Context window in tokens."""
    created: int
    """Unix time in seconds."""

    def entry(self, vendor: Vendor) -> dict[str, Any]:
        """The model object."""
        if vendor == "openai":
            shared = {"id": self.name, "object": "model", "created": self.created, "owned_by": "molt"}
            return shared | {"max_model_len": self.max_model_len}
        return {
            "type": "model",
            "id": self.name,
            "display_name": self.name,
            "created_at": datetime.fromtimestamp(self.created, UTC).isoformat(),
            "lifecycle": "active",
            "max_input_tokens": self.max_model_len,
            "max_tokens": self.max_model_len,
            "max_model_len": self.max_model_len,
        }

    def listing(self, vendor: Vendor) -> dict[str, Any]:
        """The list of models."""
        if vendor == "openai":
            return {"object": "list", "data": [self.entry(vendor)]}
        return {"data": [self.entry(vendor)], "has_more": False, "first_id": self.name, "last_id": self.name}
