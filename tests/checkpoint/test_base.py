"""Weights that a run starts with, and no file has."""

import pytest
import torch

from fsdpctl.checkpoint.base import InitialAdapters
from fsdpctl.checkpoint.manifest import PARAMETER, tensor_key
from fsdpctl.checkpoint.tensor_file import joined
from fsdpctl.checkpoint.tensors import tensor_bytes, tensor_of
from fsdpctl.comm.codes import split
from fsdpctl.config.compose import compose_config
from fsdpctl.models.registry import initialize_parameter
from fsdpctl.plan.layout import Span


@pytest.mark.parametrize("span", [None, Span(5, 23)])
def test_adapters_are_drawn_by_their_names_and_the_seed(span):
    model = compose_config(["model=llama_tiny", "model.lora.rank=4"]).config.model
    names = [f"blocks.0.attention.q_proj.lora_{side}.weight" for side in "AB"]
    source = InitialAdapters(dict.fromkeys(names, (4, 8)), model, 7)
    for name in names:
        wanted = torch.full((4, 8), float("nan"))
        initialize_parameter(name, wanted, seed=7, config=model)
        ((place, values),) = source.read(tensor_key(PARAMETER, name), span)
        part = span or Span(0, 32)
        assert place == part
        assert tensor_of(values, "F32").equal(wanted.view(-1)[part.start : part.stop])


def test_a_master_is_joined_from_its_half_and_its_remainder():
    weights = torch.tensor([1.0, -1.0, 3.1415927, -2.7182817, 1e-20, 0.0])
    half, remainder = torch.empty(6, dtype=torch.bfloat16), torch.empty(6, dtype=torch.int8)
    split(weights.clone(), half, remainder)
    whole = tensor_of(joined(tensor_bytes(half), tensor_bytes(remainder)), "F32")
    assert ((whole - weights).abs() <= weights.abs() * 2.0**-16).all()
