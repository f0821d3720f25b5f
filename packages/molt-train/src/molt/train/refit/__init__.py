"""Stage 10, refit: the actor's weights into the engines, through vLLM's weight-transfer API.

Two halves: `sender.py` runs on the actor ranks, `receivers.py` in vLLM's workers (the one module here that imports
vllm). On CUDA weights cross over vLLM's own `nccl` backend; on the CPU over its twin of gloo.
"""
