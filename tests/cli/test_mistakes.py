"""Mistakes of a new user: each command line gets the fact, a next command, the right exit code and no traceback.

Everything runs in this process and no rank is started: what a run says once it has started is in `tests/run`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from zerocli.cli import main as cli
from zerocli.run.processes.job import Job

HUB = "hf download {0} --local-dir"
TINY_GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A working directory with the files and folders that the rows name."""
    root = tmp_path_factory.mktemp("mistakes")
    texts = {
        "empty.txt": "",
        "short.txt": "x",
        "config.yaml": "train:\n  stesp: 3\n",
        "twice.yaml": "train:\n  steps: 3\ntrain:\n  batch: 2\n",
        "code.yaml": "train: !!python/object/apply:os.system [exit]\n",
        "axolotl.yaml": "base_model: a/b\nadapter: lora\nlora_r: 32\nlearning_rate: 0.0002\nmicro_batch_size: 2\n",
        "torchtune.yaml": "model:\n  _component_: torchtune.x\noptimizer:\n  lr: 2e-5\nbatch_size: 2\nepochs: 1\n",
        "accelerate.yaml": "distributed_type: FSDP\nnum_processes: 8\n",
        "ds.json": '{"zero_optimization": {"stage": 3}}',
        "tokenizer_config.json": "{}",
        "quoted.toml": '[train]\nsteps = "3"\n',
        "cut.jsonl": '{"text": "a"}\n{"text": \n',
        "image.jsonl": '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}\n',
        "paper.pdf": "%PDF",
        "model/config.json": json.dumps(TINY_GPT2),
        "mixed/a.jsonl": '{"text": "a"}\n',
        "mixed/b.txt": "b",
        "empty.json": "{}",
        "list.json": "[1, 2]",
        "cut.json": '{"model_type": ',
        "negative/config.json": json.dumps(TINY_GPT2 | {"n_layer": -1}),
        "cut.toml": "[train\n",
        "misspelt.toml": "[train]\nstesp = 3\n",
        "tokenizer/tokenizer.json": "{}",
        "quantized/config.json": json.dumps({"model_type": "llama", "quantization_config": {"quant_method": "aqlm"}}),
        "quantized/model.safetensors": "",
        "prefix/adapter_config.json": json.dumps({"peft_type": "PREFIX_TUNING"}),
        "patterns/adapter_config.json": json.dumps({"r": 4, "bias": "all"}),
        "pissa/adapter_config.json": json.dumps({"r": 4, "init_lora_weights": "pissa"}),
        "cut-adapter/adapter_config.json": "{",
        "weights/model.bin": "",
        "odd.bin": "abc",
        "model.py": "",
        "notes.md": "hello",
        "export/model.safetensors": "",
        "runs/mine-20250101-000000/checkpoints/step-00000002/manifest.json": "{}",
        "runs/mine-20250101-000000/config.json": "{}",
    }
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "hollow").mkdir()
    (root / "gone").symlink_to("nowhere.toml")
    return root


