"""What we use of torch in private does what we say, in the installed version."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_videoscale.compat.names import MissingNameError
from lightning_videoscale.compat.patching import patch
from lightning_videoscale.compat.torch import (
    attention,
    autograd,
    checkpoint,
    compilation,
    cuda,
    data_parallel,
    distributed,
    loaders,
    modules,
    trees,
    versions,
)
from tests.distributed.pool import ProcessPool

Ranks = Callable[[int], ProcessPool]

# -- autograd ----------------------------------------------------------------------------------------------------------


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


def test_past_autograd_nothing_is_recorded() -> None:
    x = torch.ones(2, requires_grad=True)
    with autograd.past_autograd():
        assert (2 * x).grad_fn is None
    assert (2 * x).grad_fn is not None


def test_transforms_of_functions_are_noticed() -> None:
    inside: list[bool] = []

    def f(x: Tensor) -> Tensor:
        inside.append(autograd.function_transforms_active())
        return x.sum()

    for transform in (torch.func.grad, torch.func.vmap):
        transform(f)(torch.ones(2))
    assert inside == [True, True]
    assert not autograd.function_transforms_active()


def test_forward_mode_is_noticed() -> None:
    assert not autograd.in_forward_mode()
    with forward_ad.dual_level():
        assert autograd.in_forward_mode()


def test_the_innermost_pack_hook_is_found() -> None:
    def pack(x: Tensor) -> Tensor:
        return x

    assert autograd.saved_tensors_pack_hook() is None
    with torch.autograd.graph.saved_tensors_hooks(pack, pack):
        assert autograd.saved_tensors_pack_hook() is pack


def test_a_call_comes_after_the_last_gradient() -> None:
    happened: list[str] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: happened.append("gradient"))
    loss = (2 * x).sum()
    loss.register_hook(lambda _: autograd.when_backward_ends(lambda: happened.append("end")))
    loss.backward()
    assert happened == ["gradient", "end"]


def test_an_unsafe_view_is_no_view() -> None:
    x = torch.arange(6.0)
    y = autograd.unsafe_view(x, torch.Size((2, 3)))
    assert y.data_ptr() == x.data_ptr()
    assert y.shape == (2, 3)
    assert not y._is_view()
    assert x.view(2, 3)._is_view()


# -- modules -----------------------------------------------------------------------------------------------------------


def test_hooks_of_every_kind_are_seen() -> None:
    module = nn.Identity()
    assert modules.hooks_of(module) is None
    for register in ("forward_pre", "forward", "full_backward_pre", "full_backward"):
        handle = getattr(module, f"register_{register}_hook")(lambda *_: None)
        assert sum(map(len, modules.hooks_of(module))) == 1
        handle.remove()
    assert modules.hooks_of(module) is None


def test_compiled_modules_are_known() -> None:
    module = nn.Linear(1, 1)
    assert not modules.is_compiled(module)
    assert modules.is_compiled(torch.compile(module))  # type: ignore[arg-type]
    assert not modules.is_compiled(module)
    module.compile()
    assert modules.is_compiled(module)


def test_compiled_code_serves_all_values_of_a_modules_integers() -> None:
    class Shares(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([piece * 2 for piece in x.split(self.sizes)])

    module, graphs = Shares(), CompileCounterWithBackend("eager")
    call = compilation.with_integers_that_vary(torch.compile(module.forward, backend=graphs, fullgraph=True))
    for size in range(2, 14):
        module.sizes = [size, size + 1]
        x = torch.arange(2.0 * size + 1)
        assert torch.equal(call(x), 2 * x)
    assert graphs.frame_count == 2


def test_buffers_by_name() -> None:
    module, shared = nn.Module(), torch.ones(1)
    module.register_buffer("kept", shared)
    module.register_buffer("again", shared)
    module.register_buffer("passing", torch.ones(1), persistent=False)
    module.register_buffer("nothing", None)
    assert list(modules.buffers_of(module)) == ["kept", "again", "passing", "nothing"]
    assert modules.non_persistent_buffers(module) == {"passing"}


def test_children_come_back_in_their_order() -> None:
    network = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    first, second = network
    restore = modules.keep_children(network)
    network[0] = nn.Identity()
    del network[1]
    network.append(nn.Tanh())
    restore()
    assert list(network.named_children()) == [("0", first), ("1", second)]


def test_attributes_but_children() -> None:
    network = nn.Sequential(nn.ReLU())
    network.note = "x"  # type: ignore[assignment]
    held = modules.attributes_but_children(network)
    assert held["note"] == "x"
    assert network[0] not in trees.tree_leaves(held)
    assert network[0] in trees.tree_leaves(vars(network))


def test_some_tensors_are_changed_and_parameters_stay_themselves() -> None:
    network = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    norm, weight = network[0], network[0].weight
    modules.change_tensors(norm, lambda x: x + 1 if x.is_floating_point() else x)
    assert norm.weight is weight
    assert norm.weight.tolist() == norm.running_var.tolist() == [2.0, 2.0]
    assert norm.num_batches_tracked == 0


# -- loaders, trees, versions, checkpoints -----------------------------------------------------------------------------


def test_a_loader_is_copied_with_other_settings() -> None:
    loader = DataLoader(list(range(6)), batch_size=2)
    assert [batch.tolist() for batch in loaders.reordered_loader(loader, [[5, 4], [0]])] == [[5, 4], [0]]
    assert loaders.copied_loader(loader, num_workers=3).num_workers == 3
    assert loader.num_workers == 0
    with pytest.raises(MissingNameError):
        loaders.copied_loader(loader, no_such_setting=1)


class Around(loaders.WorkersWithin):
    def __init__(self, own: Any) -> None:
        self._own = own


def test_persistent_workers_are_those_of_the_loader_within() -> None:
    loader = DataLoader(list(range(4)), num_workers=1, persistent_workers=True)
    around = Around(loader)
    assert [int(x) for x in loader] == [0, 1, 2, 3]
    assert around._iterator is loader._iterator is not None
    loader._iterator._shutdown_workers()
    around._iterator = None
    assert loader._iterator is None
    assert not hasattr(Around([1, 2]), "_iterator")


def test_trees() -> None:
    tree = {"a": [torch.ones(1), 2], "b": (3,)}
    assert len(trees.tree_leaves(tree)) == 3
    assert trees.tree_map_only(int, lambda x: -x, tree)["b"] == (-3,)
    paths = [trees.keystr(path) for path, _ in trees.tree_flatten_with_path(tree)[0]]
    assert paths == ["['a'][0]", "['a'][1]", "['b'][0]"]
    assert not trees.is_wrapper(tree["a"][0])


@pytest.mark.parametrize(
    ("release", "is_wrong", "widens"),
    [("2.9.1", False, False), ("2.11.0+cu128", True, False), ("2.12.0", False, True), ("2.13.0+cpu", False, True)],
)
def test_versions(monkeypatch: pytest.MonkeyPatch, release: str, is_wrong: bool, widens: bool) -> None:
    monkeypatch.setattr(torch, "__version__", release)
    assert versions.mix_order_reduction_is_wrong() is is_wrong
    assert versions.autocast_widens_norms() is widens
    assert versions.ring_attention_is_traced() is release.startswith("2.13")


def test_a_checkpoints_metadata_names_the_known_classes_only(tmp_path: Path) -> None:
    save({"a": torch.ones(2), "b": {"c": torch.ones(1, dtype=torch.bfloat16)}}, checkpoint_id=tmp_path)
    named: set[tuple[str, str]] = set()

    class Recording(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            named.add((module, name))
            return super().find_class(module, name)

    with (tmp_path / ".metadata").open("rb") as stream:
        Recording(stream).load()
    others = {(module, name) for module, name in named if name not in checkpoint.METADATA_CLASSES.get(module, ())}
    assert ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING") in named
    assert others <= {("torch", "Size"), ("torch", "float32"), ("torch", "bfloat16")}


# -- attention and devices ---------------------------------------------------------------------------------------------


def test_attention_on_a_cpu_returns_its_log_sum_exp() -> None:
    q, k, v, grad = torch.randn(4, 1, 2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    logits = q @ k.mT * 0.3
    expected = logits.softmax(-1) @ v
    out, lse = attention.flash_cpu(q.detach(), k.detach(), v.detach(), 0.3, None)
    torch.testing.assert_close(out, expected.detach())
    torch.testing.assert_close(lse, logits.logsumexp(-1).detach())
    gradients = attention.flash_cpu_backward(grad, q.detach(), k.detach(), v.detach(), out, lse, 0.3, None)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, (q, k, v), grad))


def test_an_assertion_fails_where_the_element_is_zero() -> None:
    cuda.assert_on_device(torch.ones(1))
    with pytest.raises(RuntimeError):
        cuda.assert_on_device(torch.zeros(1))


@pytest.mark.skipif(hasattr(torch._C, "_cuda_getCurrentRawStream"), reason="this torch is built for CUDA")
def test_without_cuda_a_raw_stream_is_an_error() -> None:
    with pytest.raises(MissingNameError, match="_cuda_getCurrentRawStream"):
        cuda.current_raw_stream(0)


# -- process groups ----------------------------------------------------------------------------------------------------


def facts_of_groups() -> dict[str, Any]:
    group = dist.new_group(timeout=timedelta(seconds=50))
    before = distributed.count_collectives(group)
    dist.all_reduce(torch.ones(1), group=group)
    facts = {
        "listed": group in distributed.process_groups() and dist.group.WORLD in distributed.process_groups(),
        "collectives": distributed.count_collectives(group) - before,
        "timeout": distributed.timeout_of(group).total_seconds(),
    }
    distributed.set_timeout(group, timedelta(seconds=70))
    facts["timeout set"] = distributed.timeout_of(group).total_seconds()
    store = distributed.store_of(group)
    store.set(f"from {dist.get_rank()}", "hello")
    facts["heard"] = store.get(f"from {1 - dist.get_rank()}").decode()
    unbacked = dist.ProcessGroup(store, dist.get_rank(), 2)
    distributed.register_group("tests/compat", unbacked)
    facts["registered"] = torch._C._distributed_c10d._resolve_process_group("tests/compat").size()  # type: ignore[arg-type]
    dist.destroy_process_group(group)
    return facts


def test_groups_tell_of_themselves(ranks: Ranks) -> None:
    expected = {"listed": True, "collectives": 1, "timeout": 50, "timeout set": 70, "heard": "hello", "registered": 2}
    assert ranks(2).run(facts_of_groups) == [expected, expected]


def exchanged() -> tuple[list[float], list[float]]:
    rank = dist.get_rank()
    message = torch.arange(3.0) + 10 * rank  # 1 element to rank 0, 2 to rank 1
    pending = distributed.traceable_all_to_all(message, [1 + rank] * 2, [1, 2], dist.group.WORLD)
    gathered = torch.empty(2)
    versions.all_gather_single(gathered, torch.tensor([float(rank)]))
    return distributed.traceable_wait(pending).tolist(), gathered.tolist()


def test_collectives_that_can_be_traced_and_that_were_renamed(ranks: Ranks) -> None:
    assert ranks(2).run(exchanged) == [([0, 10], [0, 1]), ([1, 2, 11, 12], [0, 1])]


# -- DDP and FSDP2 -----------------------------------------------------------------------------------------------------


def calls_of_ddp() -> list[str]:
    model = DistributedDataParallel(nn.BatchNorm1d(2))
    called: list[str] = []
    for owner, name in data_parallel.buffer_broadcasts(model):
        method = getattr(owner, name)
        patch(owner, name, lambda method=method, name=name: (called.append(name), method())[1])
    model(torch.randn(4, 2))
    return called


def buckets_of_ddp() -> list[bool]:
    model, new = DistributedDataParallel(nn.Linear(2, 2)), []
    for _ in range(3):
        loss = model(torch.randn(4, 2)).sum()
        new.append(data_parallel.has_new_buckets(model))
        loss.backward()
    return new


def test_ddp_makes_its_buckets_anew_in_the_second_step(ranks: Ranks) -> None:
    assert ranks(2).run(buckets_of_ddp) == [[False, True, True]] * 2


def test_ddp_waits_for_buffers_where_we_say(ranks: Ranks) -> None:
    assert ranks(2).run(calls_of_ddp) == [["_sync_buffers"]] * 2


def calls_of_fsdp2() -> tuple[list[str], list[list[str]], list[Any]]:
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    under_way: list[list[str]] = []
    for layer in network:
        layer.register_forward_hook(lambda *_: under_way.append(names_of(data_parallel.modules_in_forward(network))))
        fully_shard(layer)
    fully_shard(network)
    names = {module: name for name, module in network.named_modules()}

    def names_of(found: list[Any]) -> list[str]:
        return sorted(names[module] for module in found)

    called: list[str] = []
    undos = []
    for owner, name in data_parallel.gathers_and_reductions(network):
        method = getattr(owner, name)

        def counted(*args: Any, method: Any = method, name: str = name, **kwargs: Any) -> Any:
            called.append(name)
            return method(*args, **kwargs)

        undos.append(patch(owner, name, counted))
    network(torch.ones(1, 2)).sum().backward()
    for undo in undos:
        undo()
    return called, under_way, data_parallel.modules_in_forward(network)


def test_fsdp2_waits_where_we_say_and_tells_whose_forward_is_under_way(ranks: Ranks) -> None:
    for called, under_way, afterwards in ranks(2).run(calls_of_fsdp2):
        assert called.count("pre_forward") == called.count("pre_backward") == called.count("post_backward") == 2
        assert under_way == [["", "0"], ["", "1"]]
        assert afterwards == []
    assert data_parallel.modules_in_forward(nn.Linear(1, 1)) == []
