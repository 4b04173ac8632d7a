"""Every private name of torch that Sternway leans on, each with a probe.

No other room touches a private name of torch; ``tests/test_seam.py`` holds that. One module an area:

    tensors       versions, views, storages
    amp           loss scaling
    autograd      the engine, its graph tasks and its nodes
    hooks         hooks on tensors and nodes
    failures      errors of a failed backward
    nodes         the tensors that nodes save
    functions     custom autograd.Functions, and how the engine calls their backward
    operands      node kinds that compute a weight's gradient, and what they save
    products      node kinds of other products, and of lookups
    native        the optional extension in C++, which reads nodes as torch's own classes
    saved_hooks   the stack of saved-tensor hooks, checkpoints' frames
    compile       AOTAutograd
    inductor      Inductor
    async_tensors results of collectives under way, in compiled code
    tracing       Dynamo and functionalization, for what runs inside compiled code
    distributed   process groups, stores
    modes         function modes, tensors without memory
    memory        the bytes that operations would take
    dtensors      DTensors, whole and as the parts that processes hold
    sharded       FSDP modules that a schedule gathers, reduces and frees
    captures      CUDA graphs with calls of Python between them
    cuda_graphs   what of a module the replay of a graph would not run
    parallel      what FSDP, DDP, checkpoints and torch.distributed.pipelining put into a backward

A *probe* is a tiny real use that says whether a name still does what we need. A feature calls ``require`` when it is
first used: that runs its probes once, and raises ``UnsupportedTorch`` with the name if one fails. ``sternway doctor``
runs all of them.
"""

from sternway._torch.probe import Feature, Probe, all_probes, require

__all__ = ["Feature", "Probe", "all_probes", "require"]
