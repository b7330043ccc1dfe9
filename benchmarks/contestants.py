"""The contestants of `compare.py`: each makes the same model into a training step; run as a script it is one rank.

Everyone has the same model code and loss, initial values, batches, fused AdamW (weight decay on matrices only) and
clipping. The model is a built-in family, or Llama or GPT-2 of the transformers library, whose loss is always `plain`.
bf16 means bf16 parameters and gradients in computation and on the wire, and fp32 masters for the optimizer: zerocli's
own; FSDP2's mixed-precision policy over fp32 parameters; DDP around a bf16 model, with masters kept by hand.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

Step = Callable[[Tensor, Tensor], Tensor]
"""Trains on (tokens, targets) and returns this rank's loss, which is still on the device."""

LR, BETAS, WEIGHT_DECAY, SEED = 3e-4, (0.9, 0.95), 0.1, 1234
NUM_BATCHES = 4
"""Distinct batches, used in turn: few enough that the loss falls within a short run."""
NUM_WINDOWS = 3
"""A turn's timed steps are cut into this many windows; their median counts."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What every contestant trains, and how."""

    device: str
    ranks: int
    precision: str
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    """Heads of keys and values; 0: as many as `heads`."""
    vocab: int
    tie: bool
    loss: str
    """`built-in`, which never holds all the logits, or `plain`: torch's cross-entropy of all the logits."""
    seq: int
    batch: int
    recompute: bool
    compile: bool
    clip: float
    steps: int
    warmup: int
    mlp: int = 0
    """Width of the feed-forward layers of transformers' Llama; 0: by the built-in rule."""
    lora: int = 0
    """Rank of peft's adapters on all linear layers of transformers' Llama, whose base is frozen in bf16; 0: none."""
    offload: str = ""
    """zerocli's alone."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    @property
    def tokens_per_step(self) -> int:
        return self.ranks * self.batch * self.seq


@dataclasses.dataclass(frozen=True)
class Turn:
    """What one contestant did in one round."""

    parameters: int
    step_seconds: float
    cpu_seconds: float
    """Processor time of rank 0 a step: on a CPU that others use too, steadier than the clock."""
    tokens_per_second: float
    peak_nbytes: int
    losses: list[float]


# -- the contestants: each makes a model into a training step ----------------------------------------------------------


def make_zero(job: Job, model: nn.Module, device: torch.device, stage: int) -> Step:
    import zerocli

    engine = zerocli.shard(
        model,
        stage=stage,
        optimizer="adamw",
        lr=LR,
        betas=BETAS,
        weight_decay=WEIGHT_DECAY,
        precision=job.precision,
        clip=job.clip or None,
        units=model.unit_modules(),  # type: ignore[operator]
        recompute=job.recompute,
        compile=job.compile,
        offload=job.offload,
        device=device,
    )

    return step_of(engine)


def step_of(engine: Any) -> Step:
    """Return the step of an engine that has its own backward and step."""

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss

    return step


def make_ddp(job: Job, model: nn.Module, device: torch.device) -> Step:
    prepare_blocks(job, model)
    parameters = list(model.parameters())
    masters = parameters
    if job.dtype != torch.float32:
        masters = [nn.Parameter(p.detach().clone()) for p in parameters]
        for master in masters:
            master.grad = torch.zeros_like(master)
        for parameter in parameters:  # not the buffers: rotary frequencies stay in fp32, as everyone else has them
            parameter.data = parameter.data.to(job.dtype)
    optimizer = make_adamw(masters)
    replica = nn.parallel.DistributedDataParallel(
        model, device_ids=[device] if device.type == "cuda" else None, gradient_as_bucket_view=True
    )

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = replica(tokens, targets)
        loss.backward()
        if masters is not parameters:
            torch._foreach_copy_([m.grad for m in masters], [p.grad for p in parameters])
        clip(job, masters)
        optimizer.step()
        if masters is not parameters:
            with torch.no_grad():
                torch._foreach_copy_(parameters, masters)
        replica.zero_grad()
        return loss

    return step


def make_fsdp2(job: Job, model: nn.Module, device: torch.device, reshard: bool) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    prepare_blocks(job, model)
    mesh = init_device_mesh(device.type, (job.ranks,))
    low = job.dtype if job.dtype != torch.float32 and not job.lora else None  # peft's model is in that dtype already
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=low)
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    # None is FSDP2's own choice for the root, which backward needs first: it stays whole.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=None if reshard else False)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = make_adamw(parameters)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = model(tokens, targets)
        loss.backward()
        clip(job, parameters)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def make_deepspeed(job: Job, model: nn.Module, device: torch.device, stage: int) -> Step:
    import deepspeed

    prepare_blocks(job, model)
    config = {
        "train_micro_batch_size_per_gpu": job.batch,
        "gradient_clipping": job.clip,
        "bf16": {"enabled": job.precision == "bf16"},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=make_adamw(list(model.parameters())), config=config)

    return step_of(engine)


CONTESTANTS: dict[str, Callable[[Job, nn.Module, torch.device], Step]] = {
    "zero0": functools.partial(make_zero, stage=0),
    "ddp": make_ddp,
    "zero2": functools.partial(make_zero, stage=2),
    "fsdp2-keep": functools.partial(make_fsdp2, reshard=False),
    "zero3": functools.partial(make_zero, stage=3),
    "fsdp2": functools.partial(make_fsdp2, reshard=True),
    "zero1": functools.partial(make_zero, stage=1),
    **{f"ds{stage}": functools.partial(make_deepspeed, stage=stage) for stage in (1, 2, 3)},
}
"""In the order of a round: those that are compared stand side by side."""


def prepare_blocks(job: Job, model: nn.Module) -> None:
    """Compile and recompute each block as asked, as zerocli does by its own settings."""
    from torch.utils.checkpoint import checkpoint

    for block in model.blocks:  # type: ignore[union-attr]
        if job.compile:
            block.forward = torch.compile(block.forward)
        if job.recompute:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def make_adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS, fused=True)


def clip(job: Job, parameters: Sequence[nn.Parameter]) -> None:
    if job.clip:
        torch.nn.utils.clip_grad_norm_(parameters, job.clip)


def why_not(name: str, job: Job) -> str:
    """Return why a contestant cannot take part, or an empty string."""
    if name.startswith("ds") and importlib.util.find_spec("deepspeed") is None:
        return "DeepSpeed is not installed"
    if name.startswith("ds") and job.device == "cpu":
        return "DeepSpeed is compared on GPUs only"
    return ""


# -- one rank of one turn ----------------------------------------------------------------------------------------------


def work(job: Job, name: str, result: Path) -> None:
    """Train as one rank; rank 0 writes what was measured to `result`."""
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu")
    if job.device == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    model = make_model(job, device)
    parameters = sum(p.numel() for p in model.parameters())
    batches = make_batches(job, rank, device)
    step = CONTESTANTS[name](job, model, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # of training; building the model is nobody's concern here
    losses = [step(*batches[i % NUM_BATCHES]).detach() for i in range(job.warmup)]
    seconds, cpu_began = [], time.process_time()
    for count in window_sizes(job.steps):
        began = now(device)
        losses += [step(*batches[(len(losses) + i) % NUM_BATCHES]).detach() for i in range(count)]
        seconds.append((now(device) - began) / count)
    cpu_seconds = (time.process_time() - cpu_began) / job.steps
    peak, means = torch.tensor(float(peak_nbytes(device)), device=device), torch.stack(losses).float()
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    dist.all_reduce(means)
    if rank == 0:
        median = statistics.median(seconds)
        rate = job.tokens_per_step / median
        turn = Turn(parameters, median, cpu_seconds, rate, int(peak.item()), (means / job.ranks).tolist())
        result.write_text(json.dumps(dataclasses.asdict(turn)))
    dist.barrier()
    dist.destroy_process_group()


def make_model(job: Job, device: torch.device) -> nn.Module:
    """Return the model with the same initial values for every contestant and rank; its forward returns the loss."""
    from zerocli.config import ModelConfig
    from zerocli.models import build

    torch.manual_seed(SEED)
    if job.family.startswith("hf-"):
        return PlainLoss(Transformers(job, device))
    shape = {name: getattr(job, name) for name in ("family", "layers", "hidden", "heads", "kv_heads", "vocab", "tie")}
    model = build(ModelConfig(**shape), job.seq, device)
    return PlainLoss(model) if job.loss == "plain" else model


class PlainLoss(nn.Module):
    """A model whose forward returns logits, with torch's cross-entropy of all of them, computed in their type."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model.blocks  # type: ignore[return-value]

    def unit_modules(self) -> list[nn.Module]:
        return self.model.unit_modules()  # type: ignore[operator]

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())


