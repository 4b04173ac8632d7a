"""Fine-tune a model of transformers across processes: a script to read, copy and change.

    torchrun --standalone --nproc-per-node 2 examples/finetune_hf.py --out runs/llama
    torchrun --standalone --nproc-per-node 2 examples/finetune_hf.py --out runs/llama-lora --lora

It makes a tiny Llama on the spot; pass --base for a checkpoint of yours. Each process reads its own stages' tensors
from the checkpoint, and writes its own at the end; with --lora only adapters are trained and written. Started again, it
goes on from the last save. At the end, plain transformers loads the result and finds the same loss.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from sternway import pipeline

ROWS, LENGTH, MICROBATCHES = 8, 32, 4


def make_base(path: Path) -> None:
    """A Llama with random weights, for text in bytes."""
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH, bos_token_id=0, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(path)


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """Rows of bytes that count up, of various lengths: the same on every process."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(2, 200, (ROWS, 1), generator=generator)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (ROWS, 1), generator=generator)
    ids, mask = starts + torch.arange(LENGTH), torch.arange(LENGTH) < lengths
    return {"input_ids": ids * mask, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


def add_lora(model: Any) -> Any:
    """Adapters on the attention's projections; everything else is frozen."""
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))


def load_plainly(base: Path, tuned: Path, lora: bool) -> Any:
    """The result, loaded by transformers (and PEFT) alone."""
    if not lora:
        return transformers.AutoModelForCausalLM.from_pretrained(tuned)
    import peft

    return peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), tuned)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="the folder for all that is written")
    parser.add_argument("--base", type=Path, help="the checkpoint to start from")
    parser.add_argument("--lora", action="store_true", help="train adapters alone")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    base = arguments.base or arguments.out / "base"
    torch.manual_seed(0)
    if first and arguments.base is None and not (base / "config.json").exists():
        make_base(base)
    dist.barrier()
    torch.manual_seed(0)  # again, since one process has drawn a base: new adapters are the same on all

    pipe = pipeline.from_pretrained(
        base,
        sample={name: value[:1] for name, value in batch_of(0).items()},
        prepare=add_lora if arguments.lora else None,
        schedule="zb-h1",
        n_microbatches=MICROBATCHES,
    )
    optimizer = torch.optim.AdamW([p for p in pipe.parameters() if p.requires_grad], lr=3e-3)
    found = pipe.resume(arguments.out / "checkpoints", optimizer)
    if found is not None and first:
        print(f"going on from step {found.step}", flush=True)
    for step in range(found.step if found is not None else 0, arguments.steps):
        result = pipe.step(**batch_of(step), loss_everywhere=True)
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if first:
            print(f"step {step}: loss {float(result.loss):.4f}", flush=True)
        if (step + 1) % arguments.save_every == 0:
            pipe.save(arguments.out / "checkpoints", optimizer, step + 1, keep=2)

    tuned = arguments.out / "tuned"
    pipe.save_pretrained(tuned)
    ours = float(pipe.evaluate(**batch_of(10**6), loss_everywhere=True).loss)
    if first:
        with torch.no_grad():
            theirs = float(load_plainly(base, tuned, arguments.lora).eval()(**batch_of(10**6)).loss)
        print(f"evaluated: {ours:.4f} here, {theirs:.4f} by transformers alone", flush=True)
        assert abs(ours - theirs) < 1e-4, "the saved model differs"
    pipe.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
