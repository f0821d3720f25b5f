"""Fingerprints of weights, taken where they are sent and where they are served, to be compared after a refit."""

import hashlib
from collections.abc import Mapping
from typing import Literal

import torch

Level = Literal["sample", "full"]
SAMPLE_SIZE = 1024
"""Elements of a weight that a `sample` looks at: evenly spaced, the first and the last among them."""


def digest(weight: torch.Tensor, level: Level) -> str:
    """Of type, shape and elements: all of them, or a sample. Equal tensors have equal ones, wherever they lie."""
    elements = weight.detach().reshape(-1)
    if level == "sample" and elements.numel() > SAMPLE_SIZE:
        places = torch.arange(SAMPLE_SIZE, device=elements.device) * (elements.numel() - 1) // (SAMPLE_SIZE - 1)
        elements = elements[places]
    found = hashlib.blake2b(f"{weight.dtype}{list(weight.shape)}".encode(), digest_size=16)
    if elements.numel():
        found.update(elements.contiguous().cpu().view(torch.uint8).numpy().data)
    return found.hexdigest()


def differing(sent: Mapping[str, str], held: Mapping[str, str]) -> list[str]:
    """Names of weights that are not held as they were sent, or not at all, or that nobody sent."""
    names = list(dict.fromkeys([*sent, *held]))
    return [name for name in names if sent.get(name) != held.get(name)]
