"""Models that are saved with their code: TorchScript and torch.export."""
