"""The policy on this rank: AutoModel's own model class, sharded by FSDP2 over all ranks."""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from nemo_automodel import NeMoAutoModelForCausalLM
from nemo_automodel.components.distributed.config import DistributedSetup, FSDP2Config
from nemo_automodel.components.distributed.mesh import ParallelismSizes
from torch.distributed.fsdp import MixedPrecisionPolicy

from molt.train.actor.cpu_build import cpu_build
from molt.train.actor.offload import fsdp_policy
from molt.train.config import ActorConfig


@dataclass(frozen=True)
class Policy:
    """A sharded model, the device it is on, and the meshes that its gradients are reduced over."""

    model: torch.nn.Module
    device: torch.device
    mesh: Any
    compute_dtype: torch.dtype

    @property
    def dp_size(self) -> int:
        """Ranks that share the data; FSDP averages gradients over them."""
        return torch.distributed.get_world_size()

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Forward passes run inside it: FSDP casts on several ranks, but a single rank is not wrapped."""
        if self.compute_dtype == torch.float32 or self.dp_size > 1:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)


def load_policy(path: str, settings: ActorConfig) -> Policy:
    """Load the Hugging Face checkpoint at `path`, float32 master weights, forward pass in `settings.dtype`.

    The default process group must be up: nccl on CUDA, gloo elsewhere.
    """
    compute_dtype = getattr(torch, settings.dtype)
    precision = MixedPrecisionPolicy(  # the default of FSDP2Config computes in bfloat16
        param_dtype=compute_dtype, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    with cpu_build():
        setup = DistributedSetup.build(
            FSDP2Config(
                mp_policy=precision,
                offload_policy=fsdp_policy(settings.offload),
                activation_checkpointing=settings.activation_checkpointing,
            ),
            ParallelismSizes(),
            activation_checkpointing=settings.activation_checkpointing,
        )
        model = NeMoAutoModelForCausalLM.from_pretrained(
            path,
            torch_dtype=torch.float32,
            use_liger_kernel=False,
            attn_implementation="sdpa",
            distributed_setup=setup,
        )
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    model.train()
    return Policy(model=model, device=device, mesh=setup.mesh_context, compute_dtype=compute_dtype)