class Transformers(nn.Module):
    """Llama or GPT-2 of the transformers library, in the shape that the built-in one has; forward returns logits."""

    def __init__(self, job: Job, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM

        super().__init__()
        with device:
            self.causal = AutoModelForCausalLM.from_config(transformers_config(job), attn_implementation="sdpa")
        if job.lora:
            from peft import LoraConfig, inject_adapter_in_model

            self.causal.to(job.dtype)
            given = LoraConfig(r=job.lora, lora_alpha=2 * job.lora, target_modules="all-linear", task_type="CAUSAL_LM")
            inject_adapter_in_model(given, self.causal)

    @property
    def blocks(self) -> nn.ModuleList:
        body = self.causal.base_model
        return body.h if hasattr(body, "h") else body.layers

    def unit_modules(self) -> list[nn.Module]:
        """Return the modules that are units, by the same rule as the built-in models."""
        if self.causal.config.tie_word_embeddings:
            return list(self.blocks)
        return [self.causal.get_input_embeddings(), *self.blocks, self.causal.get_output_embeddings()]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.causal(input_ids=tokens).logits


def transformers_config(job: Job) -> Any:
    from transformers import GPT2Config, LlamaConfig

    about = {"vocab_size": job.vocab, "tie_word_embeddings": job.tie, "use_cache": False}
    if job.family == "hf-gpt2":
        none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return GPT2Config(n_layer=job.layers, n_embd=job.hidden, n_head=job.heads, n_positions=job.seq, **none, **about)
    return LlamaConfig(
        num_hidden_layers=job.layers,
        hidden_size=job.hidden,
        intermediate_size=job.mlp or -(-8 * job.hidden // (3 * 256)) * 256,  # the rule of zerocli.models.llama
        num_attention_heads=job.heads,
        num_key_value_heads=job.kv_heads or job.heads,
        max_position_embeddings=job.seq,
        rms_norm_eps=1e-5,
        **about,
    )


def make_batches(job: Job, rank: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Return this rank's batches of random tokens: the same for every contestant."""
    generator = torch.Generator().manual_seed(SEED + rank)
    shape = (NUM_BATCHES, job.batch, job.seq + 1)
    tokens = torch.randint(job.vocab, shape, generator=generator).to(device)
    return [(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in tokens]


def window_sizes(steps: int) -> list[int]:
    """Cut the steps into windows as even as can be, none of them empty."""
    windows = min(NUM_WINDOWS, steps)
    return [steps // windows + (i < steps % windows) for i in range(windows)]


def now(device: torch.device) -> float:
    """Return the time in seconds at which the device has finished everything it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def peak_nbytes(device: torch.device) -> int:
    """Return the most memory allocated on a GPU; on a CPU the largest resident size of the process, libraries too."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


if __name__ == "__main__":
    work(Job(**json.loads(sys.argv[1])), sys.argv[2], Path(sys.argv[3]))
    # The result is written: a thread that a peer left running must not turn the interpreter's end into a failure.
    sys.stdout.flush()
    os._exit(0)
