"""Weights in 4 and 8 bits: the published values and codes, the same bytes on every rank."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from fsdpctl.checkpoint.manifest import TensorInfo
from fsdpctl.checkpoint.quantized import DequantizedTensors, QuantizedTensors
from fsdpctl.checkpoint.staging import DTYPE_NAMES, tensor_bytes
from fsdpctl.config.compose import compose_config
from fsdpctl.errors import CheckpointError, UsageError
from fsdpctl.models.build_model import build_model
from fsdpctl.models.custom_ops import fuse_kernels
from fsdpctl.models.quantized import (
    BLOCK,
    GROUP,
    INT8,
    NF4,
    NF4_VALUES,
    QUANT_FORMATS,
    FrozenLinear,
    QuantFormat,
    count_weights,
)
from fsdpctl.plan.layout import Span
from fsdpctl.resolve.machine import assign_ranks
from fsdpctl.resolve.rules import validate
from tests.fused import fused_by
from tests.matrix import fast

# Two blocks each, by quantize_4bit(quant_type="nf4", blocksize=64) of bitsandbytes 0.50.2.
THEIRS = {
    "linear": "00000000001111111111111112222222222333333344444445555556666667777778888899999aaaaaa"
    "bbbbbbcccccccdddddddddeeeeeeeeeeeeeefffffffff",
    "drawn": "4466a96183887bb6329a936da568cca4575897997a679e325ab866966acf33d55bcc2f5915553c6b7a47"
    "b5c96f17337ad2990168879994b36077b93745e58cbd",
    "waves": "77777777777777777778767876786688569847a649a45b927d62ad32db15f70b9659856a747a649a45b8"
    "37b639b44c926d629d33cb25e719e31dd13f908f40de",
}
KEY = "model/a.weight"


def weights(name: str) -> torch.Tensor:
    if name == "linear":
        return torch.linspace(-3, 3, 128)
    if name == "drawn":
        return torch.randn(128, generator=torch.Generator().manual_seed(0))
    return torch.sin(torch.arange(128) * 1.7) * torch.linspace(0.1, 2, 128) ** 3


def codes_of(packed: torch.Tensor, blocks: int) -> list[int]:
    pairs = packed[8 : 8 + blocks * BLOCK // 2]
    codes: list[int] = torch.stack((pairs >> 4, pairs & 15), -1).flatten().tolist()
    return codes


@pytest.mark.parametrize("name", THEIRS)
def test_codes_are_those_of_bitsandbytes(name):
    packed = NF4.quantize(weights(name))
    assert "".join(f"{code:x}" for code in codes_of(packed, 2)) == THEIRS[name]
    largest = weights(name).view(2, BLOCK).abs().amax(-1, keepdim=True)
    exact = torch.tensor(NF4_VALUES)[codes_of(packed, 2)].view(2, BLOCK) * largest
    ours = NF4.dequantize(packed, (2, BLOCK), torch.float32)
    assert (ours - exact).abs().max() <= 2e-6 * largest.max()  # only two scales: both are exact


def test_halfway_between_two_values_the_lower_one_is_taken():
    values = torch.tensor(NF4_VALUES)
    between = (values.double()[1:] + values.double()[:-1]).div(2).float()
    above = torch.nextafter(between, torch.tensor(2.0))
    block = torch.cat((values, between, above, torch.ones(18)))
    codes = codes_of(NF4.quantize(block), 1)
    assert (codes[:16], codes[16:31], codes[31:46]) == ([*range(16)], [*range(15)], [*range(1, 16)])


@pytest.mark.parametrize("size", [1e-42, 1e-30, 1.0, 1e37])
def test_scales_keep_two_digits_beside_scales_a_thousand_times_as_large(size):
    generator = torch.Generator().manual_seed(1)
    flat = torch.randn(2 * GROUP // BLOCK, BLOCK, generator=generator)
    flat *= 10 ** (-3 * torch.rand(len(flat), 1, generator=generator))
    flat[2:4] = 0
    flat *= size / flat.abs().max()
    ours = NF4.dequantize(NF4.quantize(flat), tuple(flat.shape), torch.float32)
    assert (ours[2:4] == 0).all()
    largest = flat.abs().amax(-1)
    error = (ours.abs().amax(-1) - largest).abs()
    assert (error <= 0.05 * largest + 2e-45).all()  # the smallest number
    assert (error <= 0.012 * largest + 2e-45)[largest > size / 5].all()


def test_half_a_byte_and_a_sixtieth_per_weight():
    assert NF4.num_bytes(GROUP) == NF4.group_bytes == 256 * 33 + 8
    assert 0.5161 < NF4.num_bytes(4096 * 14336) / (4096 * 14336) < 0.5162


@pytest.mark.parametrize("packing", QUANT_FORMATS.values())
@pytest.mark.parametrize("numel", [1, 63, 64, 65, GROUP - 1, GROUP, GROUP + 1, 3 * GROUP + 100])
def test_the_bytes_of_a_weight_are_known_before_it(packing, numel):
    assert len(packing.quantize(torch.randn(numel))) == packing.num_bytes(numel)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_eight_bits_an_error_is_at_most_half_a_code(dtype):
    generator = torch.Generator().manual_seed(1)
    flat = torch.randn(2 * GROUP // BLOCK + 3, BLOCK, generator=generator)
    flat *= 10 ** (4 * torch.randn(len(flat), 1, generator=generator))
    flat[2:4] = 0
    ours = INT8.dequantize(INT8.quantize(flat), tuple(flat.shape), dtype).float()
    assert (ours[2:4] == 0).all()
    largest = flat.abs().amax(-1, keepdim=True)
    rounding = 0 if dtype == torch.float32 else 2**-8
    scale = largest / 127 * (1 + 2**-8)  # at most, in bf16
    assert ((ours - flat).abs() <= scale / 2 + largest * rounding).all()
    again = INT8.dequantize(INT8.quantize(ours), tuple(flat.shape), torch.float32)
    assert dtype != torch.float32 or (again - ours).abs().max() <= largest.max() * 2**-8
    assert INT8.num_bytes(numel := 4096 * 14336) == numel * 66 / 64


@pytest.mark.filterwarnings("ignore")  # torch's warnings about its own code
@pytest.mark.parametrize("backend", fast("eager", slow=["inductor"]))
@pytest.mark.parametrize(("packing", "dtype"), [
    (NF4, torch.bfloat16), (INT8, torch.float32), (QUANT_FORMATS["float32"], torch.bfloat16),
])  # fmt: skip
def test_one_fused_kernel_gives_the_same_bits_for_all_shapes(packing, dtype, backend):
    with fused_by(backend) as graphs:
        for numel in (3 * GROUP + 100, 2 * GROUP, 200 * GROUP, 5, GROUP, 130 * GROUP + 64):
            packed = packing.quantize(torch.randn(numel))
            fused = packing.dequantize(packed, (numel,), dtype)
            with fuse_kernels(None):
                assert torch.equal(packing.dequantize(packed, (numel,), dtype), fused)
        assert graphs() == int(packing in (NF4, INT8))


@pytest.mark.parametrize("packing", QUANT_FORMATS.values())
@pytest.mark.parametrize(("rows", "columns"), [(48, 80), (160, 256), (7, 9)])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_product_keeps_no_weights_for_backward(rows, columns, is_transposed, dtype, packing):
    base = Conv1D(columns, rows) if is_transposed else nn.Linear(columns, rows)
    base.requires_grad_(False)
    nn.init.normal_(base.weight)
    layer = FrozenLinear(base, is_transposed=is_transposed)
    layer.quantize(packing)
    layer.weight.copy_(packing.quantize(base.weight))
    layer.bias.data = layer.bias.to(dtype)
    weight = packing.dequantize(layer.weight, (rows, columns), dtype)
    args = torch.randn(2, 3, rows if is_transposed else columns, dtype=dtype)
    ours, theirs = args.clone().requires_grad_(), args.clone().requires_grad_()
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):  # type: ignore[func-returns-value]
        out = layer(ours)
    expected = F.linear(theirs, weight.t() if is_transposed else weight, layer.bias)
    assert torch.equal(out, expected)
    (torch.sin(out)).sum().backward()
    torch.sin(expected).sum().backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    assert torch.equal(ours.grad, theirs.grad)
    assert {each.dtype for each in saved} == {torch.uint8}
    assert sum(each.nbytes for each in saved) == packing.num_bytes(rows * columns)


class Stored:
    """A source of one weight that counts the elements read."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values, self.num_read = values, 0

    def names(self, kind: str) -> list[str]:
        return ["a.weight"]

    def info(self, key: str) -> TensorInfo:
        return TensorInfo(list(self.values.shape), DTYPE_NAMES[self.values.dtype])

    def read(self, key: str, span: Span | None = None) -> Iterator[tuple[Span, memoryview]]:
        span = span or Span(0, self.values.numel())
        for start in range(span.start, span.stop, 1000):
            part = Span(start, min(start + 1000, span.stop))
            self.num_read += part.numel
            yield part, tensor_bytes(self.values.view(-1)[part.start : part.stop].clone())


