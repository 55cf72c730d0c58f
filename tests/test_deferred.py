"""pf.deferred_init: the model that is built later is bit for bit the one that is built now."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import paraflow as pf
from paraflow.births import births_of
from paraflow.models.causal_lm import CausalLM, CausalLMConfig
from paraflow.placing import place

HOST = torch.device("cpu")


def weight(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    return nn.Parameter(torch.empty(*(shape or (100, 100)), dtype=dtype))


def built_later(make: Callable[[], nn.Module]) -> nn.Module:
    with pf.deferred_init():
        module = make()
    births = births_of(module)
    assert births, "nothing was deferred"
    place(module, births, HOST)
    return module


def assert_built_alike(make: Callable[[], nn.Module]) -> nn.Module:
    pf.seed(3)
    now = make()
    following = torch.rand(3)
    pf.seed(3)
    later = built_later(make)
    assert torch.equal(torch.rand(3), following), "the random numbers that follow are others"
    for tensors in (nn.Module.named_parameters, nn.Module.named_buffers):
        mine, theirs = dict(tensors(later, remove_duplicate=False)), dict(tensors(now, remove_duplicate=False))
        assert mine.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert mine[name].dtype == tensor.dtype, name
            assert mine[name].requires_grad == tensor.requires_grad, name
            assert torch.equal(mine[name], tensor), name
    return later


class Initialised(nn.Module):
    def __init__(self, initialise: Callable[[nn.Parameter], Any], shape: tuple[int, ...] = (100, 100)) -> None:
        super().__init__()
        self.weight = weight(*shape)
        initialise(self.weight)


init = nn.init
INITIALISERS = {
    "uniform": init.uniform_,
    "normal": init.normal_,
    "truncated": lambda w: init.trunc_normal_(w, std=0.02),
    "truncated, many redrawn": lambda w: init.trunc_normal_(w, std=1.0, a=-0.2, b=0.3),
    "constant": lambda w: init.constant_(w, 0.3),
    "eye": init.eye_,
    "xavier": init.xavier_normal_,
    "kaiming": init.kaiming_uniform_,
    "orthogonal": init.orthogonal_,
    "sparse": lambda w: init.sparse_(w, 0.3),
    "bernoulli": lambda w: w.data.bernoulli_(0.3),
    "exponential": lambda w: w.data.exponential_(),
    "own generator": lambda w: w.data.normal_(generator=torch.Generator().manual_seed(4)),
    "through a view": lambda w: (init.normal_(w), w.data[3].zero_(), w.data.t()[2:4].mul_(3)),
    "set item": lambda w: (init.normal_(w), w.data.__setitem__((slice(None), [1, 5]), torch.ones(2))),
    "written over by itself": lambda w: (init.normal_(w), w.data.copy_(w.data.t().clone())),
    "other data": lambda w: setattr(w, "data", torch.randn(100, 100) * 0.02),
    "numbers from outside": lambda w: setattr(w, "data", torch.tensor([[float(i)] * 100 for i in range(100)])),
    "depends on values": lambda w: (init.normal_(w), w.data.add_(1) if w.sum().item() > 0 else w.data.sub_(1)),
    "drawn from values": lambda w: (init.uniform_(w), w.data.copy_(torch.bernoulli(w.data))),
    "gamma": lambda w: w.data.copy_(torch._standard_gamma(torch.ones(100, 100))),
    "many at once": lambda w: (init.normal_(w), torch._foreach_mul_([w.data, torch.ones(3)], 2.0)),
}


@pytest.mark.parametrize("name", INITIALISERS)
def test_initialisers_give_the_same_bits(name: str) -> None:
    assert_built_alike(lambda: Initialised(INITIALISERS[name]))


def test_dirac() -> None:
    assert_built_alike(lambda: Initialised(init.dirac_, (40, 40, 3)))


class Sizes(nn.Module):
    """What is computed from the weights, and beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 64, padding_idx=3)
        self.head = nn.Linear(64, 100)
        self.head.weight = self.embedding.weight
        self.copied = copy.deepcopy(self.embedding)
        self.narrow = weight(dtype=torch.float16)
        nn.init.normal_(self.narrow)
        self.cast = nn.Linear(100, 100).to(torch.bfloat16)
        self.frozen = nn.Parameter(torch.randn(100, 100), requires_grad=False)
        self.head.bias.data = self.frozen[0]
        self.norms = nn.Parameter(self.embedding.weight.norm(dim=1))
        self.joined = nn.Parameter(torch.cat([self.frozen, self.embedding.weight.detach().t() @ self.frozen]))
        like = torch.arange(100, device=self.frozen.device, dtype=torch.float32)
        self.outer = nn.Parameter(like[:, None] * torch.ones(100, 100))
        self.register_buffer("mask", torch.ones(100, 100).tril(), persistent=False)
        self.register_buffer("table", torch.outer(torch.arange(100.0), 10_000 ** -torch.linspace(0, 1, 64)))
        self.register_buffer("count", torch.tensor(3))
        self.scale = torch.full((100, 100), 2.0)


def test_ties_dtypes_and_buffers_are_those_of_a_model_built_now() -> None:
    module = assert_built_alike(Sizes)
    assert isinstance(module, Sizes)
    assert module.head.weight is module.embedding.weight
    assert torch.equal(module.scale, torch.full((100, 100), 2.0))


