"""torch.distributed.checkpoint: read and write its folders."""
