"""The formats that `torch.save` and `torch.package` write."""
