"""Cut a torch model into stages."""

from modelfleet.frameworks.torch.cutting.model_pieces import pieces

__all__ = ["pieces"]
