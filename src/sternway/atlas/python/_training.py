"""Facts on training in PyTorch code: which optimizers, losses and other calls, with their literal arguments."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from sternway.atlas._records import Fact, ModuleFacts
from sternway.atlas.python._patterns import shortened
from sternway.atlas.python._reading import Reading, Use

_KINDS = {
    "torch.compile": "compile",
    "torch._dynamo.optimize": "compile",
    "torch._dynamo.eval_frame.optimize": "compile",
    "torch.jit.script": "compile",
    "torch.jit._script.script": "compile",
    "torch.autocast": "mixed precision",
    "torch.amp.autocast": "mixed precision",
    "torch.amp.autocast_mode.autocast": "mixed precision",
    "torch.cuda.amp.autocast": "mixed precision",
    "torch.cpu.amp.autocast": "mixed precision",
    "torch.cuda.amp.autocast_mode.autocast": "mixed precision",
    "torch.cpu.amp.autocast_mode.autocast": "mixed precision",
    "torch.amp.GradScaler": "mixed precision",
    "torch.amp.grad_scaler.GradScaler": "mixed precision",
    "torch.cuda.amp.GradScaler": "mixed precision",
    "torch.cuda.amp.grad_scaler.GradScaler": "mixed precision",
    "torch.nn.parallel.DistributedDataParallel": "data parallel",
    "torch.nn.parallel.distributed.DistributedDataParallel": "data parallel",
    "torch.nn.DataParallel": "data parallel",
    "torch.distributed.fsdp.FullyShardedDataParallel": "data parallel",
    "torch.distributed.fsdp.fully_shard": "data parallel",
    "torch.distributed._composable.fsdp.fully_shard": "data parallel",
    "torch.distributed.init_process_group": "process group",
    "torch.distributed.distributed_c10d.init_process_group": "process group",
    "torch.distributed.new_group": "process group",
    "torch.distributed.distributed_c10d.new_group": "process group",
    "torch.save": "checkpoint save",
    "torch.serialization.save": "checkpoint save",
    "torch.distributed.checkpoint.save": "checkpoint save",
    "torch.load": "checkpoint load",
    "torch.serialization.load": "checkpoint load",
    "torch.distributed.checkpoint.load": "checkpoint load",
    "safetensors.torch.load_file": "checkpoint load",
    "safetensors.torch.save_file": "checkpoint save",
    "torch.manual_seed": "seed",
    "torch.random.manual_seed": "seed",
    "torch.cuda.manual_seed": "seed",
    "torch.cuda.manual_seed_all": "seed",
    "torch.use_deterministic_algorithms": "seed",
    "random.seed": "seed",
    "numpy.random.seed": "seed",
    "numpy.random.default_rng": "seed",
    "torch.utils.data.DataLoader": "data loader",
    "torch.utils.data.dataloader.DataLoader": "data loader",
    "torch.utils.data.DistributedSampler": "data loader",
    "torch.utils.data.distributed.DistributedSampler": "data loader",
    "torch.autograd.backward": "backward",
    "torch.autograd.grad": "backward",
    "torch.nn.utils.clip_grad_norm_": "gradient clipping",
    "torch.nn.utils.clip_grad_value_": "gradient clipping",
    "torch.nn.utils.clip_grads_with_norm_": "gradient clipping",
    "torch.nn.utils.clip_grad.clip_grad_norm_": "gradient clipping",
    "torch.nn.utils.clip_grad.clip_grad_value_": "gradient clipping",
    "torch.nn.utils.clip_grad.clip_grads_with_norm_": "gradient clipping",
    "sternway.split.backward_input": "backward",
    "torch.autograd.graph.saved_tensors_hooks": "saved tensors",
    "torch.autograd.graph.save_on_cpu": "saved tensors",
    "torch.autograd.graph.disable_saved_tensors_hooks": "saved tensors",
    "torch.autograd.graph.allow_mutation_on_saved_tensors": "saved tensors",
    "torch.autograd.graph.register_multi_grad_hook": "hook",
    "sternway.hooks.on_grads": "hook",
    "torch.utils.checkpoint.checkpoint": "activation checkpoint",
    "torch.utils.checkpoint.checkpoint_sequential": "activation checkpoint",
    "sternway.pipeline.Pipeline": "pipeline",
}
_WRAPPERS = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper."
_KINDS |= {
    f"{_WRAPPERS}checkpoint_wrapper": "activation checkpoint",
    f"{_WRAPPERS}apply_activation_checkpointing": "activation checkpoint",
}
_EVERY_MODULE = "torch.nn.modules.module.register_module_"  # hooks on all modules at once
_PIPELINE_ITSELF = ("torch.distributed.pipelin", "sternway.pipeline", "deepspeed.pipe")
_PIPELINE = ("torch.distributed.pipelining.", "torch.distributed.pipeline.", "deepspeed.pipe.")
_METHODS = {
    "register_hook": "hook",
    "register_prehook": "hook",
    "register_post_accumulate_grad_hook": "hook",
    "register_backward_hook": "hook",
    "register_full_backward_hook": "hook",
    "register_full_backward_pre_hook": "hook",
    "register_forward_hook": "hook",
    "register_forward_pre_hook": "hook",
    "save_for_backward": "saved tensors",
}
_TEXT = """
binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy ctc_loss gaussian_nll_loss
hinge_embedding_loss huber_loss kl_div l1_loss linear_cross_entropy margin_ranking_loss mse_loss multi_margin_loss
multilabel_margin_loss multilabel_soft_margin_loss nll_loss poisson_nll_loss smooth_l1_loss soft_margin_loss
triplet_margin_loss triplet_margin_with_distance_loss
"""
_LOSSES = frozenset(_TEXT.split())


def find(reading: Reading) -> Iterator[Fact]:
    """Every training fact except modules, as ``Fact("training", kind, call, line, note)``."""
    loaded, is_of_torch = _loaded(reading), reading.is_of_torch
    for use in reading.uses:
        if use.kind == "decorator" and not isinstance(use.node, ast.Call):
            name = reading.absolute(use.node, use.scope)
            if _KINDS.get(name) == "compile":
                owner: str = use.statement.name  # type: ignore[attr-defined]  # a decorator stands on a definition
                yield Fact("training", "compile", f"@{name} on {owner}", use.node.lineno)
        elif use.kind == "call" and isinstance(use.node, ast.Call):
            node, name = use.node, reading.absolute(use.node.func, use.scope)
            kind = _kind(name, node, is_of_torch)
            if kind == "pipeline" and reading.module.startswith(_PIPELINE_ITSELF):
                continue  # the pipeline library calling itself
            if kind:
                yield Fact("training", kind, shortened(node), node.lineno, _note(name, node, loaded))


def _kind(name: str, node: ast.Call, is_of_torch: bool) -> str:
    if kind := _KINDS.get(name):
        return kind
    module, _, last = name.rpartition(".")
    if module.startswith("torch.optim.lr_scheduler") and last[:1].isupper():
        return "scheduler"
    if name.startswith("torch.optim.") and last[:1].isupper():
        return "optimizer"
    if name.startswith("torch.nn.") and (last in _LOSSES or (last.endswith("Loss") and last[:1].isupper())):
        return "loss"
    if name.startswith(_PIPELINE):
        return "pipeline"
    if name.startswith(_EVERY_MODULE) and name.endswith("_hook"):
        return "hook"
    if is_of_torch and isinstance(node.func, ast.Attribute) and not _is_path(node.func, name):
        return "backward" if node.func.attr == "backward" else _METHODS.get(node.func.attr, "")
    return ""


def _is_path(node: ast.Attribute, name: str) -> bool:
    """Whether ``x.backward`` is a function of a module rather than a tensor's method."""
    return bool(name) or (isinstance(node.value, ast.Call) and ast.unparse(node.value).startswith("super("))


