"""Tiny models of transformers and peft, with random weights: training, generation, and their own entrances."""

from __future__ import annotations

from typing import Any

import torch

from zoo.case import case

TRANSFORMERS = ("transformers",)
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=1, max_position_embeddings=32))


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=32, bos_token_id=0, eos_token_id=1)
    return GPT2LMHeadModel(config)


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        **{"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 32},
        **{"decoder_start_token_id": 0, "dropout_rate": 0.0},
    )
    return T5ForConditionalGeneration(config)


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**SMALL, num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=2))


def clip() -> Any:
    from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig

    text = CLIPTextConfig(**SMALL, max_position_embeddings=16, projection_dim=8, eos_token_id=31)
    vision = {key: value for key, value in SMALL.items() if key != "vocab_size"}
    config = CLIPConfig(projection_dim=8)
    config.text_config = text
    config.vision_config = CLIPVisionConfig(**vision, image_size=8, patch_size=4, projection_dim=8)
    return CLIPModel(config)


def vit() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    shape = {key: value for key, value in SMALL.items() if key != "vocab_size"}
    return ViTForImageClassification(ViTConfig(**shape, image_size=8, patch_size=4, num_labels=3))


def whisper() -> Any:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        **{"vocab_size": 32, "num_mel_bins": 4, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2},
        **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24},
        **{"max_source_positions": 8, "max_target_positions": 16, "decoder_start_token_id": 0, "pad_token_id": 0},
        **{"bos_token_id": 0, "eos_token_id": 1},
    )
    return WhisperForConditionalGeneration(config)


def _tokens(run, step: int) -> dict[str, torch.Tensor]:
    tokens = run.tokens(step, 2, 8, high=32)
    return {"input_ids": tokens, "labels": tokens}


def _images(run, step: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": run.randn(step, 2, 3, 8, 8), "labels": run.tokens(step, 2, high=3)}


def _sounds(run, step: int) -> dict[str, torch.Tensor]:
    return {"input_features": run.randn(step, 2, 4, 16), "labels": run.tokens(step, 2, 6, high=32)}


def _model(name: str, make, batch=_tokens, **about) -> None:
    @case(name, needs=TRANSFORMERS, **about)
    def program(run):
        run.train(run.shard(make), 2, batch)


_model("llama", llama, also=("stage3-cpu",))
_model("gpt2", gpt2)
_model("mixtral", mixtral, gpu=True)
_model("vit", vit, _images)
_model("whisper", whisper, _sounds)


def _generates(name: str, make, **about) -> None:
    @case(name, needs=TRANSFORMERS, **about)
    def program(run):
        """The tokens that `generate` gives before and after training are plain torch's."""
        trainer = run.shard(make)
        options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
        for step in range(2):
            trainer.model.eval()
            start = run.tokens(step + 30, 2, 5, high=32).clamp(min=2)
            # Ranks generate together: neither may stop before the other.
            tokens = trainer.model.generate(start, attention_mask=torch.ones_like(start), pad_token_id=0, **options)
            run.log("generated", tokens)
            trainer.model.train()
            trainer.backward(trainer(**_tokens(run, step)).loss)
            trainer.step()


_generates("generate-llama", llama, also=("stage0", "stage3-cpu"))
_generates("generate-gpt2", gpt2)
_generates("generate-t5", t5, also=("stage3-cpu",), gpu=True)


@case("enter-llama-at-its-model", needs=TRANSFORMERS, also=("stage3-cpu",))
def inner(run):
    """`m.model(x)` gives hidden states; the head is applied by the program."""
    trainer = run.shard(llama)
    for step in range(2):
        tokens = run.tokens(step, 2, 8, high=32)
        hidden = trainer.model.model(tokens).last_hidden_state
        logits = trainer.model.lm_head(hidden[:, :-1]).flatten(0, 1)
        trainer.backward(torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()))
        trainer.step()


@case("clip-text-and-image-features", needs=TRANSFORMERS, tolerance=1e-4, also=("stage3-cpu",), gpu=True)
def features(run):
    """CLIP is trained through `get_text_features` and `get_image_features`, never through forward."""
    trainer = run.shard(clip)
    for step in range(2):
        text = _tensor(trainer.model.get_text_features(input_ids=_sentences(run, step)))
        image = _tensor(trainer.model.get_image_features(pixel_values=run.randn(step, 2, 3, 8, 8)))
        trainer.backward((text - image).pow(2).mean())
        trainer.step()


def _sentences(run, step: int) -> torch.Tensor:
    """Tokens that end in the end-of-text token, whose position CLIP reads."""
    tokens = run.tokens(step, 2, 6, high=30)
    tokens[:, -1] = 31
    return tokens


def _tensor(features: Any) -> torch.Tensor:
    return features if isinstance(features, torch.Tensor) else features.pooler_output


@case("clip-text-features-alone", needs=TRANSFORMERS, tolerance=1e-4)
def text_features(run):
    trainer = run.shard(clip)
    for step in range(2):
        text = _tensor(trainer.model.get_text_features(input_ids=_sentences(run, step)))
        trainer.backward(text.pow(2).mean())
        trainer.step()


@case("gradient-checkpointing-of-transformers", needs=TRANSFORMERS)
def checkpointing(run):
    def make():
        model = llama()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    trainer = run.shard(make)
    trainer.model.train()
    run.train(trainer, 2, _tokens)


def _lora(dtype: torch.dtype) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    return get_peft_model(llama().to(dtype), config)


@case("peft-lora", needs=("transformers", "peft"), also=("stage0", "stage3-cpu"))
def lora(run):
    run.train(run.shard(lambda: _lora(torch.float32)), 3, _tokens)


@case("peft-lora-bf16-base", needs=("transformers", "peft"), also=("stage0", "stage3-cpu"), tolerance=5e-3)
def lora_bf16(run):
    """peft keeps fp32 adapters in a bf16 model: each parameter keeps its dtype."""
    trainer = run.shard(lambda: _lora(torch.bfloat16), precision="bf16")
    run.log("fp32", torch.tensor([p.dtype == torch.float32 for p in trainer.model.parameters()]))
    run.train(trainer, 3, _tokens)
