"""What can be set: the sections, their keys, each key's default and law. (No torch.)"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from offload.placement import Placement
from zerocli.config.file import FACTORY
from zerocli.layout.codecs import BASES
from zerocli.layout.ranges import RANGES
from zerocli.layout.recompute import POLICY


def setting(default: Any, **law: Any) -> Any:
    """Return a field and the law of its value: `choices`, `least`, `most`, `above`, `below`, `size` (of bytes).

    `meant` maps other programs' values to choices.

    `memory` marks the size of a device: of text, a small number without a unit is refused. `share` marks a number of
    steps that may also be a share of the run's, below 1; a run turns it into steps when it knows how many it has.
    """
    return dataclasses.field(default=default, metadata=law)


SHARD_STATES = ("group", "all")
MASTERS = ("split", "fp32")
SCHEDULES = ("cosine", "linear", "constant", "wsd")


@dataclass(frozen=True)
class ModelConfig:
    """The model's shape."""

    family: str = setting("gpt2", choices=("gpt2", "llama"))
    """Which built-in model: gpt2 or llama."""
    layers: int = setting(4, least=1, most=10_000)
    """Transformer blocks; at most 10,000, as a plan goes through them one by one."""
    hidden: int = setting(128, least=1)
    """Width of the residual stream."""
    heads: int = setting(4, least=1)
    """Attention heads; they divide `hidden` unless `head_dim` is given."""
    kv_heads: int = setting(0, least=0)
    """Heads of keys and values (grouped-query attention); 0 = as many as `heads`."""
    vocab: int = setting(256, least=1)
    """Token ids the model knows: 0 to vocab - 1."""
    mlp_hidden: int = setting(0, least=0)
    """Width inside the MLP; 0 = the family's own rule."""
    dropout: float = setting(0.0, least=0, below=1)
    """Share of activations dropped in training."""
    tie: bool = setting(True)
    """Whether the output layer shares the embedding's weights."""
    bias: bool = setting(True)
    """Whether linear layers have biases."""
    rope_theta: float = setting(10000.0, above=0)
    """Base of the rotary embedding's wavelengths (llama)."""
    norm_eps: float = setting(1e-5, above=0)
    """Added under the root in normalisation."""
    head_dim: int = setting(0, least=0)
    """Width of a head; 0 = hidden / heads (llama)."""
    qkv_bias: bool = setting(False)
    """Whether the projections to queries, keys and values have biases (llama)."""
    out_bias: bool = setting(False)
    """Whether attention's output projection has a bias (llama)."""
    mlp_bias: bool = setting(False)
    """Whether the MLP's projections have biases (llama)."""
    qk_norm: bool = setting(False)
    """Whether each head's queries and keys are normalised (llama)."""
    window: int = setting(0, least=0)
    """Tokens that a token attends to, itself included; 0 = all before it (llama)."""
    window_layers: str = setting("", form=RANGES, example="0-3,7")
    """Layers with the window, counted from 0; empty = all of them."""
    rope_scaling: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """How rotary positions are scaled, with the keys of Hugging Face: `{rope_type = "llama3", factor = 8.0, ...}`."""
    positions: int = setting(0, least=0)
    """Positions the model was made for: rows of GPT-2's table, bound of `train.seq`; 0 = train.seq."""
    type: str = setting("", choices=("", "gpt2", "llama", "mistral", "qwen2", "qwen3"))
    """The model_type that an export writes, of those that have this shape; empty = the simplest."""
    factory: str = setting("", form=FACTORY, example="package.module:callable")
    """`package.module:callable` that builds the model instead of a built-in family."""
    folder: str = setting("")
    """Folder of the Hugging Face config.json (or config of another name) that the model is from, with its tokenizer."""
    code: str = setting("auto", choices=("auto", "zerocli", "transformers"))
    """Whose code a Hugging Face config is built with; auto = ours where it covers the config exactly."""
    compile: bool | str = setting("auto", choices=("auto", True, False))
    """Whether the repeated blocks go through torch.compile; auto = on a GPU, in runs of 200 steps or more."""

    @property
    def external(self) -> bool:
        """Whether code other than our own builds the model: then the other keys do not describe its shape."""
        return bool(self.factory) or self.code == "transformers"

    @property
    def source(self) -> str:
        """What an external model is built from: the factory, or the folder."""
        return self.factory or self.folder