# command line, exit code, words that the answer has; rows are grouped by what goes wrong
ROWS: list[tuple[str, int, tuple[str, ...]]] = [
    # commands
    ("frobnicate", 2, ("no command frobnicate", "zerocli --help")),
    ("trian", 2, ("did you mean train?",)),
    ("--trian", 2, ("try: zerocli train",)),
    ("help", 2, ("zerocli --help",)),
    ("help train", 2, ("zerocli train --help",)),
    ("-v", 2, ("zerocli --help",)),
    # flags of other programs
    ("train --learning-rate 3e-4", 2, ("--lr",)),
    ("train --batch-size 8", 2, ("zerocli train --batch",)),
    ("train --gpus 2", 2, ("zerocli train --ranks",)),
    ("train --nproc-per-node 2", 2, ("zerocli train --ranks",)),
    ("train --model tiny", 2, ("zerocli train tiny",)),
    ("train --config x.toml", 2, ("CONFIG",)),
    ("train --fp16", 2, ("--precision fp16",)),
    ("train --bf16", 2, ("--precision bf16",)),
    ("train --layers 3", 2, ("--set model.layers=",)),
    ("train --hidden 64", 2, ("--set model.hidden=",)),
    ("train --warmup-steps 3", 2, ("optimizer.warmup",)),
    ("train --max-steps 3", 2, ("--steps",)),
    ("train --seq-len 3", 2, ("--seq",)),
    ("train --output-dir x", 2, ("--run-dir",)),
    ("train --zero-stage 3", 2, ("--stage",)),
    ("train --cpu-offload", 2, ("--offload cpu",)),
    ("train --gradient-checkpointing", 2, ("activations.policy=recompute",)),
    ("train --stagee 3", 2, ("--stage",)),
    ("fit llama3-8b --vram 80GB", 2, ("--gpu-memory",)),
    ("profile tiny --snapshoot x", 2, ("--snapshot",)),
    ("env --becnh", 2, ("--bench",)),
    ("train --per_device_train_batch_size 4", 2, ("zerocli train --batch 4",)),
    ("train --nproc_per_node=2", 2, ("zerocli train --ranks 2",)),
    ("train --weight-decay 0.1", 2, ("zerocli train --set optimizer.weight_decay=0.1",)),
    ("train --lora-target-modules q_proj", 2, ("zerocli train --set lora.targets=q_proj",)),
    ("train --lora_alpha 16", 2, ("zerocli train --set lora.alpha=16",)),
    ("train --lora_r 8", 2, ("zerocli train --lora 8",)),
    ("train --qlora", 2, ("--lora 16",)),
    ("train --load_in_4bit", 2, ("--lora 16 --base nf4",)),
    ("train --lora 4 --base int4", 2, ("did you mean nf4?", "try: --base nf4")),
    ("train --lora 4 --set load_in_4bit=true", 2, ("try: --set lora.base=nf4",)),
    ("train --set train.gradient_checkpointing=true", 2, ("try: --set activations.policy=recompute",)),
    ("export a b --merge_and_unload", 2, ("zerocli export RUN OUT --merge",)),
    ("generate cut-adapter hi", 2, ("holds an adapter", 'zerocli generate BASE "..." --lora cut-adapter')),
    ("generate runs/mine-20250101-000000 hi --lora ./pissa", 2, ("is a run, whose own adapters are used",)),
    ("train --set lora_r=8", 2, ("did you mean lora.rank?", "--set lora.rank=8")),
    ("train --set lora.target_modules=q", 2, ("did you mean lora.targets?",)),
    ("train --flash_attn fa2", 2, ("the same without it",)),
    ("train --chat-template chatml", 2, ("the chat template of the model's folder is used",)),
    ("train --report-to wandb", 2, ("--set train.log_to=wandb",)),
    ("train --push-to-hub", 2, ("zerocli export RUN OUT, then hf upload",)),
    ("train --nnodes 2", 2, ("torchrun --nnodes N",)),
    ("train --device cpu", 2, ("CUDA_VISIBLE_DEVICES= before the command",)),
    ("fit llama3-8b --data x.jsonl", 2, ("zerocli fit --set data.path=x.jsonl",)),
    ("generate hollow hi --max-new-tokens 5", 2, ("zerocli generate --max-tokens 5",)),
    # commands of other programs
    ("finetune tiny --stage 3", 2, ("zerocli train tiny --stage 3",)),
    ("chat hollow", 2, ('zerocli generate RUN "..."',)),
    ("compare a b", 2, ("zerocli profile RUN_A RUN_B",)),
    ("--stage 3", 2, ("zerocli train --stage 3",)),
    ("notes.md", 2, ("zerocli train notes.md",)),
    # words too many, too few, in the wrong place
    ("train tiny --set lr 3e-4", 2, ("zerocli train --set optimizer.lr=3e-4",)),
    ("train --set optimizer.lr:3e-4", 2, ("--set optimizer.lr=3e-4",)),
    ("fit 7.5 B", 2, ("zerocli fit 7.5B",)),
    ("fit llama3-8b --gpu-memory 80 GB", 2, ("zerocli fit --gpu-memory 80GB",)),
    ("fit -7B", 2, ("zerocli fit 7B",)),
    ("generate hollow hi there", 2, ('"hi there"',)),
    ("generate hollow ''", 2, ("PROMPT is empty",)),
    ("train tiny lr=3e-4", 2, ("--set optimizer.lr=3e-4",)),
    ("train tiny optimizer.lr=3e-4", 2, ("--set optimizer.lr=3e-4",)),
    ("train lr=3e-4", 2, ("--set",)),
    ("train tiny short.txt", 2, ("--data short.txt",)),
    ("train tiny gpt2-xl", 2, ("zerocli train gpt2-xl",)),
    ("train --set", 2, ("requires an argument", "zerocli train --help")),
    ("env extra", 2, ("zerocli env --help",)),
    ("fit", 2, ("which MODEL?", "zerocli fit 7.5B")),
    ("export", 2, ("Missing argument 'RUN'",)),
    ("export runs/mine-20250101-000000", 2, ("Missing argument 'OUT'",)),
    ("configs show", 2, ("Missing argument 'NAME'",)),
    ("configs cp tiny", 2, ("Missing argument 'DIR'",)),
    ("configs lss", 2, ("ls",)),
    # CONFIG
    ("train tinny", 2, ("did you mean tiny?", "zerocli configs ls")),
    ("train 7B", 2, ("is a number of parameters", "zerocli fit 7B")),
    ("train Tiny", 2, ("did you mean tiny?",)),
    ("train Qwen/Qwen2.5-7B", 2, ("no such folder", HUB.format("Qwen/Qwen2.5-7B"))),
    ("train meta-llama/Llama-3.1-8B --stage 3", 2, (HUB.format("meta-llama/Llama-3.1-8B"),)),
    ("fit Qwen/Qwen2.5-7B", 2, (HUB.format("Qwen/Qwen2.5-7B"),)),
    ("check Qwen/Qwen2.5-7B", 2, (HUB.format("Qwen/Qwen2.5-7B"),)),
    ("profile Qwen/Qwen2.5-7B", 2, (HUB.format("Qwen/Qwen2.5-7B"),)),
    ("train https://huggingface.co/gpt2", 2, ("downloads nothing", "hf download")),
    ("train config.yaml", 2, ("config.yaml:2", "did you mean train.steps?")),
    ("fit config.yaml", 2, ("config.yaml:2", "did you mean train.steps?")),
    ("train twice.yaml", 2, ("twice.yaml:3: train is there twice; first at twice.yaml:1",)),
    ("train code.yaml", 2, ("code.yaml:1:8: YAML syntax: could not determine a constructor",)),
    ("train axolotl.yaml", 2, ("of axolotl", "zerocli train ./b --data FILE --lora 32 --lr 0.0002 --batch 2")),
    ("train torchtune.yaml", 2, ("of torchtune", "--lr 2e-5 --epochs 1 --batch 2")),
    ("train accelerate.yaml", 2, ("of accelerate",)),
    ("train ds.json", 2, ("of DeepSpeed", "zerocli train CONFIG --deepspeed ds.json")),
    ("train tokenizer_config.json", 2, ("is a tokenizer", "data.tokenizer=tokenizer_config.json")),
    ("train quoted.toml", 2, ("quoted.toml:2: steps", "try: steps = 100")),
    ("train ./config.yml", 2, ("did you mean ./config.yaml?",)),
    ("train ./nowhere", 2, ("no such file or folder",)),
    ("train nowhere.toml", 2, ("no such file",)),
    ("train empty.json", 2, ("neither a model_type",)),
    ("train list.json", 2, ("holds no JSON object",)),
    ("train cut.json", 2, ("cut.json:1:", "JSON syntax")),
    ("train cut.toml", 2, ("cut.toml:1:", "TOML syntax")),
    ("train misspelt.toml", 2, ("misspelt.toml:2", "did you mean train.steps?")),
    ("train negative/config.json", 2, ("layers -1 is below 1",)),
    ("train tokenizer", 2, ("tokenizer", "no config.json", "data.tokenizer=tokenizer/tokenizer.json")),
    ("fit tokenizer", 2, ("no config.json",)),
    ("train weights", 2, ("no config.json", "--init-from weights")),
    ("train weights/model.bin", 2, ("holds weights", "--init-from weights")),
    ("train hollow", 2, ("without a config.json",)),
    ("train short.txt", 2, ("is data", "--data short.txt")),
    ("train notes.md", 2, ("neither a .toml, .yaml nor .json",)),
    ("fit /dev/null", 2, ("/dev/null: is neither a file nor a folder\n",)),
    ("profile /dev/null --dry-run", 2, ("/dev/null: is neither a file nor a folder\n",)),
    ("train ./gone", 2, ("./gone: is a link to nowhere.toml, which does not exist\n",)),
    ("train model.py", 2, ("model:FUNCTION",)),
    ("train my.module:", 2, ("package.module:function",)),
    ("train --set train.cutoff_len=4", 2, ("try: --set train.seq=4",)),
    ("train --hidden-size 4", 2, ("try: zerocli train --set model.hidden=4",)),
    ("train no_such_module:build --dry-run", 2, ("No module named 'no_such_module'", "PYTHONPATH")),
    ("train os:path --dry-run", 2, ("not callable", "takes no arguments")),
    ("train os:nothing --dry-run", 2, ("no attribute 'nothing'",)),
    ("profile os:path --dry-run", 2, ("no plan before it is built",)),
    # values
    ("train --stage 4", 2, ("stage 4 is not one of", "--stage 3")),
    ("train --stage two", 2, ("'two' is not a valid integer",)),
    ("train --offload gpu", 2, ("'gpu' is neither", "--offload cpu")),
    ("train --offload disk", 2, ("--offload cpu",)),
    ("train --offload optimiser=cpu", 2, ("did you mean 'optimizer'?",)),
    ("train --offload cpu --stage 0", 2, ("stage 0 partitions nothing", "try: --stage 3")),
    ("train --lr", 2, ("requires an argument", "zerocli train --lr 0.0003")),
    ("train --offload params=cpu --stage 2", 2, ("stage",)),
    ("train --offload optimizer=cpu:10", 2, ("did you mean 10GiB?",)),
    ("train --offload optimizer=cpu:10XB", 2, ("XB is not one of",)),
    ("train --ranks -2", 2, ("ranks -2 is below 0",)),
    ("train --ranks 3 --tp 2", 2, ("tp 2 does not divide ranks 3",)),
    ("train --tp 3", 2, ("tp 3 does not divide heads 4",)),
    ("train --steps 0", 2, ("steps 0 is below 1",)),
    ("train --steps 1e3", 2, ("'1e3' is not a valid integer",)),
    ("train --batch 0", 2, ("batch 0 is below 1",)),
    ("train --batch 1000000", 3, ("does not fit", "GiB needed", "GiB available", "try: --batch ")),
    ("train --lr nan", 2, ("lr NaN is not finite",)),
    ("train --epochs inf", 2, ("epochs Infinity is not finite",)),
    ("generate runs/mine-20250101-000000 x --temperature nan", 2, ("nan is not a finite number",)),
    ("generate runs/mine-20250101-000000 x --temperature inf", 2, ("inf is not a finite number",)),
    ("generate runs/mine-20250101-000000 x --top-p nan", 2, ("nan is not a finite number",)),
    ("train --precision fp8", 2, ("not one of auto, fp32, bf16, fp16",)),
    ("train --precision bf-16", 2, ("did you mean bf16?",)),
    ("train --seed x", 2, ("'x' is not a valid integer",)),
    ("train --check -1", 2, ("--check",)),
    ("train --set lr=3e-4", 2, ("did you mean optimizer.lr?", "--set optimizer.lr=3e-4")),
    ("train --set train", 2, ("write section.key=value",)),
    ("train --set train.steps", 2, ("write section.key=value",)),
    ("train --set train.stesp=3", 2, ("did you mean train.steps?", "--set train.steps=3")),
    ("train --set trian.steps=3", 2, ("did you mean train.steps?",)),
    ("train --set train.steps=many", 2, ('"many" is not a whole number',)),
    ("train --set optimizer.lr=-1", 2, ("lr -1.0 is below 0",)),
    ("train --set optimizer.betas=3", 2, ("betas 3 is not a list",)),
    ("train --set model.heads=3", 2, ("heads 3 does not divide hidden 128",)),
    ("train --set model.dropout=2", 2, ("dropout 2.0 is not below 1",)),
    ("train --set activations.policy=rekompute", 2, ("keep, selective, recompute",)),
    ("train --set train.gpu_memory=80", 2, ("did you mean 80GiB?",)),
    ("train --set train.stesp=3 --set model.heads=3 --stage 7", 2, ("train.steps", "heads 3", "stage 7")),
    ("train --lr 1e-4x", 2, ("not a valid float", "zerocli train --lr 0.0003")),
    ("train --epochs 3 --steps 10", 2, ("--steps and --epochs: both are the length of the run",)),
    ("train --accumulate 4 --set train.global_batch=6", 2, ("--accumulate and train.global_batch",)),
    ("train --set optimizer.schedule=linear_with_warmup", 2, ("try: --set optimizer.schedule=linear\n",)),
    ("train --set data.split=20%", 2, ("try: --set data.split=0.05",)),
    ("train --set data.pack=no", 2, ("is not true or false", "try: --set data.pack=true")),
    ("train --init-from TYPO", 2, ("--init-from TYPO: no such folder",)),
    ("train --init-from hollow", 2, ("hollow: has no .safetensors",)),
    ("train --resume --run-dir model", 2, ("nothing to resume in model",)),
    ("export runs/mine-20250101-000000/checkpoints out", 2, ("zerocli export runs/mine-20250101-000000 OUT",)),
    ("generate hollow hi --ranks -1", 2, ("--ranks -1: is below 1",)),
    # folders of the nvme tier, looked at in a dry run as in a run, if something may be placed there
    (
        "train --offload nvme --stage 3 --nvme-path TYPO",
        2,
        ("--nvme-path TYPO: there is no such folder", "mkdir -p TYPO"),
    ),
    ("train --offload nvme --stage 3 --nvme-path TYPO --dry-run", 2, ("TYPO: there is no such folder",)),
    (
        "train --offload optimizer=cpu:1MiB+nvme --stage 1 --nvme-path notes.md",
        2,
        ("notes.md: is a file, not a folder",),
    ),
    ("train --offload nvme --stage 3 --nvme-path /proc --dry-run", 2, ("/proc: no file can be written there",)),
    ("train --offload nvme --stage 3 --nvme-path hollow,TYPO --nvme-path notes.md", 2, ("hollow,TYPO: ", "notes.md: ")),
    ("train --auto --nvme-path TYPO", 2, ("TYPO: there is no such folder",)),
    ("train --auto --nvme-path TYPO --dry-run", 2, ("TYPO: there is no such folder",)),
    ("profile --offload nvme --stage 3 --nvme-path TYPO", 2, ("TYPO: there is no such folder",)),
    ("profile --offload nvme --stage 3 --nvme-path notes.md --dry-run", 2, ("notes.md: is a file",)),
    # data, read in a dry run as in a run
    ("train --data nowhere.txt --dry-run", 2, ("nowhere.txt", "try: ")),
    ("train --data emptyy.txt --dry-run", 2, ("try: --data empty.txt",)),
    ("train --data a/b --dry-run", 2, ("load_dataset", "--data data.jsonl")),
    ("train --data https://x.org/a.jsonl --dry-run", 2, ("curl -LO https://x.org/a.jsonl",)),
    ("train --data short.txt,notes.md --dry-run", 2, ("try: --data short.txt --data notes.md",)),
    ("train --data cut.jsonl --dry-run", 2, ("cut.jsonl:2: is not JSON", "try: sed -n 2p cut.jsonl")),
    ("train --data image.jsonl --dry-run", 2, ('is "image", and only text is trained on',)),
    ("train --data paper.pdf --dry-run", 2, (".pdf is no text",)),
    ("train --data mixed --dry-run", 2, ("try: --data mixed/a.jsonl",)),
    ("train --data empty.txt --dry-run", 2, ("empty.txt",)),
    ("train --data hollow --dry-run", 2, ("hollow",)),
    ("train --data odd.bin --dry-run", 2, ("3 bytes is not a multiple of 2",)),
    ("train --data short.txt --dry-run", 2, ("short.txt",)),
    ("train --set data.tokenizer=nowhere.json --data short.txt --dry-run", 2, ("nowhere.json",)),
    # folders
    ("train --resume", 2, ("nothing to resume", "--run-dir")),
    ("train --resume --run-dir runs/mien-20250101-000000", 2, ("no such folder", "runs/mine-20250101-000000")),
    (
        "train --resume --run-dir TYPO",
        2,
        ("resume in TYPO", "zerocli train --run-dir runs/mine-20250101-000000 --resume"),
    ),
    ("train --resume --run-dir hollow", 2, ("no checkpoint and no config.json",)),
    ("profile --resume --run-dir TYPO", 2, ("nothing to resume in TYPO", "zerocli profile")),
    ("train --run-dir notes.md", 2, ("notes.md",)),
    ("train --run-dir /proc/nowhere", 2, ("cannot write the run folder", "--run-dir")),
    ("profile nowhere", 2, ("zerocli configs ls",)),
    ("profile hollow", 2, ("is empty: no run was ever here",)),
    ("profile tiny nowhere", 2, ("is not a run",)),
    ("profile tiny --html", 2, ("requires an argument", "zerocli profile --help")),
    ("profile tiny --html /proc/nowhere/x.html", 2, ("no file can be written there",)),
    ("profile tiny --html hollow", 2, ("no file can be written there",)),
    ("profile hollow --stage 3", 2, ("--stage: hollow is a run",)),
    ("profile --dry-run --batch 1000000", 3, ()),
    ("export nowhere out", 2, ("no such folder", "zerocli export runs/mine")),
    ("export notes.md out", 2, ("is a file",)),
    ("export export out", 2, ("--init-from export",)),
    ("export hollow out --dtype int8", 2, ("'fp32', 'bf16', 'fp16'",)),
    ("export hollow out --file-size 5", 2, ("did you mean 5GiB?",)),
    ("env --bench --nvme-path TYPO", 2, ("no such folder", "mkdir -p TYPO")),
    ("env --nvme-path notes.md", 2, ("is a file",)),
    ("env --bench --nvme-path /proc", 2, ("no file can be written there",)),
    ("configs show tinny", 2, ("did you mean tiny?",)),
    ("configs cp tiny notes.md", 2, ("cannot write",)),
    # fit and check
    ("fit 7X", 2, ("not a parameter count", "zerocli fit 7.5B")),
    ("fit 7.5", 2, ("did you mean 7.5B?",)),
    ("fit 0", 2, ("below 1",)),
    ("fit 7", 2, ("a model of 7 parameters?", "zerocli fit 7B")),
    ("fit llama3-8b --gpu-memory 80", 2, ("did you mean 80GiB?",)),
    ("fit llama3-8b --gpu-memory 80GX", 2, ("GX is not one of", "--gpu-memory 80GiB")),
    ("fit llama3-8b --hardware h1000", 2, ("did you mean h100?",)),
    ("fit llama3-8b --ranks 0", 2, ("ranks 0 is below 1",)),
    ("fit llama3-8b --ranks 8 --tp 3", 2, ("tp 3 does not divide ranks 8", "--ranks 9")),
    ("fit llama3-8b --max foo", 2, ("model, batch, seq",)),
    ("fit llama3-8b --tokens lots", 2, ("not a number of tokens", "--tokens 1T")),
    ("fit llama3-8b --price 2", 2, ("--tokens",)),
    ("fit llama3-8b --lora x", 2, ("--lora 16",)),
    ("fit llama3-8b --lora 16:zz", 2, ("no block of llama has a projection zz; there are q, k, v", "--lora 16:q")),
    # adapters
    ("train --lora 0", 2, ("is not a rank from 1", "--lora 16")),
    ("train --lora 16:", 2, ("names no layers after the colon", "--lora 16:q_proj,v_proj")),
    ("train --lora ./hollow", 2, ("has no adapter_config.json", "--lora 16")),
    ("train --lora ./prefix", 2, ('its adapters are "PREFIX_TUNING"', "--lora 16")),
    ("train --lora ./patterns", 2, ("bias", "is not supported")),
    ("train --lora 4 --set lora.rank_pattern=q_proj", 2, ('"q_proj" is not NAME=RANK', "rank_pattern=down_proj=4")),
    ("train --lora ./pissa", 2, ('init_lora_weights "pissa" is not supported',)),
    ("train --lora ./cut-adapter", 2, ("is not JSON",)),
    ("train --lora 4 --tp 2 --ranks 2", 2, ("adapters are not split over ranks", "--tp 1")),
    (
        "train --lora 4 --set optimizer.name=muon",
        2,
        ("muon is for whole matrices", "the same without --set optimizer.name=muon"),
    ),
    ("train --lora 4 --set train.freeze=wte", 2, ("all else is frozen anyway",)),
    ("train --set lora.alpha=8", 2, ("alpha is of adapters, and lora.rank is 0", "--lora 16")),
    ("train --set lora.dropout=1 --lora 4", 2, ("dropout",)),
    (
        "train quantized --data short.txt --lora 4 --set data.tokenizer=bytes",
        2,
        ('its weights are quantized ("aqlm")', "original weights"),
    ),
    ("fit 7B --lora 16", 2, ("a bare count has no layers", "zerocli fit llama3-8b --lora 16")),
    ("fit llama3-8b --offload gpu", 2, ("--offload cpu",)),
    ("fit llama3-8b --precision int8", 2, ("not one of auto",)),
    ("fit llama3-8b --set hardware.pcei=3", 2, ("pcie",)),
    ("fit zero-1t --ranks 1 --hardware t4", 3, ()),
    ("check tiny --stage 7", 2, ("0<=x<=3",)),
    ("check tiny --offload gpu", 2, ("'gpu' is neither",)),
    ("check tiny --nvme-path /proc/nowhere", 2, ("no such folder", "try: ")),
    ("check tiny --nvme-path notes.md", 2, ("is a file", "try: ")),
    ("check llama3-70b", 3, ("too large", "GiB needed")),
    ("completion tcsh", 2, ("'bash', 'zsh', 'fish'",)),
]


