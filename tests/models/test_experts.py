"""Models of transformers with experts: routing, its loss, recomputation and counts."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fsdpctl.comm.mesh import collectives_for
from fsdpctl.errors import UsageError
from fsdpctl.estimate.trace import trace
from fsdpctl.models.build_model import build_model, count_active_parameters
from fsdpctl.models.experts import global_aux_loss
from fsdpctl.models.packed_documents import pack_documents
from fsdpctl.optim.sgd import ShardedSGD
from tests.distributed import distributed
from tests.engine.test_parity import largest_difference
from tests.matrix import fast
from tests.models.decoders import (
    CPU,
    LENGTH,
    batches_of,
    compose,
    load,
    load_decoder,
    our_loss,
    plain_module,
    save_decoder,
    their_loss,
)
from tests.operators import Operators


@pytest.mark.parametrize("case", fast(
    "qwen3_moe full model",
    slow=["qwen3_moe none global", "qwen3_moe selective model", "jetmoe none model",
     "mixtral none global", "granitemoehybrid none model", "ernie4_5_moe none global"],
))  # fmt: skip
def test_the_auxiliary_loss_is_that_of_transformers(case, tmp_path):
    """Padding does not count, at the end of a row or as a row that fills the micro-batch."""
    family, recomputes, kind = case.split()

    save_decoder(family, tmp_path, output_router_logits=True)
    args = f"activation_checkpointing={recomputes}", f"model.router_aux_loss={kind}"
    module = plain_module(tmp_path, *args)
    theirs = load_decoder(tmp_path)
    factor = "aux_loss_coef" if family == "jetmoe" else "router_aux_loss_coef"
    for model in (theirs, module.transformers_model):
        setattr(model, factor, 0.5)
    tokens, ends = batches_of(1, 1)[0][0][0].repeat(2, 1)[:3], (5, LENGTH, 0)
    mask = torch.arange(LENGTH) < torch.tensor(ends)[:, None]
    inputs, targets = tokens[:, :-1], tokens[:, 1:].where(mask, -100)
    options = {"use_cache": False, "output_router_logits": True}
    out = theirs(input_ids=inputs[:2], attention_mask=mask[:2].long(), **options)
    wanted = F.cross_entropy(out.logits.flatten(0, 1), targets[:2].flatten()) + 0.5 * out.aux_loss
    lengths = tuple((end, LENGTH - end) if 0 < end < LENGTH else (LENGTH,) for end in ends)
    documents = pack_documents(lengths, CPU, one_per_row=True, padding_starts=ends)
    module.transformers_model.eval()
    module.training = True
    loss = module(inputs, targets, 9, documents=documents) / mask.sum()
    assert loss.item() == pytest.approx(wanted.item(), abs=1e-6)
    loss.backward()
    wanted.backward()
    for name, param in theirs.named_parameters():
        if param.requires_grad:
            grad = module.get_parameter(name).grad
            torch.testing.assert_close(grad, param.grad, rtol=1e-4, atol=1e-6)


def test_rows_of_padding_alone_add_nothing(tmp_path):
    save_decoder("qwen3_moe", tmp_path, output_router_logits=True)
    tokens = torch.zeros(2, LENGTH, dtype=torch.int64)
    for kind in ("model", "global"):
        module = plain_module(tmp_path, f"model.router_aux_loss={kind}")
        module.reduce_counts = lambda counts: counts + 1  # another rank has tokens
        assert module(tokens, torch.full_like(tokens, -100)).item() == 0


@pytest.mark.parametrize("family", ["doge", "llama"])
def test_a_model_without_routers_has_no_auxiliary_loss(family, tmp_path):
    save_decoder(family, tmp_path, output_router_logits=True)
    with pytest.raises(UsageError, match="global: only valid with a model that has routers"):
        plain_module(tmp_path, "model.router_aux_loss=global")
    module = plain_module(tmp_path)
    assert not module.adds_aux_loss
    module = plain_module(tmp_path)
    module.transformers_model.z_loss_coefficient = 0.1  # as in Bamba
    with pytest.raises(UsageError, match="z_loss_coefficient=0.1: not supported; set it to 0, or"):
        module(*batches_of(1, 1)[0][0][0].chunk(2))


def test_the_auxiliary_loss_can_be_left_out(tmp_path):
    save_decoder("qwen3_moe", tmp_path, output_router_logits=True, router_aux_loss_coef=0.5)
    tokens = batches_of(1, 1)[0][0][0]
    losses = {}
    for kind in ("model", "global", "none"):
        module = plain_module(tmp_path, f"model.router_aux_loss={kind}")
        losses[kind] = module(tokens[:, :-1], tokens[:, 1:]).item()
        assert module.adds_aux_loss == (kind != "none")
    assert losses["model"] == pytest.approx(losses["global"], rel=1e-6)
    assert losses["model"] > losses["none"] + 1


@pytest.mark.slow
@distributed(world_size=2)
def test_global_balance_counts_the_tokens_of_all_ranks(rank: int, world_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(10, 4, generator=generator) for _ in range(world_size)]
    ends = [7, 10]  # padding does not count
    model = SimpleNamespace(num_experts=4, num_experts_per_tok=2)
    reduce = collectives_for(CPU).all_reduce
    data = torch.arange(10) < ends[rank]
    result = global_aux_loss([logits[rank]], data[None], model, reduce)
    counted = [each[:end] for each, end in zip(logits, ends, strict=True)]
    everywhere = torch.cat(counted)
    share = F.one_hot(everywhere.softmax(-1).topk(2).indices, 4).sum(dim=(0, 1)) / len(everywhere)
    mean = counted[rank].softmax(-1).mean(0)
    assert float(result) == pytest.approx(float(4 * (share * mean).sum()), rel=1e-6)


def test_the_choice_of_experts_is_not_recomputed(tmp_path):
    save_decoder("qwen3_moe", tmp_path)
    tokens = batches_of(1, 1)[0][0][0]
    counts = {}
    for recomputes in ("none", "full"):
        module = plain_module(tmp_path, f"activation_checkpointing={recomputes}")
        with Operators() as counted:
            module(tokens[:, :-1], tokens[:, 1:]).backward()
        counts[recomputes] = counted.counts["topk"], counted.counts["mm"]
    assert counts["full"][0] == counts["none"][0] > 0
    assert counts["full"][1] > counts["none"][1]


@pytest.mark.slow
@distributed(world_size=2)
def test_experts_without_tokens_have_zero_gradients(rank, world_size, tmp_path):
    """Equal tokens are routed to the same experts: first on each rank, then on all ranks."""
    folder = tmp_path / "in"
    if rank == 0:
        save_decoder("qwen3_moe", folder)
    collectives_for(CPU).barrier()
    for of_ranks in ([3, 7], [5, 5]):
        batches = [torch.full((2, 9), token) for token in of_ranks]
        theirs = load_decoder(folder)
        chosen = theirs(batches[rank], output_router_logits=True, use_cache=False).router_logits
        used = [set(each.topk(2).indices.flatten().tolist()) for each in chosen]
        assert all(len(each) < 4 for each in used)
        for batch in batches:
            (their_loss(theirs, batch) / world_size).backward()
        wanted = {n: p - p.grad for n, p in theirs.named_parameters() if p.grad is not None}
        model = load(compose(folder))
        optimizer = ShardedSGD(model, lr=1.0, momentum=0.0)
        our_loss(model, batches[rank]).backward()
        optimizer.step()
        trained = model.state_dict()
        assert largest_difference({n: trained[n] for n in wanted}, wanted) <= 1e-6


def test_what_a_token_uses_of_experts_is_counted(tmp_path):
    save_decoder("qwen3_moe", tmp_path)
    module = build_model(compose(tmp_path).model)
    idle = sum(p.numel() for n, p in module.named_parameters() if "experts" in n) // 2
    assert count_active_parameters(module) == sum(p.numel() for p in module.parameters()) - idle


@pytest.mark.parametrize("dtype", fast(torch.float32, slow=[torch.bfloat16]))
def test_grouped_products_are_traced_in_any_dtype(dtype, tmp_path):
    save_decoder("qwen3_moe", tmp_path)
    module = build_model(compose(tmp_path).model).to(dtype)
    tokens = torch.empty(2, LENGTH, dtype=torch.int64, device="meta")

    def run() -> Tensor:
        loss: Tensor = module(tokens, tokens)
        loss.backward()
        return loss

    passed = trace(module, [], run, "cpu", None)
    work = [each for of in passed.work.values() for each in of if "grouped" in each.name]
    rows = 2 * LENGTH * 2  # two experts for each token
    stacked = [p[0] for n, p in module.named_parameters() if "0.mlp.experts" in n]
    layer = sum(2 * rows * each.numel() for each in stacked)
    blocks = sum("experts.down_proj" in name for name, _ in module.named_parameters())
    assert (sum(each.flops for each in work), len(work)) == (3 * blocks * layer, 6 * blocks)
