"""What a memory plan is made from and compared with: the shape of a model, and the peak of this process."""

import resource
from pathlib import Path

import torch

from molt.train.actor.memory_plan import ModelShape
from molt.train.actor.optimizer import embedding_parameters, is_hidden_matrix

_PAGE = resource.getpagesize()


def shape_of(model: torch.nn.Module) -> ModelShape:
    """The shape of a causal language model with a Transformers `config`, whole or sharded, loaded or not."""
    config = model.config.get_text_config()  # pyright: ignore[reportAttributeAccessIssue,reportCallIssue]
    embeddings = embedding_parameters(model)
    parameters = list(model.named_parameters())
    num_heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    num_experts = getattr(config, "num_experts_per_tok", None) or 0
    expert_size = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    shared_size = getattr(config, "shared_expert_intermediate_size", None) or 0
    return ModelShape(
        num_parameters=sum(p.numel() for _, p in parameters),
        num_embedding_parameters=sum(p.numel() for p in embeddings),
        num_matrix_parameters=sum(p.numel() for name, p in parameters if is_hidden_matrix(p, embeddings)),
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        query_size=num_heads * head_size,
        key_value_size=(getattr(config, "num_key_value_heads", None) or num_heads) * head_size,
        feed_forward_size=num_experts * expert_size + shared_size if num_experts else config.intermediate_size,
        num_experts_per_token=num_experts,
        vocabulary_size=config.vocab_size,
    )


class PeakMeter:
    """The most memory held since it was made: on CUDA by torch, elsewhere by the growth of this process."""

    def __init__(self) -> None:
        self._has_cuda = torch.cuda.is_available()
        if self._has_cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            # Resident now; the peak that the kernel keeps cannot be set back.
            self._before = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE

    def peak_bytes(self) -> int:
        """Bytes; on the CPU of the whole process, with all that it has allocated and not given back."""
        if self._has_cuda:
            return torch.cuda.max_memory_allocated()
        return max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - self._before)
