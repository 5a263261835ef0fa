"""The methods that vLLM's layers call for a product with their weight: Emmy's operator, which falls back to torch's own.

Weights keep their (N, K) layout and stay the layer's only copy, so that LoRA, reloading and stock's kernel work as before.
"""

from __future__ import annotations

import torch

from emmy_vllm.compat import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from emmy_vllm.kernels import Kernels, Table


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, table: int) -> torch.Tensor:
    """x @ weight^T (+ bias); with a bias torch's, which adds it on the way."""
    if bias is not None:
        return torch.nn.functional.linear(x, weight, bias)
    return torch.ops.emmy.linear(x, weight, table)


class EmmyLinearMethod(UnquantizedLinearMethod):  # type: ignore[misc]  # vLLM is not followed
    """Of a linear layer. `rows`: the most that a step gives it."""

    def __init__(self, kernels: Kernels, table: Table, rows: int) -> None:
        super().__init__()
        self.kernels, self.table, self.rows, self.number = kernels, table, rows, table.number

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.kernels.load_linear(self.table, self.rows, layer.weight.data)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return product(x, layer.weight, bias, self.number)


class EmmyHeadMethod(UnquantizedEmbeddingMethod):  # type: ignore[misc]
    """Of an lm_head, whose weight may be the embedding's."""

    def __init__(self, kernels: Kernels, table: Table, rows: int) -> None:
        super().__init__()
        self.kernels, self.table, self.rows, self.number = kernels, table, rows, table.number

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.kernels.load_linear(self.table, self.rows, layer.weight.data)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return product(x, layer.weight, bias, self.number)
