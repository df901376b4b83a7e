"""The kernel of tiles in C: the bits of operators, for all dtypes, magnitudes and threads."""

import pytest
import torch
from torch import Tensor, nn

from fsdpctl.engine.build import Sharding
from fsdpctl.engine.precision import Precision
from fsdpctl.engine.shard import shard_model
from fsdpctl.io import native
from fsdpctl.optim import tiles
from fsdpctl.optim.adamw import ShardedAdamW

BF16, F32 = torch.bfloat16, torch.float32
PRECISIONS = {
    "float32": Precision(),
    "24 bits": Precision(BF16, F32, BF16, has_remainders=True),
    "24 bits, gradients in bf16": Precision(BF16, BF16, BF16, has_remainders=True),
}
EXPONENTS = torch.tensor([-45.0, -30.0, -12.0, -6.0, 0.0, 6.0, 15.0])  # of denormals to large ones


def stepped(precision: str, dtype: torch.dtype, scale: float | None) -> dict[str, Tensor]:
    """Return all states after some steps with gradients of any magnitude, some of them zero."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(65, 311), nn.Linear(311, 3))  # of odd sizes, large and small
    model = shard_model(module, Sharding("no_shard", precision=PRECISIONS[precision]))
    optimizer = ShardedAdamW(model, lr=0.02, state_dtype=dtype)
    generator = torch.Generator().manual_seed(2)
    for step in range(5):
        model(torch.randn(4, 65, dtype=PRECISIONS[precision].param_dtype or F32)).sum().backward()
        for run, _ in optimizer.runs:
            gradient = run.gradient()
            assert gradient is not None
            order = torch.randint(len(EXPONENTS), (gradient.numel(),), generator=generator)
            drawn = torch.randn(gradient.numel(), generator=generator) * 10 ** EXPONENTS[order]
            gradient.copy_(drawn * (order != step))
        optimizer.step(grad_scale=None if scale is None else torch.tensor(scale))
        optimizer.zero_grad()
    found = {
        f"{number} {name}": value.clone()
        for number, (_, state) in enumerate(optimizer.run_states())
        for name, value in state.items()
    }
    for number, shard in enumerate(model.flat_shards()):
        found[f"{number} master"] = shard.master.clone()
        if shard.remainder is not None:
            found[f"{number} remainder"] = shard.remainder.clone()
    return found


@pytest.mark.parametrize("scale", [None, 3.7])
@pytest.mark.parametrize("dtype", [F32, BF16, torch.int8])
@pytest.mark.parametrize("precision", list(PRECISIONS))
def test_the_kernel_computes_the_bits_of_operators(precision, dtype, scale, monkeypatch):
    if precision == "float32" and dtype == F32:
        pytest.skip("torch's kernel steps these")
    found = stepped(precision, dtype, scale)
    assert native.native_paths()["tiles"].startswith("compiled with")
    monkeypatch.setattr(native, "_LEAST", 64)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        in_parts = stepped(precision, dtype, scale)
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setattr(tiles, "native", lambda *_, **__: None)
    expected = stepped(precision, dtype, scale)
    assert found.keys() == in_parts.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.isfinite(value.float()).all(), name
        assert torch.equal(found[name], value), name
        assert torch.equal(in_parts[name], value), name
