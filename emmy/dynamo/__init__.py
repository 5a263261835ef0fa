"""Emmy's ops as operators of torch, and a backend for torch.compile that finds them in a graph."""

from torch._dynamo import list_backends, register_backend

from emmy.dynamo.backend import CompiledModule, Options, backend, compile, reports
from emmy.dynamo.ops import TorchOp, torch_op
from emmy.dynamo.report import Fallback, GraphReport, KernelUse

__all__ = [
    "CompiledModule", "Fallback", "GraphReport", "KernelUse", "Options", "TorchOp", "backend", "compile", "reports", "torch_op",
]  # fmt: skip

# Known by its entry point where Emmy is installed; elsewhere from when this package is imported.
if "emmy" not in list_backends(exclude_tags=()):
    register_backend(backend, name="emmy")
