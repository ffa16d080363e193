"""One member as plain torch has it: eager autograd and `torch.optim`."""
