"""Linear layers with frozen 4-bit weights for QLoRA (arXiv 2305.14314), computed by bitsandbytes.

We do not use its own ``Linear4bit``, which keeps the dtype of its first input, rounds the bias in
place, and on some CPUs repacks a weight that is used without gradients, so that later calls have no
gradients either.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn


def check_bitsandbytes() -> None:
    """Check that bitsandbytes is installed.

    Raises:
        ValueError: bitsandbytes is not installed.
    """
    if find_spec("bitsandbytes") is None:
        raise ValueError(
            "train_model.quantization=nf4 needs the package bitsandbytes: pip install "
            "'torchrl_grpo[qlora]', or leave it out."
        )


class QuantizedLinear(nn.Linear):
    """Linear layer with a frozen weight in NF4: 4 bits per number, and an 8-bit scale per block of 64.
    It computes in the dtype of its input or of autocast.

    Args:
        linear: layer to quantize; its bias is shared.
        device: device of the weight.

    Attributes:
        weight: packed, uint8. ``weight.dequantized()`` returns [out, in] in the original dtype,
            whose size in bytes is ``weight.dense_bytes``.

    Raises:
        ValueError: bitsandbytes is not installed.
    """

    def __init__(self, linear: nn.Linear, device: torch.device) -> None:
        check_bitsandbytes()
        from bitsandbytes import matmul_4bit
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit

        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        dense = linear.weight.detach().to(device)
        packed, state = quantize_4bit(dense, compress_statistics=True, quant_type="nf4")
        weight: Any = nn.Parameter(packed, requires_grad=False)
        weight.dequantized = partial(dequantize_4bit, packed, state)
        weight.dense_bytes = dense.nbytes
        self.weight = weight
        self._product = partial(matmul_4bit, quant_state=state)
        self.bias = linear.bias

    def forward(self, input: Tensor) -> Tensor:
        """Return the output in the dtype in which it is computed."""
        kind, dtype = input.device.type, input.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        bias = None if self.bias is None else self.bias.to(dtype)
        return self._product(input.to(dtype), self.weight, bias=bias)
