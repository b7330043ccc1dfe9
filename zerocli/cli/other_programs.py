"""What other programs call the flags and commands of this one, and what to say of those that have no counterpart."""

from __future__ import annotations

import re

from zerocli.config.draft import OTHER_NAMES

ADAPTERS = "--lora 16, or --lora 16:q_proj,v_proj; its other settings are --set lora.alpha=32 and the like"
QUANTIZED = "--lora 16 --base nf4, or --base int8: adapters beside a frozen base in 4 or 8 bits"
FLAGS = {
    "bf16": "--precision bf16",
    "fp16": "--precision fp16",
    "fp32": "--precision fp32",
    **dict.fromkeys(("checkpoint-dir", "output", "output-dir", "out"), "--run-dir"),
    **dict.fromkeys(("config", "model"), "CONFIG as a word of its own: zerocli train tiny"),
    "config-file": "CONFIG as a word of its own: zerocli train my.toml",
    "model-name-or-path": "CONFIG as a word of its own: zerocli train ./folder",
    "cpu-offload": "--offload cpu",
    "offload-optimizer": "--offload optimizer=cpu",
    "offload-param": "--offload params=cpu",
    **dict.fromkeys(
        ("gradient-checkpointing", "gradient-checkpointing-enable", "activation-checkpointing"),
        "--set activations.policy=recompute",
    ),
    **dict.fromkeys(("peft", "adapter"), ADAPTERS),
    **dict.fromkeys(("qlora", "load-in-4bit"), "--lora 16 --base nf4"),
    "load-in-8bit": "--lora 16 --base int8",
    "quantization": QUANTIZED,
    "resume-from-checkpoint": "--resume --run-dir",
    "zero": "--stage",
    **dict.fromkeys(("compile", "torch-compile"), "--set model.compile=true"),
    **dict.fromkeys(("vram", "gpu-mem", "gpu"), "--gpu-memory"),
    "ram": "--host-memory",
    "quiet": "2>/dev/null, which hides what goes to stderr",
    "verbose": "zerocli --debug, before the command, for tracebacks",
    **dict.fromkeys(("force", "overwrite-output-dir"), "another folder: nothing is overwritten"),
    "fsdp": "--stage 3",
    "deepspeed-config": "--deepspeed",
    **dict.fromkeys(("sample-packing", "packing"), "--set data.pack=true"),
    **dict.fromkeys(("adam-beta1", "adam-beta2"), "--set optimizer.betas=0.9,0.95"),
    "train-on-inputs": "--set train.on_inputs=true",
    "load-best-model-at-end": "--set checkpoint.best=true --eval-every 0.1",
    "max-new-tokens": "--max-tokens",
    "prompt": "PROMPT as a word of its own: zerocli generate RUN PROMPT",
    "format": "zerocli export RUN OUT writes safetensors; llama.cpp's convert_hf_to_gguf.py reads that folder",
    "do-train": "the same without it: zerocli train trains",
    "dataloader-num-workers": "the same without it: a thread of each rank reads ahead",
    "trust-remote-code": "the same without it: code that comes with a model is never run",
    "tf32": "the same without it: --precision bf16 is the default on GPUs that have it",
    "local-rank": "the same without it: torchrun says it in the environment",
    "stages": "--stage 0 --stage 1",
    "pp": "--tp 2 or --stage 3, which split a model; there is no pipeline",
    "b": "--batch",
    "n": "--ranks",
}
"""Flag of another program, without its dashes -> ours, where that is no key by another name (`OTHER_NAMES`)."""
FAMILIES = (
    (r"merge", "zerocli export RUN OUT --merge, once the run has ended"),
    (r"lora|peft|adapter|finetuning-type", ADAPTERS),
    (r"[48]-?bit|quant|bnb|gptq|awq", QUANTIZED),
    (
        r"flash|attn|sdpa|xformers|liger",
        "the same without it: attention uses torch's fused kernels where they are exact",
    ),
    (r"hub|push", "zerocli export RUN OUT, then hf upload OWNER/NAME OUT"),
    (r"wandb|report-to|logger|tensorboard|mlflow", "--set train.log_to=wandb, or tensorboard, or mlflow"),
    (r"template", "the same without it: the chat template of the model's folder is used (chat_template.jinja)"),
    (
        r"dpo|rlhf|ppo|kto|orpo|grpo|reward",
        "the same without it: train learns from examples, there is no DPO or RL yet",
    ),
    (r"pipeline|^pp$|expert|context-parallel", "--tp 2 or --stage 3, which split a model; there is no pipeline"),
    (r"nnodes|num-machines|rdzv|master|machine-rank", "torchrun --nnodes N ... -m zerocli train (docs/cluster.md)"),
    (r"device|cuda|cpu", "the same without it; CUDA_VISIBLE_DEVICES= before the command trains on the CPU"),
    (r"strategy", "--save-every N and --eval-every N, in steps or as a share of the run"),
    (r"stream", "the same without it: data is read from disk piece by piece"),
    (r"neftune|smoothing", "the same without it: the loss is plain cross-entropy on the data as it is"),
)
"""(pattern in a flag of another program, what to say of it); the first that is found counts."""
COMMANDS = {
    **dict.fromkeys(("finetune", "fine-tune", "sft", "run", "pretrain", "tune", "launch", "start"), "train"),
    **dict.fromkeys(("chat", "serve", "infer", "inference", "predict", "sample", "complete"), 'generate RUN "..."'),
    **dict.fromkeys(("merge", "convert", "save"), "export RUN OUT"),
    **dict.fromkeys(("diff", "compare"), "profile RUN_A RUN_B"),
    **dict.fromkeys(("inspect", "show", "info"), "profile RUN, or zerocli fit MODEL --explain"),
    **dict.fromkeys(("plan", "estimate", "memory"), "fit MODEL"),
    **dict.fromkeys(("eval", "evaluate", "test"), "train CONFIG --data FILE --eval-every 0.1"),
    **dict.fromkeys(("doctor", "bench", "benchmark"), "env --bench"),
}
"""Command of another program -> ours."""


def ours(name: str) -> str:
    """Return what another program's flag is here, empty if nothing is known; `=` at the end: its value follows."""
    from zerocli.cli.train import KEYS

    key = OTHER_NAMES.get(name.replace("-", "_"), "")
    flag = next((each for each, its in KEYS.items() if its == key), "")
    return FLAGS.get(name) or (f"--{flag.replace('_', '-')}" if flag else f"--set {key}=" if key else "")


def without_counterpart(name: str) -> str:
    """Return what to say of another program's flag that no flag of ours stands for; empty if nothing is known."""
    return next((said for pattern, said in FAMILIES if re.search(pattern, name)), "")