def read(source: object, span: Span | None = None) -> bytes:
    return b"".join(bytes(data) for _, data in source.read(KEY, span))  # type: ignore[attr-defined]


@pytest.mark.parametrize("packing", QUANT_FORMATS.values())
def test_a_part_of_the_bytes_is_made_of_its_groups_alone(packing: QuantFormat) -> None:
    shape = (1100, 1000)  # more groups than are read at a time
    stored = Stored(torch.randn(shape).bfloat16())
    source = QuantizedTensors(stored, {"a.weight": shape}, packing)
    whole = read(source)
    assert whole == bytes(packing.quantize(stored.values.float()).numpy())
    assert source.info(KEY) == TensorInfo([packing.num_bytes(1_100_000)], "U8")
    for start, stop in (
        (0, 1),
        (packing.group_bytes - 1, packing.group_bytes + 1),
        (100, 9000),
        (len(whole) - 3, len(whole)),
    ):
        stored.num_read = 0
        assert read(source, Span(start, stop)) == whole[start:stop]
        size = packing.group_bytes
        assert stored.num_read <= GROUP * (1 + -(-stop // size) - start // size)
    again = DequantizedTensors(stored, {"a.weight": shape}, packing)
    floats = packing.dequantize(packing.quantize(stored.values.float()), shape, torch.float32)
    assert read(again) == bytes(tensor_bytes(floats))
    assert read(again, Span(16383, 16386)) == bytes(tensor_bytes(floats.view(-1)[16383:16386]))
    with pytest.raises(CheckpointError, match=r"a.weight: expected shape \[1000, 1100\], got"):
        QuantizedTensors(stored, {"a.weight": (1000, 1100)}, packing).info(KEY)
    packed = Stored(packing.quantize(stored.values.float()))
    assert read(QuantizedTensors(packed, {"a.weight": shape}, packing)) == whole


@pytest.mark.parametrize("packing", QUANT_FORMATS.values())
def test_all_linear_layers_but_the_head_are_quantized_and_weights_are_counted(packing):
    args = ["model.vocab_size=64", "model.lora.rank=2", "model.lora.targets=q_proj"]
    plain = build_model(compose_config(args).config.model)
    module = build_model(compose_config([*args, f"model.base_dtype={packing.name}"]).config.model)
    names = {name for name, param in module.named_parameters() if param.dtype == torch.uint8}
    assert names == {name for name, _ in plain.named_parameters() if name.endswith("_proj.weight")}
    assert count_weights(module) == count_weights(plain)


@pytest.mark.parametrize(("args", "error"), [
    (["model.base_dtype=nf4"], "only valid with adapters; set model.lora.rank=16"),
    (["model.base_dtype=int4", "model.lora.rank=2"], "expected nf4, int8, float32, or auto"),
])  # fmt: skip
def test_what_cannot_be_quantized_is_rejected(args, error):
    settings = ["model.vocab_size=64", *args]
    with pytest.raises(UsageError, match=error):
        build_model(validate(assign_ranks(compose_config(settings).config)).model)
