"""The load format `emmy_random`: seeded random weights under which a model's numbers mean something, without a checkpoint.

vLLM's own `dummy` draws everything, norms too, from (-0.001, 0.001): a model of that says nearly the same whatever its kernels do.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from vllm.config import ModelConfig

FORMAT = "emmy_random"
SPREAD = 0.1  # of the weights of a norm, as a share of what they are near


@cache
def register() -> None:
    """Makes the format known to vLLM in this process; changes nothing else, and may be called again."""
    from emmy_vllm.compat import DummyModelLoader, register_load_format

    class RandomLoader(DummyModelLoader):  # type: ignore[misc]
        """Draws every parameter by its name, so that two engines of one model hold the same ones, whatever classes they are in."""

        def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
            for name, module in model.named_modules():
                centre = _centre(model, name, module)
                for own, parameter in module.named_parameters(recurse=False):
                    fill(parameter.data, f"{name}.{own}", 0.0 if own == "bias" else centre)

    register_load_format(FORMAT, RandomLoader)


def _centre(model: torch.nn.Module, name: str, module: torch.nn.Module) -> float:
    """What a norm's weights are near: 1, or 0 where its class adds 1.

    Those of the queries' norm are such that the products of queries and keys have variance 1 whatever the model multiplies them with:
    Gemma 4, which multiplies with 1, would else attend to one key each, and to another one after the least rounding.
    """
    offset = 1.0 if type(module).__name__ == "GemmaRMSNorm" else 0.0
    attention, _, own = name.rpartition(".")
    scale = getattr(model.get_submodule(attention), "scaling", None) if own == "q_norm" else None
    weight = getattr(module, "weight", None)
    if not isinstance(scale, float) or weight is None:
        return 1.0 - offset
    return float(1 / (scale * weight.shape[-1] ** 0.5)) - offset


def fill(weight: torch.Tensor, name: str, centre: float = 1.0) -> None:
    """Draws a parameter in place by its name: of matrices N(0, 1 / fan in), so that activations keep their scale; vectors near `centre`.

    A tied weight, which has several names, keeps the values of the last.
    """
    import torch

    generator = torch.Generator(device=weight.device)
    generator.manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big"))
    drawn = torch.empty(weight.shape, dtype=torch.float32, device=weight.device).normal_(generator=generator)
    weight.copy_(drawn * weight.shape[-1] ** -0.5 if weight.dim() > 1 else centre + SPREAD * (centre or 1.0) * drawn)
