"""What a file really does for training, found apart from the atlas: calls by absolute names, methods by theirs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from compiler import File, Functions

_NAMED = {
    "optimizer": r"torch\.optim\.(?!lr_scheduler)(\w+\.)*[A-Z]\w*$",
    "scheduler": r"torch\.optim\.lr_scheduler\.[A-Z]\w*$",
    "seed": r"torch\.(random\.|cuda\.)?manual_seed(_all)?$|random\.seed$|numpy\.random\.(seed|default_rng)$"
    r"|torch\.use_deterministic_algorithms$",
    "data loader": r"torch\.utils\.data\.((dataloader\.)?DataLoader|(distributed\.)?DistributedSampler)$",
    "data parallel": r"torch\.nn\.(parallel\.(distributed\.)?DistributedDataParallel|DataParallel)$"
    r"|torch\.distributed\.(_composable\.)?fsdp\.(FullyShardedDataParallel|fully_shard)$",
    "pipeline": r"torch\.distributed\.pipelin(ing|e)\.|deepspeed\.pipe\.|sternway\.pipeline\.Pipeline$",
    "checkpoint load": r"torch\.(serialization\.)?load$|torch\.distributed\.checkpoint\.load$"
    r"|safetensors\.torch\.load_file$",
    "checkpoint save": r"torch\.(serialization\.)?save$|torch\.distributed\.checkpoint\.save$"
    r"|safetensors\.torch\.save_file$",
    "backward": r"torch\.autograd\.(backward|grad)$|sternway\.split\.backward_input$",
    "hook": r"torch\.autograd\.graph\.register_multi_grad_hook$|torch\.nn\.modules\.module\.register_module_\w+_hook$"
    r"|sternway\.hooks\.on_grads$",
    "saved tensors": r"torch\.autograd\.graph\.(\w*saved_tensors\w*|save_on_cpu)$",
    "loss": r"torch\.nn\.(\w+\.)*([A-Z]\w*Loss|\w+_loss|(binary_|linear_)?cross_entropy(_with_logits)?|kl_div)$",
    "compile": r"torch\.compile$|torch\._dynamo\.(eval_frame\.)?optimize$|torch\.jit\.(_script\.)?script$",
    "gradient clipping": r"torch\.nn\.utils\.(clip_grad\.)?clip_grad(s_with)?_(norm|value)_$",
    "mixed precision": r"torch\.((cuda|cpu)\.)?(amp\.)?(autocast_mode\.)?autocast$"
    r"|torch\.(cuda\.)?amp\.(grad_scaler\.)?GradScaler$",
    "process group": r"torch\.distributed\.(distributed_c10d\.)?(init_process_group|new_group)$",
    "activation checkpoint": r"torch\.utils\.checkpoint\.checkpoint(_sequential)?$|torch\.distributed\.algorithms\."
    r"_checkpoint\.checkpoint_wrapper\.(checkpoint_wrapper|apply_activation_checkpointing)$",
}
_METHODS = {
    "backward": r"backward$",
    "hook": r"register_(hook|prehook|(full_)?(forward|backward)(_pre)?_hook|post_accumulate_grad_hook)$",
    "saved tensors": r"save_for_backward$",
}
_OWN = ("torch.distributed.pipelin", "sternway.pipeline", "deepspeed.pipe")  # a pipeline library calling itself


def training(file: File, names: set[str]) -> Iterator[tuple[str, tuple[object, ...]]]:
    """Every training call of a file. ``names``: its classes and functions, qualified."""
    torch = file.module.partition(".")[0] == "torch" or any(map(_imports_torch, ast.walk(file.tree)))
    for node in file.owners:
        if isinstance(node, ast.Call):
            name = file.meaning(node.func)
            method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            if name or file.own_method(node) in names or not torch or ast.unparse(node.func).startswith("super("):
                method = ""
            for kind, pattern in _NAMED.items():
                if re.match(pattern, name) and not (kind == "pipeline" and file.module.startswith(_OWN)):
                    yield f"training: {kind}", (file.path, node.lineno)
            for kind, pattern in _METHODS.items():
                if re.match(pattern, method):
                    yield f"training: {kind}", (file.path, node.lineno)
        elif isinstance(node, Functions | ast.ClassDef):
            for one in node.decorator_list:
                if file.meaning(one) in ("torch.compile", "torch.jit.script", "torch.jit._script.script"):
                    yield "training: compile", (file.path, one.lineno)


def _imports_torch(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(one.name.partition(".")[0] == "torch" for one in node.names)
    return isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] == "torch"
