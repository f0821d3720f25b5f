"""Stage 9, optimizer: the policy that is trained, AutoModel sharded by FSDP2, one process a rank."""
