"""Emmy's ops as operators of torch, and a backend for torch.compile that finds them in a graph."""

from emmy.dynamo.ops import TorchOp, torch_op

__all__ = ["TorchOp", "torch_op"]