@dataclass(frozen=True)
class TrainConfig:
    """One training run."""

    steps: int = setting(100, least=1)
    """Optimizer steps."""
    epochs: float = setting(0.0, least=0)
    """Passes over the data; sets `steps`. 0 = `steps` counts."""
    batch: int = setting(8, least=1)
    """Sequences per data-parallel rank and micro-step."""
    seq: int = setting(128, least=1)
    """Tokens of a sequence."""
    accumulate: int = setting(1, least=1)
    """Micro-steps whose gradients are summed before an optimizer step."""
    global_batch: int = setting(0, least=0)
    """Sequences a step over all ranks; `accumulate` follows from it. 0 = batch x ranks x accumulate."""
    clip: float = setting(1.0, least=0)
    """Largest norm of the whole gradient; 0 = not clipped."""
    precision: str = setting("auto", choices=("auto", "fp32", "bf16", "fp16"))
    """What the model computes in; auto = bf16 where the device supports it."""
    seed: int = setting(1234, least=0)
    """Decides the first weights, the order of the data and dropout."""
    on_nan: str = setting("stop", choices=("stop", "continue"))
    """What a loss that is not finite does to the run."""
    gpu_memory: int = setting(0, least=0, size=True, memory=True)
    """Bytes of each GPU that the run may take, to try a smaller one; 0 = all."""
    init_from: str = setting("")
    """Folder with safetensors whose weights the run starts from; empty = new ones."""
    watchdog: float = setting(600.0, least=0)
    """Seconds after which a collective, transfer, save or stage of the start that is stuck ends the run; 0 = never."""
    adapt: bool | str = setting("auto", choices=("auto", True, False))
    """Whether the placement changes where steps measure other than was planned; auto = with --auto."""
    log_every: int = setting(10, least=1)
    """Steps between two lines of progress where there is no terminal."""
    eval_every: int = setting(0, least=0, share=True)
    """Steps between evaluations on the held-out data, below 1 a share of the run; 0 = only at the end, if there is
    held-out data."""
    eval_batches: int = setting(0, least=0)
    """At most this many batches of `batch` sequences per evaluation, over all ranks; 0 = all held-out data."""
    patience: int = setting(0, least=0)
    """Evaluations in a row without a lower loss after which the run ends; 0 = it never ends early."""
    log_to: tuple[str, ...] = setting((), each=("tensorboard", "wandb", "wandb-online", "mlflow"))
    """Further places for metrics, beside metrics.jsonl: tensorboard, wandb (offline), wandb-online, mlflow."""
    freeze: tuple[str, ...] = setting(())
    """Parameters that are not trained: regular expressions found in their names."""
    on_inputs: bool = setting(False)
    """Whether prompts and other people's turns count for the loss too; the same as `data.mask=none`."""
    sample_every: int = setting(0, least=0)
    """Steps between samples of text that the model generates; 0 = none."""
    sample_prompt: str = setting("")
    """What the samples begin with; empty = a line end."""
    sample_tokens: int = setting(64, least=1)
    """Tokens of a sample."""


