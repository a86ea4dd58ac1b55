"""What trainers do with weights: on a driven model all of it is what it is on one that was never driven."""

from __future__ import annotations

import copy
import functools
import io

import accelerate
import huggingface_hub
import pytest
import safetensors.torch
import torch
import torch.distributed
import torch.distributed.checkpoint
from accelerate.state import AcceleratorState, GradientState, PartialState
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from cbexp.engine import EngineError
from tests.engine.driving import drive
from tests.engine.forward.models import build, logits

FUSIONS = ["projections", "layers"]
PLACES = ["inside", "between", "after"]
TOKENS = torch.arange(12)[None]
PROMPTS = [[3, 5, 7], [11]]


def new_model(fusion):
    """Of each fusion one model; the one of fused layers is tied."""
    return build("Qwen3", tie_word_embeddings=fusion == "layers", num_hidden_layers=2)


def values(tensors):
    return {name: tensor.tolist() for name, tensor in tensors.items()}


def run_at(place, fusion, make_driver, action):
    """Call `action(model)` inside the first `on_step` of a drive, after it, or after `close`; the model, the driver."""
    model, pending = new_model(fusion), [action] if place == "inside" else []

    def on_step(index, info):
        while pending:
            pending.pop()(model)

    driver = make_driver(model, fusion=fusion, max_new_tokens=6, max_burst=2, num_blocks=16, on_step=on_step)
    driver.add_requests(PROMPTS)
    driver.drive_until_empty()
    assert not pending
    if place == "after":
        driver.close()
    if place != "inside":
        action(model)
    return model, driver


# What leaves the model as it is


def save_pretrained(model, folder, **options):
    model.save_pretrained(folder, **options)
    loaded = type(model).from_pretrained(folder)
    return values(loaded.state_dict()), logits(loaded).tolist()


def save_state_dict(model, folder):
    torch.save(model.state_dict(), folder / "weights.pt")
    return values(torch.load(folder / "weights.pt"))


def save_whole_model(model, folder):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return logits(torch.load(buffer, weights_only=False)).tolist()


def save_safetensors(model, folder):
    safetensors.torch.save_model(model, folder / "weights.safetensors")
    loaded = type(model)(copy.deepcopy(model.config)).eval()
    safetensors.torch.load_model(loaded, folder / "weights.safetensors")
    return logits(loaded).tolist()


def save_by_hub(model, folder):
    huggingface_hub.save_torch_model(model, folder)
    return values(safetensors.torch.load_file(folder / "model.safetensors"))


def save_by_accelerate(model, folder):
    accelerate.Accelerator(cpu=True).save_model(model, folder)
    return values(safetensors.torch.load_file(folder / "model.safetensors"))


def save_distributed(model, folder):
    torch.distributed.checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder, no_dist=True)
    loaded = {"model": {name: torch.zeros_like(t) for name, t in model.state_dict().items()}}
    torch.distributed.checkpoint.load(loaded, checkpoint_id=folder, no_dist=True)
    return values(loaded["model"])


@torch.no_grad()
def change_a_copy(model, folder):
    """It runs its own weights, also when they are gone."""
    before, copied = logits(model).tolist(), copy.deepcopy(model)
    copied.model.layers[0].self_attn.k_proj.weight.neg_()
    copied.model.layers[1].mlp.up_proj.weight.neg_()
    assert logits(model).tolist() == before
    return logits(copied).tolist(), str(copied.to("meta").lm_head.weight.device)


def shard_a_copy(model, folder):
    sharded = fully_shard(copy.deepcopy(model), mesh=init_device_mesh("cpu", (1,)))
    return logits(sharded).tolist()


def describe_storages(model, folder):
    state = model.state_dict().values()
    kinds = {(type(p).__name__, p.requires_grad, p.is_leaf, *vars(p)) for p in model.parameters()}
    return kinds, len({t.data_ptr() for t in state}), [t.untyped_storage().nbytes() for t in state]


READS = {
    "save_pretrained": save_pretrained,
    "save_pretrained, sharded": functools.partial(save_pretrained, max_shard_size="20KB"),
    "torch.save of the state": save_state_dict,
    "torch.save of the model": save_whole_model,
    "safetensors.torch.save_model": save_safetensors,
    "huggingface_hub.save_torch_model": save_by_hub,
    "Accelerator.save_model": save_by_accelerate,
    "torch.distributed.checkpoint": save_distributed,
    "deepcopy": change_a_copy,
    "fully_shard": shard_a_copy,
    "storages": describe_storages,
}


def run_reads(model, folder):
    """Of each, what it gives and the files that it writes, or its error."""
    seen = {}
    for name, read in READS.items():
        own = folder / name
        own.mkdir(parents=True)
        try:
            result = read(model, own)
        except Exception as error:  # noqa: BLE001 - the comparison shows it
            result = repr(error)
        files = {f.name: f.stat().st_size for f in own.rglob("*") if f.is_file()}
        seen[name] = result, files
    return seen


@pytest.fixture(scope="module", autouse=True)
def one_process():
    """DDP and sharding need a group, accelerate a state that is not of another test."""
    states = AcceleratorState, PartialState, GradientState
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    for state in states:
        state._reset_state()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("fusion", FUSIONS)
