"""zipccl."""
