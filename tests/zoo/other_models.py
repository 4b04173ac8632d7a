"""Tiny architectures of timm, torchvision, diffusers and PEFT."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import zoo.libraries  # noqa: F401 - isort: skip - before timm

import diffusers
import peft
import timm
import torch
import torchvision
from torch import Tensor, nn

from zoo import transformers_models
from zoo.entry import Entry


def image(argument: str, size: int) -> Callable[[int], dict[str, Any]]:
    return lambda rows: {argument: torch.randn(rows, 3, size, size)}


def classes(rows: int) -> Tensor:
    return torch.randint(5, (rows,))


def timm_entry(name: str, size: int = 32, **options: Any) -> Entry:
    def build() -> nn.Module:
        return timm.create_model(name, num_classes=5, **options)

    return Entry(f"timm-{name}", "timm", build, image("x", size), classes)


def mixer() -> nn.Module:
    return timm.models.MlpMixer(num_classes=5, img_size=16, patch_size=4, num_blocks=4, embed_dim=32)


def vision_transformer() -> nn.Module:
    return torchvision.models.VisionTransformer(
        image_size=16, patch_size=4, num_layers=4, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=5
    )


def diffusers_entry(name: str, model_class: str, batch: Callable[[int], dict[str, Any]], **options: Any) -> Entry:
    def build() -> nn.Module:
        return getattr(diffusers, model_class)(**options)

    def target(rows: int) -> Tensor:
        with torch.no_grad():
            return torch.randn_like(build()(**batch(rows)).sample)

    return Entry(name, "diffusion", build, batch, target)


def noisy_with_text(rows: int) -> dict[str, Any]:
    return {
        "sample": torch.randn(rows, 4, 8, 8),
        "timestep": torch.arange(rows),
        "encoder_hidden_states": torch.randn(rows, 5, 8),
    }


def noisy(rows: int) -> dict[str, Any]:
    return {"sample": torch.randn(rows, 3, 8, 8), "timestep": torch.arange(rows)}


def patches(rows: int) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(rows, 4, 8, 8),
        "timestep": torch.arange(rows),
        "class_labels": torch.arange(rows) % 5,
    }


def tokens_with_text(rows: int) -> dict[str, Any]:
    return {"hidden_states": torch.randn(rows, 8, 8, 8), "encoder_hidden_states": torch.randn(rows, 5, 8)}


def sd3_inputs(rows: int) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(rows, 4, 8, 8),
        "encoder_hidden_states": torch.randn(rows, 5, 16),
        "pooled_projections": torch.randn(rows, 8),
        "timestep": torch.arange(rows),
    }


def peft_entry(name: str, base: str, config: Any) -> Entry:
    """An adapter on a frozen base."""
    found = next(row for row in transformers_models.ENTRIES if row.name == base)

    def build() -> nn.Module:
        model = peft.get_peft_model(found.build(), config)
        with torch.no_grad():
            for parameter in model.parameters():  # adapters begin at zero, where most gradients are zero too
                if parameter.requires_grad:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        return model

    return Entry(f"{name}-{base}", "peft", build, found.batch)


TIMM = [
    timm_entry("resnet18"),
    timm_entry("test_efficientnet", 64),
    timm_entry("test_vit", 160),
    timm_entry("test_convnext", 64),
    timm_entry("test_nfnet", 64),
    Entry("timm-mixer", "timm", mixer, image("x", 16), classes),
    timm_entry("test_byobnet", 64),
    timm_entry("coat_lite_tiny", 64, img_size=64),
    Entry("torchvision-vit", "torchvision", vision_transformer, image("x", 16), classes),
]
DIFFUSION = [
    diffusers_entry(
        "unet-condition", "UNet2DConditionModel", noisy_with_text,
        sample_size=8, in_channels=4, out_channels=4, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=8, attention_head_dim=4,
    ),
    diffusers_entry(
        "unet", "UNet2DModel", noisy, sample_size=8, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    ),
    diffusers_entry(
        "dit", "DiTTransformer2DModel", patches, sample_size=8, in_channels=4, num_layers=4, num_attention_heads=2,
        attention_head_dim=8, num_embeds_ada_norm=5, norm_num_groups=4,
    ),
    diffusers_entry(
        "transformer-2d", "Transformer2DModel", tokens_with_text, sample_size=8, in_channels=8, num_layers=4,
        num_attention_heads=2, attention_head_dim=4, norm_num_groups=4, cross_attention_dim=8,
    ),
    diffusers_entry(
        "sd3", "SD3Transformer2DModel", sd3_inputs, sample_size=8, patch_size=2, in_channels=4, num_layers=4,
        num_attention_heads=2, attention_head_dim=8, joint_attention_dim=16, caption_projection_dim=16,
        pooled_projection_dim=8, out_channels=4, pos_embed_max_size=8,
    ),
]  # fmt: skip
LINEAR = ["q_proj", "v_proj", "down_proj"]
PEFT = [
    peft_entry("lora", "llama", peft.LoraConfig(r=4, target_modules=LINEAR, lora_dropout=0.0)),
    peft_entry("dora", "llama", peft.LoraConfig(r=4, target_modules=LINEAR, use_dora=True)),
    peft_entry("ia3", "llama", peft.IA3Config(target_modules=["k_proj", "v_proj"], feedforward_modules=[])),
    peft_entry("vera", "llama", peft.VeraConfig(r=4, target_modules=["q_proj"])),
    peft_entry("loha", "llama", peft.LoHaConfig(r=4, target_modules=LINEAR)),
    peft_entry("lora", "mixtral", peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])),
    peft_entry("lora", "t5-tied", peft.LoraConfig(r=4, target_modules=["q", "v"], task_type="SEQ_2_SEQ_LM")),
    peft_entry("lora", "bert", peft.LoraConfig(r=4, target_modules=["query", "value"])),
]
ENTRIES = [*TIMM, *DIFFUSION, *PEFT]
