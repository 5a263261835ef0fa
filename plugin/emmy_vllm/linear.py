"""The methods that vLLM's layers call for a product with their weight: Emmy's operator, which falls back to torch's own.

Weights keep their (N, K) layout and stay the layer's only copy, so that LoRA, reloading and stock's kernel work as before.
"""

from __future__ import annotations

import torch

from emmy_vllm.compat import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from emmy_vllm.kernels import Kernels, Table


class _Emmys:
    """What the methods share. `rows`: the most that a step gives the layer."""

    def __init__(self, kernels: Kernels, table: Table, rows: int) -> None:
        super().__init__()
        self.kernels, self.table, self.rows = kernels, table, rows
        self.number, self.adds_bias = table.number, kernels.settings.deterministic

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.kernels.load_linear(self.table, self.rows, layer.weight.data)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x @ weight^T (+ bias). With a bias it is torch's, which adds it on the way, but where stock must have no part."""
        if bias is None:
            return torch.ops.emmy.linear(x, layer.weight, self.number)
        if self.adds_bias:
            return torch.ops.emmy.linear(x, layer.weight, self.number) + bias
        return torch.nn.functional.linear(x, layer.weight, bias)


class EmmyLinearMethod(_Emmys, UnquantizedLinearMethod):  # type: ignore[misc]  # vLLM is not followed
    """Of a linear layer."""


class EmmyHeadMethod(_Emmys, UnquantizedEmbeddingMethod):  # type: ignore[misc]
    """Of an lm_head, whose weight may be the embedding's."""