@dataclass(frozen=True)
class OptimizerConfig:
    """How a gradient becomes an update."""

    name: str = setting("adamw", form=re.compile(r"[^\W\d][\w.]*"), example="adamw")
    """adamw, or a class of torch.optim by its name."""
    lr: float = setting(3e-4, least=0)
    """The highest learning rate."""
    betas: tuple[float, float] = setting((0.9, 0.95), least=0, below=1)
    """Decay of the two moments (Adam)."""
    eps: float = setting(1e-8, least=0)
    """Added to the root of the second moment (Adam)."""
    weight_decay: float = setting(0.1, least=0)
    """Decoupled decay of matrices, a step, times the learning rate."""
    momentum: float = setting(0.9, least=0, below=1)
    """Momentum (SGD)."""
    master: str = setting("split", choices=MASTERS)
    """The fp32 master of bf16 parameters: the 16 bits that they lack, beside them (split), or all 32 again (fp32)."""
    warmup: int = setting(0, least=0, share=True)
    """Steps over which the learning rate rises from zero; below 1 a share of the run."""
    warmup_shape: str = setting("linear", choices=("linear", "log"))
    """How it rises: linear, or log (as DeepSpeed's default: log(step) / log(warmup))."""
    schedule: str = setting("cosine", choices=SCHEDULES)
    """How the learning rate falls after the warm-up; wsd = it stays, and falls over the last `decay` steps."""
    decay: float = setting(0.2, above=0)
    """Length of the decay of wsd: up to 1 a share of `steps`, above 1 a number of steps."""
    min_lr: float = setting(0.1, least=0, most=1)
    """Where it ends, as a fraction of `lr`."""
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Further keyword arguments for other classes of torch.optim."""
    compile: bool | str = setting("auto", choices=("auto", True, False))
    """Whether updates on the CPU (Adam, AdamW) are one operation, compiled by the machine's C compiler; auto = if there
    is one, many parameters are updated, and it is faster, measured."""


@dataclass(frozen=True)
class ZeroConfig:
    """What is partitioned, and through which buffers it travels."""

    stage: int = setting(2, choices=(0, 1, 2, 3))
    """0: nothing; 1: optimizer states; 2: and gradients; 3: and parameters are partitioned."""
    bucket: int = setting(32 * 2**20, least=1, size=True)
    """Bytes of one reduction bucket; files may say `64MiB`."""
    buffers: int = setting(2, least=2)
    """Gather buffers per size class: one computes while the next is filled."""
    reduce: str = setting("compute", choices=("compute", "fp32"))
    """Type of gradients on the wire: the compute type, or fp32 at twice the bytes."""


@dataclass(frozen=True)
class ActivationsConfig:
    """What becomes of activations between forward and backward."""

    policy: str = setting("keep", form=POLICY, example="keep, selective, recompute, auto or recompute:12+selective:20")
    """Keep them, or keep each block's input (its checkpoint) and recompute the rest; selective = keep the outputs of
    matrix products and attention too, and recompute only the cheap operations between them; auto = recompute as little
    as the device's memory allows; recompute:12+selective:20 = the first 12 blocks whole, the next 20 selectively.
    `--offload activations=TIER` says where checkpoints rest, and means recompute."""
    partition: bool = setting(True)
    """Whether tensor-parallel ranks, which have equal checkpoints, each keep a part of them (Pa)."""


@dataclass(frozen=True)
class OffloadConfig:
    """Which tier holds which model states."""

    placement: Placement = setting(Placement())
    """What the text of `--offload` says, such as `cpu` or `params=cpu,optimizer=nvme`; empty = all on the device."""
    update: str = setting("auto", choices=("auto", "cpu", "stream", "both"))
    """Where offloaded optimizer states are updated: on the CPU, streamed through the device, or a part on each at once;
    auto = both where that gives the bits of stream and the CPU is fast enough, measured, else stream."""
    nvme_path: tuple[str, ...] = setting(())
    """Folders of the nvme tier; several are striped."""
    staging: int = setting(512 * 2**20, least=1, size=True)
    """Bytes of device (or host) memory, a rank, through which offloaded states are streamed for their update."""
    read_ahead: int = setting(512 * 2**20, least=0, size=True)
    """Bytes of host memory, a rank, for copies of parameters on disks, read ahead of their use; 0 = none."""
    verify: bool = setting(False)
    """Whether all that is read back from host memory or a disk is compared with checksums of what was written."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When the run is saved."""

    every: int = setting(0, least=0, share=True)
    """Steps between checkpoints, below 1 a share of the run; the last step is saved too. 0 = never; `zerocli train`
    saves unless it is set to that."""
    async_: bool = setting(True)
    """Whether training goes on while a checkpoint is written (`async` in files)."""
    keep: int = setting(2, least=1)
    """How many of the newest are kept."""
    keep_every: int = setting(0, least=0)
    """Beside those, each whose step is a multiple of this is kept; 0 = none."""
    best: bool = setting(False)
    """Whether the step with the lowest evaluation loss is saved and kept, beside those (RUN/best.json names it)."""
    buffer: int = setting(2**30, least=1, size=True)
    """Bytes of host memory, a rank, that a checkpoint passes through on its way to disk."""
    time_limit: float = setting(0.0, least=0)
    """Seconds the run may take; shortly before, it is saved and ends with exit code 75. 0 = no limit."""