def _note(name: str, node: ast.Call, loaded: dict[int, list[str]]) -> str:
    given = {word.arg: word.value for word in node.keywords if word.arg}
    if name.endswith(".load") and name.startswith("torch.") and "checkpoint" not in name:
        said = ast.unparse(given["weights_only"]) if "weights_only" in given else "not given"
        keys = loaded.get(id(node), [])
        return f"weights_only: {said}" + (f"; keys read: {', '.join(keys)}" if keys else "")
    if name in ("torch.save", "torch.serialization.save") and node.args and isinstance(node.args[0], ast.Dict):
        keys = [repr(key.value) for key in node.args[0].keys if isinstance(key, ast.Constant)]
        return f"keys: {', '.join(keys)}" if keys else ""
    literal = [f"{key}={ast.unparse(value)}" for key, value in given.items() if _is_literal(value)]
    return f"literal settings: {', '.join(literal)}" if literal else ""


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _loaded(reading: Reading) -> dict[int, list[str]]:
    """For each call assigned to a name: the literal keys that the same function reads from that name."""
    keys: dict[tuple[str, str], list[str]] = defaultdict(list)
    for use in reading.uses:
        if use.kind == "subscript" and isinstance(use.node, ast.Subscript) and isinstance(use.node.value, ast.Name):
            assert isinstance(use.node.slice, ast.Constant)
            found, key = keys[use.scope.name, use.node.value.id], repr(use.node.slice.value)
            if isinstance(use.node.ctx, ast.Load) and key not in found:
                found.append(key)
    made: dict[int, list[str]] = {}
    for use in reading.uses:
        if use.kind == "call" and isinstance(use.statement, ast.Assign) and len(use.statement.targets) == 1:
            target = use.statement.targets[0]
            if isinstance(target, ast.Name):
                made[id(use.node)] = keys.get((use.scope.name, target.id), [])
    return made


def modules(reading: Reading) -> Iterator[ModuleFacts]:
    """Every class with a base; which of them are ``nn.Module``s is known only once all files are read."""
    parts: dict[str, list[tuple[str, str, int]]] = defaultdict(list)
    for use in reading.uses:
        if use.kind == "call" and isinstance(use.node, ast.Call) and isinstance(use.statement, ast.Assign):
            owner, attribute = _own_attribute(use)
            name = reading.absolute(use.node.func, use.scope)
            if owner and name.rpartition(".")[2][:1].isupper():
                parts[owner].append((attribute, name, use.node.lineno))
    for name, node in reading.classes.items():
        forward = reading.functions.get(f"{name}.forward")
        if node.bases and (forward or parts.get(name)):
            yield ModuleFacts(
                name,
                node.lineno,
                ", ".join(ast.unparse(base) for base in node.bases),
                f"({ast.unparse(forward.args)})" if forward else "",
                forward.lineno if forward else 0,
                tuple(parts.get(name, ())),
            )


def _own_attribute(use: Use) -> tuple[str, str]:
    """The class and the attribute of ``self.x = …`` in ``__init__``."""
    assert isinstance(use.statement, ast.Assign)
    target = use.statement.targets[0]
    if not isinstance(target, ast.Attribute) or not isinstance(target.value, ast.Name):
        return "", ""
    owner, _, method = use.scope.name.rpartition(".")
    is_self = use.scope.self_name == target.value.id and method == "__init__"
    return (owner, target.attr) if is_self else ("", "")