def test_layers_of_torch() -> None:
    assert_built_alike(lambda: nn.TransformerEncoderLayer(64, 4, 128))
    assert_built_alike(lambda: nn.Sequential(nn.Conv2d(64, 64, 3), nn.BatchNorm2d(64)))
    parametrized = nn.utils.parametrizations
    assert_built_alike(lambda: parametrized.weight_norm(nn.Linear(100, 100)))
    assert_built_alike(lambda: parametrized.spectral_norm(nn.Linear(100, 100)))
    recurrent = assert_built_alike(lambda: nn.LSTM(64, 64, 2))
    assert recurrent(torch.randn(3, 2, 64))[0].shape == (3, 2, 64)


@pytest.mark.parametrize("name", ["Bert", "GPT2", "Llama"])
def test_models_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    common = {"vocab_size": 200, "bos_token_id": 1, "eos_token_id": 2}
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    model, config = {
        "Bert": ("BertForMaskedLM", lambda: transformers.BertConfig(**common, **sizes)),
        "GPT2": ("GPT2LMHeadModel", lambda: transformers.GPT2Config(**common, n_embd=64, n_layer=2, n_head=4)),
        "Llama": ("LlamaForCausalLM", lambda: transformers.LlamaConfig(**common, **sizes)),
    }[name]
    assert_built_alike(lambda: getattr(transformers, model)(config()))


@pytest.mark.parametrize("tied", [True, False])
def test_our_own_models_also_on_the_plain_meta_device(tied: bool) -> None:
    sizes = CausalLMConfig(vocab_size=256, layers=2, hidden=64, heads=2, context=64, tied=tied, positions="learned")
    assert_built_alike(lambda: CausalLM(sizes))
    pf.seed(3)
    wanted = CausalLM(sizes).state_dict()
    pf.seed(3)
    with torch.device("meta"):
        module = CausalLM(sizes)
    place(module, births_of(module), HOST)
    assert all(torch.equal(value, wanted[name]) for name, value in module.state_dict().items())


def test_the_meta_device_inside_or_outside_the_block_changes_nothing() -> None:
    make = lambda: nn.Sequential(nn.Linear(100, 100), nn.BatchNorm1d(100))  # noqa: E731
    pf.seed(3)
    wanted = make().state_dict()
    for contexts in ((torch.device("meta"), pf.deferred_init()), (pf.deferred_init(), torch.device("meta"))):
        pf.seed(3)
        with contexts[0], contexts[1]:
            module = make()
        place(module, births_of(module), HOST)
        assert all(torch.equal(value, wanted[name]) for name, value in module.state_dict().items())


def test_parameters_keep_identity_attributes_hooks_and_their_optimizer() -> None:
    with pf.deferred_init():
        layer = nn.Linear(100, 100)
    kept, seen = layer.weight, []
    kept.decayed = False  # type: ignore[attr-defined]
    kept.register_post_accumulate_grad_hook(seen.append)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    place(layer, births_of(layer), HOST)
    assert layer.weight is kept
    assert optimizer.param_groups[0]["params"][0] is kept
    assert vars(kept) == {"decayed": False}
    layer(torch.ones(100)).sum().backward()
    assert len(seen) == 1


def test_changes_outside_the_block_are_refused_unless_they_are_of_dtype() -> None:
    with pf.deferred_init():
        layer = nn.Linear(100, 100)
    with pf.deferred_init():
        layer.weight.data.zero_()
        nn.init.ones_(layer.weight[1])
    layer.to(torch.bfloat16).requires_grad_(False)
    changed = copy.copy(layer)
    place(layer, births_of(layer), HOST)
    assert layer.weight.dtype == torch.bfloat16
    assert layer.weight.sum() == 100

    with pf.deferred_init():
        changed = nn.Linear(100, 100)
    nn.init.zeros_(changed.weight)
    with pytest.raises(pf.ModelError, match=r"weight was changed outside pf.deferred_init\(\)"):
        births_of(changed)


def test_a_copy_made_outside_the_block_has_no_record() -> None:
    with pf.deferred_init():
        layer = nn.Linear(100, 100)
    duplicate = copy.deepcopy(layer)
    with pytest.raises(pf.ModelError, match="weight was changed on the meta device"):
        place(duplicate, births_of(duplicate), HOST)


def test_mixing_with_a_tensor_that_has_no_values_is_refused() -> None:
    unknown = torch.empty(100, 100, device="meta")
    with pytest.raises(pf.ModelError, match="mixes a tensor made under"), pf.deferred_init():
        weight().data.copy_(unknown)


def test_values_do_not_depend_on_the_order_in_which_they_are_asked_for() -> None:
    pf.seed(3)
    wanted = dict(nn.Sequential(*(nn.Linear(100, 100) for _ in range(3))).named_parameters())
    pf.seed(3)
    with pf.deferred_init():
        module = nn.Sequential(*(nn.Linear(100, 100) for _ in range(3)))
    births = births_of(module)
    for name in reversed(list(births)):
        assert torch.equal(births[name].part((slice(7, 9), slice(None))), wanted[name][7:9])