_OURS = "(text|prompt|completion|messages|conversations|instruction|input|output|system|tools)"
_COLUMNS = re.compile(rf"[^,:]+:{_OURS}(,[^,:]+:{_OURS})*")


@dataclass(frozen=True)
class DataConfig:
    """Where tokens come from."""

    path: str = setting("")
    """Text, documents (.jsonl, .json, .csv, .parquet) or token ids (.bin, .npy); empty = Python's library."""
    mix: tuple[str, ...] = setting(())
    """Several files or folders of documents, each PATH or PATH:WEIGHT; `path` is then the first of them."""
    columns: str = setting("", form=_COLUMNS, example="question:prompt,answer:completion")
    """What columns of other names are, as THEIRS:OURS,...; no others are read then."""
    system: str = setting("")
    """The system prompt of conversations that have none."""
    tokenizer: str = setting("")
    """`bytes`, or a tokenizer.json or its folder; empty = that of the model's folder if it has one, else bytes."""
    dtype: str = setting("", choices=("", "uint16", "uint32"))
    """Type of the ids in a .bin; empty = uint16."""
    mask: str = setting("auto", choices=("auto", "none"))
    """What of a document counts for the loss: auto = completions and the assistant's turns; none = every token."""
    pack: bool = setting(True)
    """Whether several documents share a window, with attention within each; false = one per window, padded."""
    long: str = setting("auto", choices=("auto", "split", "truncate", "drop"))
    """What happens to a document longer than `seq`; auto = rows of text are split, others truncated."""
    cache: str = setting("")
    """Folder for tokenised data; empty = beside the data, or the user's cache folder where that cannot be written."""
    validation: str = setting("")
    """Held-out data for evaluation, as `path`; empty = a part of `path`, see `split`."""
    split: float = setting(0.0, least=0, below=1)
    """Share at the end of the data that is held out for evaluation; 0 = none, or 0.05 if `eval_every` is set."""


ALL_LINEAR = "all-linear"
MAX_LORA_RANK = 65536


@dataclass(frozen=True)
class LoraConfig:
    """Adapters of low rank that are trained beside a frozen model."""

    rank: int = setting(0, least=0, most=MAX_LORA_RANK)
    """Rank of the adapters; 0 = there are none, and all parameters are trained."""
    targets: tuple[str, ...] = setting((ALL_LINEAR,))
    """The linear layers that get one: all-linear (all but the output layer), or names such as q_proj or mlp.down_proj,
    or regular expressions of whole names."""
    alpha: float = setting(0.0, least=0)
    """What an adapter adds is multiplied by alpha / rank; 0 = twice the rank."""
    rank_pattern: tuple[str, ...] = setting(())
    """Layers with adapters of another rank, such as experts.down_proj=4: the end of peft's name, or a regular
    expression of it, and the rank; the first that fits counts."""
    alpha_pattern: tuple[str, ...] = setting(())
    """Layers whose adapters have another alpha, in the same form."""
    dropout: float = setting(0.0, least=0, below=1)
    """Share of an adapter's inputs dropped in training."""
    rslora: bool = setting(False)
    """Whether the factor is alpha / sqrt(rank) instead, which suits ranks above about 32."""
    dora: bool = setting(False)
    """Whether the length of each row of a matrix is trained apart from its direction (DoRA)."""
    save_modules: tuple[str, ...] = setting(())
    """Modules that are trained whole beside the adapters, and saved with them: embed_tokens, lm_head."""
    dtype: str = setting("compute", choices=("compute", "fp32"))
    """What adapters compute in: as the model (their master is fp32 in any case), or fp32."""
    base: str = setting("", choices=BASES, meant=dict.fromkeys(("int4", "fp4", "4bit", "4"), "nf4"))
    """What the frozen matrices of the repeated blocks are stored in: nf4 (4.13 bits), int8 (8.13 bits), or as they
    compute (bf16, or empty)."""
    start: str = setting("")
    """A folder of adapters that peft or `zerocli export` wrote, to go on from."""


