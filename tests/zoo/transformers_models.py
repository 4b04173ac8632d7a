"""Tiny random configurations of architectures of transformers."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

from zoo.entry import Batch, Entry

TEXT = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
DECODER = TEXT | {
    "intermediate_size": 32,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "use_cache": False,
}
GPT = {"vocab_size": 64, "n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 32, "use_cache": False}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
SEQ2SEQ = {
    "vocab_size": 64,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "use_cache": False,
}
BERT = TEXT | {"intermediate_size": 32, "max_position_embeddings": 34, "pad_token_id": 0}
IMAGE = {
    "image_size": 16,
    "patch_size": 4,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "num_labels": 5,
}
SPEECH = {
    "vocab_size": 16,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "conv_dim": (8, 8),
    "conv_kernel": (8, 4),
    "conv_stride": (4, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
    "ctc_loss_reduction": "mean",
    "classifier_proj_size": 16,
}
PER_ROW = "the model's own loss must be a mean over the labels"
"""CTC loss is a mean over rows of means over their labels."""


def config_of(model_class: str, **options: Any) -> Any:
    """The configuration of an architecture, without dropout: equality with a plain backward needs that."""
    config = getattr(transformers, model_class).config_class(**options)
    for part in (
        config,
        *(value for value in vars(config).values() if isinstance(value, transformers.PretrainedConfig)),
    ):
        for name, value in list(vars(part).items()):
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)
    return config


def entry(
    name: str,
    family: str,
    model_class: str,
    batch: Batch,
    *,
    coupled: bool = False,
    refused: str | None = None,
    **options: Any,
) -> Entry:
    """A row of the table: the architecture's own class, with the given configuration."""

    def build() -> nn.Module:
        return getattr(transformers, model_class)(config_of(model_class, **options))

    return Entry(name, family, build, batch, coupled=coupled, refused=refused)


def ids(rows: int, length: int = 8) -> torch.Tensor:
    return torch.randint(2, 60, (rows, length))


def causal(rows: int) -> dict[str, Any]:
    """Token ids with padding on the right: other rows, other lengths, so that microbatches have other token counts."""
    tokens = ids(rows)
    lengths = torch.tensor([8 - row % 4 for row in range(rows)])
    mask = (torch.arange(8) < lengths[:, None]).long()
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def unpadded(rows: int) -> dict[str, Any]:
    tokens = ids(rows)
    return {"input_ids": tokens, "labels": tokens}


def masked(rows: int) -> dict[str, Any]:
    """As for a masked language model, the same number of tokens in each row."""
    return {"input_ids": ids(rows), "attention_mask": torch.ones(rows, 8).long(), "labels": ids(rows)}


def two_sided(rows: int) -> dict[str, Any]:
    return {"input_ids": ids(rows), "attention_mask": torch.ones(rows, 8).long(), "labels": ids(rows, 6)}


def classes(rows: int) -> dict[str, Any]:
    return {"input_ids": ids(rows), "attention_mask": torch.ones(rows, 8).long(), "labels": torch.randint(5, (rows,))}


def pixels(rows: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(rows, 3, 16, 16), "labels": torch.randint(5, (rows,))}


def image_and_text(rows: int) -> dict[str, Any]:
    return {
        "input_ids": ids(rows),
        "attention_mask": torch.ones(rows, 8).long(),
        "pixel_values": torch.randn(rows, 3, 16, 16),
        "return_loss": True,
    }


def waves(rows: int) -> dict[str, Any]:
    return {"input_values": torch.randn(rows, 200), "labels": torch.randint(1, 16, (rows, 4))}


def spectrograms(rows: int) -> dict[str, Any]:
    return {"input_features": torch.randn(rows, 8, 32), "labels": ids(rows, 6)}


