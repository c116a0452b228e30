"""What `torch.save` and `torch.package` write."""