@dataclass(frozen=True)
class ParallelConfig:
    """How many processes, and how they split the work."""

    ranks: int = setting(0, least=0)
    """Processes in all; 0 = one a GPU, or 2 without a GPU."""
    tp: int = setting(1, least=1)
    """Ranks that split each layer between them (tensor parallel); they divide `ranks`."""
    shard_ranks: int = setting(0, least=0)
    """Neighbouring data-parallel ranks over which states are partitioned; other groups hold copies. 0 = all ranks."""
    shard_states: str = setting("group", choices=SHARD_STATES)
    """all = with shard_ranks, states are partitioned over all ranks, and only parameters are copied to each group."""


PRESETS: dict[str, dict[str, object]] = {
    f"C{number}": {
        "zero.stage": stage,
        "activations.policy": "recompute",
        "activations.partition": partition,
        "offload.placement": placement,
    }
    for number, stage, partition, placement in (
        (1, 1, False, ""),
        (2, 1, True, ""),
        (3, 2, False, ""),
        (4, 2, True, ""),
        (5, 2, True, "activations=cpu"),
    )
}
"""The ZeRO paper's configurations. Constant buffers and contiguous arenas (CB, MD) are always there."""


@dataclass(frozen=True)
class Config:
    """Everything a run is made of."""

    name: str = setting("unnamed", form=re.compile(r"\w[\w.-]*"), example="my-model")
    """What the run is called: letters, digits, `.`, `_` and `-`."""
    preset: str = setting("", choices=("", *PRESETS))
    """C1 to C5 of the ZeRO paper: sets stage, activations and offload together; keys that come after it go first."""
    model: ModelConfig = ModelConfig()
    """The model's shape."""
    train: TrainConfig = TrainConfig()
    """The training run."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer and its learning rate."""
    zero: ZeroConfig = ZeroConfig()
    """What is partitioned."""
    activations: ActivationsConfig = ActivationsConfig()
    """What becomes of activations."""
    offload: OffloadConfig = OffloadConfig()
    """Which tier holds what."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When the run is saved."""
    data: DataConfig = DataConfig()
    """Where tokens come from."""
    parallel: ParallelConfig = ParallelConfig()
    """How many processes."""
    lora: LoraConfig = LoraConfig()
    """Adapters."""

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """Return the config with these values, by dotted key."""
        config = self
        for key, value in values.items():
            section = key.partition(".")[0]
            changed = dataclasses.replace(getattr(config, section), **{FIELDS[key].name: value})
            config = dataclasses.replace(config, **{section: changed})
        return config


SECTIONS: dict[str, type] = {f.name: f.type for f in dataclasses.fields(Config) if dataclasses.is_dataclass(f.type)}  # type: ignore[misc]
# Dotted key, as in files, to field: `checkpoint.async` to async_, which Python keeps the bare word from.
FIELDS: dict[str, dataclasses.Field[Any]] = {field.name: field for field in dataclasses.fields(Config)[:2]} | {
    f"{section}.{field.name.rstrip('_')}": field
    for section, kind in SECTIONS.items()
    for field in dataclasses.fields(kind)
}


def short(key: str) -> str:
    """Return a dotted key without its section."""
    return key.rpartition(".")[2]


def get(config: Config, key: str) -> Any:
    """Return the value of a dotted key."""
    section = key.rpartition(".")[0]
    return getattr(getattr(config, section) if section else config, FIELDS[key].name)