DECODERS = [
    entry("llama", "decoder", "LlamaForCausalLM", causal, **DECODER),
    entry("qwen3", "decoder", "Qwen3ForCausalLM", causal, **DECODER),
    entry("gemma2", "decoder", "Gemma2ForCausalLM", causal, **DECODER),
    entry("gemma3", "decoder", "Gemma3ForCausalLM", causal, **DECODER),
    entry("mistral", "decoder", "MistralForCausalLM", causal, **DECODER),
    entry("gpt2-tied", "decoder", "GPT2LMHeadModel", causal, **GPT),
    entry("gptj", "decoder", "GPTJForCausalLM", causal, **GPT | {"rotary_dim": 4}),
    entry("gpt-neox", "decoder", "GPTNeoXForCausalLM", causal, **BERT),
    entry(
        "opt", "decoder", "OPTForCausalLM", causal,
        **TEXT, ffn_dim=32, max_position_embeddings=32, word_embed_proj_dim=16, pad_token_id=0,
    ),
    entry("phi", "decoder", "PhiForCausalLM", causal, **{k: v for k, v in DECODER.items() if k != "head_dim"}),
    entry("falcon", "decoder", "FalconForCausalLM", causal, **TEXT),
    entry("bloom", "decoder", "BloomForCausalLM", causal, vocab_size=64, hidden_size=16, n_layer=4, n_head=2),
    entry("olmo2", "decoder", "Olmo2ForCausalLM", causal, **DECODER),
    entry("cohere", "decoder", "CohereForCausalLM", causal, **DECODER),
]  # fmt: skip
EXPERTS_MODELS = [
    entry("mixtral", "moe", "MixtralForCausalLM", causal, **DECODER, num_local_experts=4, num_experts_per_tok=2),
    entry(
        "qwen2-moe", "moe", "Qwen2MoeForCausalLM", causal,
        **DECODER, **EXPERTS, num_experts=4, shared_expert_intermediate_size=16,
    ),
    entry("qwen3-moe", "moe", "Qwen3MoeForCausalLM", causal, **DECODER, **EXPERTS, num_experts=4),
    entry(
        "deepseek-v3", "moe", "DeepseekV3ForCausalLM", causal,
        **{k: v for k, v in DECODER.items() if k not in ("head_dim", "num_key_value_heads")}, **EXPERTS,
        num_key_value_heads=2, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1,
        kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
    ),
]  # fmt: skip
STATE_SPACE = [
    entry(
        "mamba", "state space", "MambaForCausalLM", unpadded,
        vocab_size=64, hidden_size=16, num_hidden_layers=4, state_size=4, use_cache=False,
    ),
    entry(
        "mamba2", "state space", "Mamba2ForCausalLM", unpadded, vocab_size=64, hidden_size=16, num_hidden_layers=4,
        state_size=4, head_dim=8, num_heads=4, n_groups=1, chunk_size=4, use_cache=False,
    ),
]  # fmt: skip
SEQ2SEQ_MODELS = [
    entry(
        "t5-tied", "encoder-decoder", "T5ForConditionalGeneration", two_sided, vocab_size=64, d_model=16, d_ff=32,
        d_kv=8, num_layers=2, num_decoder_layers=2, num_heads=2, decoder_start_token_id=0, use_cache=False,
    ),
    entry("bart", "encoder-decoder", "BartForConditionalGeneration", two_sided, **SEQ2SEQ),
    entry("marian", "encoder-decoder", "MarianMTModel", two_sided, **SEQ2SEQ, decoder_start_token_id=0),
    entry("pegasus", "encoder-decoder", "PegasusForConditionalGeneration", two_sided, **SEQ2SEQ),
]  # fmt: skip
BERT_FAMILY = [
    entry("bert", "bert", "BertForMaskedLM", masked, **BERT),
    entry("roberta", "bert", "RobertaForMaskedLM", masked, **BERT),
    entry(
        "deberta-v2", "bert", "DebertaV2ForMaskedLM", masked,
        **BERT, relative_attention=True, pos_att_type="p2c|c2p",
    ),
    entry("electra", "bert", "ElectraForSequenceClassification", classes, **BERT, embedding_size=16, num_labels=5),
    entry("albert", "bert", "AlbertForMaskedLM", masked, **BERT, embedding_size=16, num_hidden_groups=1),
    entry(
        "distilbert", "bert", "DistilBertForMaskedLM", masked,
        vocab_size=64, dim=16, n_layers=4, n_heads=2, hidden_dim=32, max_position_embeddings=32,
    ),
    entry("mpnet", "bert", "MPNetForMaskedLM", masked, **BERT),
    entry(
        "modernbert", "bert", "ModernBertForMaskedLM", masked,
        **BERT, bos_token_id=1, eos_token_id=1, cls_token_id=1, sep_token_id=1, local_attention=4,
    ),
]  # fmt: skip
VISION = [
    entry("vit", "vision", "ViTForImageClassification", pixels, **IMAGE),
    entry("deit", "vision", "DeiTForImageClassification", pixels, **IMAGE),
    entry("beit", "vision", "BeitForImageClassification", pixels, **IMAGE),
    entry("dinov2", "vision", "Dinov2ForImageClassification", pixels, **IMAGE),
    entry(
        "swin", "vision", "SwinForImageClassification", pixels,
        image_size=16, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=2, num_labels=5,
    ),
    entry(
        "convnext", "vision", "ConvNextForImageClassification", pixels,
        hidden_sizes=[8, 16], depths=[2, 2], num_stages=2, patch_size=2, num_labels=5,
    ),
    entry(
        "clip", "vision", "CLIPModel", image_and_text, coupled=True, refused="needs labels= of integers",
        text_config=BERT | {"num_hidden_layers": 2, "eos_token_id": 1, "bos_token_id": 0},
        vision_config=IMAGE | {"num_hidden_layers": 2}, projection_dim=8,
    ),
]  # fmt: skip
SPEECH_MODELS = [
    entry("wav2vec2", "speech", "Wav2Vec2ForCTC", waves, refused=PER_ROW, **SPEECH),
    entry("hubert", "speech", "HubertForCTC", waves, refused=PER_ROW, **SPEECH),
    entry(
        "whisper", "speech", "WhisperForConditionalGeneration", spectrograms,
        **SEQ2SEQ | {"max_position_embeddings": 32}, num_mel_bins=8, max_source_positions=16, max_target_positions=16,
        decoder_start_token_id=1, bos_token_id=1, eos_token_id=1,
    ),
]  # fmt: skip
ENTRIES = [*DECODERS, *EXPERTS_MODELS, *STATE_SPACE, *SEQ2SEQ_MODELS, *BERT_FAMILY, *VISION, *SPEECH_MODELS]