@pytest.fixture
def here(folder, monkeypatch, tmp_path):
    """Run in the folder, as nobody's rank, on a machine without GPUs; starting ranks is a failure."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "ZEROCLI_", "TORCHELASTIC_"))]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(folder)

    def start(job):
        raise AssertionError("the ranks were started")

    monkeypatch.setattr(Job, "run", start)


@pytest.mark.parametrize(("line", "code", "words"), ROWS, ids=[row[0] for row in ROWS])
def test_a_mistake_gets_the_fact_and_the_next_command(line, code, words, here, folder, capsys):
    if line.endswith(("config.yaml", "twice.yaml", "code.yaml")):
        pytest.importorskip("yaml", reason="PyYAML is an optional extra")
    before = sorted(folder.rglob("*"))
    assert cli.run(shlex.split(line)) == code
    shown = capsys.readouterr()
    text = shown.err + (shown.out if code == 3 else "")
    for each in words:
        assert each in text, text
    if code == 2:
        assert re.search(r"^error: ", shown.err, re.MULTILINE) and not shown.out
    if not line.startswith("fit zero-1t"):
        assert re.search(r"^try: \S", text, re.MULTILINE), text
    assert "Traceback" not in text and "bug in zerocli" not in text
    assert sorted(folder.rglob("*")) == before  # nothing is left behind


def test_there_are_enough_rows_and_none_twice():
    lines = [row[0] for row in ROWS]
    assert len(lines) >= 120 and len(set(lines)) == len(lines)


def test_a_group_without_a_command_shows_its_help(here, capsys):
    assert cli.run(["configs"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("Usage: ") and "error:" not in shown


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"RANK": "x"}, "RANK=x is not a number"),
        ({"RANK": "5"}, "RANK=5, but WORLD_SIZE=2"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 is not a number from 1 on"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999 is not a number from 1 to 65535"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT=http is not"),
    ],
)
def test_variables_of_a_launcher_are_checked(changes, words, here, monkeypatch, capsys):
    given = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"} | changes
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert cli.run(["train", "tiny"]) == 2
    err = capsys.readouterr().err
    assert words in err and "try: torchrun" in err and "Traceback" not in err


def test_a_deliberate_bug_is_still_called_one(here, monkeypatch, capsys):
    """The rows above could pass because everything is taken for a user's error."""
    monkeypatch.setitem(sys.modules, "zerocli.plan.report.preflight", None)
    monkeypatch.setattr("zerocli.run.processes.launch.choose_ranks", lambda *_: 1 / 0)
    assert cli.run(["train", "tiny"]) == 1
    assert "a bug in zerocli" in capsys.readouterr().err