def test_reading_the_model(fusion, make_driver_anywhere, tmp_path):
    expected, seen = run_reads(new_model(fusion), tmp_path / "twin"), {}

    def read(place):
        # Files name their folder: one as long as the twin's.
        return lambda model: seen.update({place: run_reads(model, tmp_path / place[:4])})

    model, driver = run_at("inside", fusion, make_driver_anywhere, read("inside"))
    read("between")(model)
    driver.close()
    read("after")(model)
    for place in PLACES:
        for name in READS:
            assert seen[place][name] == expected[name], f"{name}, {place}"
    assert not [name for name, (result, _) in expected.items() if isinstance(result, str)], expected


# What changes weights, or moves them: the next drive follows


def other_values(model):
    return {name: tensor.detach().clone() * -1.5 for name, tensor in model.state_dict().items()}


def load_in_place(model):
    model.load_state_dict(other_values(model))


def load_assigned(model):
    model.load_state_dict(other_values(model), assign=True)
    model.tie_weights()


def share_memory(model):
    model.share_memory()
    assert all(parameter.is_shared() for parameter in model.parameters())
    load_in_place(model)


@torch.no_grad()
def share_with_another_model(model):
    other = type(model)(copy.deepcopy(model.config))
    other.load_state_dict(model.state_dict(), assign=True)
    for parameter in other.parameters():
        parameter.mul_(-1.5)


@torch.no_grad()
def flatten(model):
    """As DeepSpeed's ZeRO does; `model.flat` is written to before the next drive."""
    parameters = list(model.parameters())
    model.flat = torch.cat([parameter.flatten() for parameter in parameters])
    for parameter, part in zip(parameters, model.flat.split([p.numel() for p in parameters]), strict=True):
        parameter.data = part.view_as(parameter)


def change_dtype_and_back(model):
    model.double()
    model.float()


def train_in_ddp(model):
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    before = model.lm_head.weight.detach().clone()
    wrapped(input_ids=TOKENS, labels=TOKENS).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    assert not torch.equal(model.lm_head.weight, before)


def restore_state(model, folder):
    accelerator = accelerate.Accelerator(cpu=True)
    before = logits(model)
    accelerator.prepare_model(model, evaluation_mode=True)
    accelerator.save_state(folder)
    load_in_place(model)
    assert not torch.equal(logits(model), before)
    accelerator.load_state(folder)
    assert torch.equal(logits(model), before)


WRITES = [
    load_in_place,
    load_assigned,
    share_memory,
    share_with_another_model,
    flatten,
    change_dtype_and_back,
    train_in_ddp,
    restore_state,
]


@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("write", WRITES)
def test_writing_the_model(write, place, fusion, make_driver_anywhere, greedy, tmp_path):
    if write is restore_state:
        write = functools.partial(restore_state, folder=tmp_path)
    twin = new_model(fusion)
    write(twin)
    model, driver = run_at(place, fusion, make_driver_anywhere, write)
    if write is flatten:
        for flattened in (twin, model):
            flattened.flat.mul_(-1.5)
    assert values(model.state_dict()) == values(twin.state_dict())
    assert [p.is_contiguous() for p in model.parameters()] == [p.is_contiguous() for p in twin.parameters()]
    if place != "after":
        expected = [greedy(twin, prompt, 6) for prompt in PROMPTS]
        assert drive(driver, PROMPTS) == expected
        assert driver.resolved["fusion"] == fusion


def test_an_adapter_is_saved_and_merged(make_driver_anywhere, greedy, tmp_path):
    def adapt(model, folder):
        torch.manual_seed(3)
        adapted = get_peft_model(
            model, LoraConfig(target_modules=["k_proj", "up_proj"], init_lora_weights=False)
        )
        adapted.save_pretrained(folder)
        sizes = {f.name: f.stat().st_size for f in folder.iterdir()}
        return sizes, values(adapted.merge_and_unload().state_dict())

    expected, seen = adapt(new_model("projections"), tmp_path / "twin"), []
    for place in PLACES:
        action = lambda model, place=place: seen.append(adapt(model, tmp_path / place))  # noqa: E731
        model, driver = run_at(place, "projections", make_driver_anywhere, action)
        if place != "after":
            assert drive(driver, PROMPTS) == [greedy(model, prompt, 6) for prompt in PROMPTS]
    assert seen == [expected] * len(PLACES)


def test_offloading_after_a_drive(make_driver_anywhere):
    model, driver = run_at("between", "projections", make_driver_anywhere, lambda model: None)
    expected, tokens = logits(model), drive(driver, PROMPTS)
    accelerate.cpu_offload(model, execution_device="cpu")
    assert model.lm_head.weight.is_meta
    assert torch.equal(logits(model), expected)
    driver.add_requests(PROMPTS)
    with pytest.raises(EngineError, match="are on the meta device: offloaded"):
        driver.drive_until_empty()
    accelerate.hooks.remove_hook_from_submodules(model)
    assert drive(driver, PROMPTS) == tokens
