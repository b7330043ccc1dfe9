"""A DeepSpeed JSON config translated into our keys. (No torch, no DeepSpeed.)

What would change a number and has no counterpart is refused. What changes none is listed. `"auto"` means our own
value. Keys that DeepSpeed would fill with its own defaults get those defaults, so the numbers are DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zerocli.config import file as configfile
from zerocli.errors import ConfigError, Problem, quote

AUTO = "auto"
NO_EFFECT = "no effect on the numbers"
TORCH_OPTIMIZERS = ("Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "ASGD", "Rprop", "Adafactor")
REFUSED_IF_ON = {
    "amp": "apex amp",
    "progressive_layer_drop": "layers are dropped in training",
    "curriculum_learning": "the data's order and length change",
    "data_efficiency": "the data's order and length change",
    "quantize_training": "weights are quantized in training",
    "compression_training": "weights are compressed in training",
    "sparse_attention": "attention is sparse",
    "eigenvalue": "it drives quantization",
    "hybrid_engine": "a loop of its own",
}
"""Sections that change numbers when they are on, and how."""
HARMLESS = frozenset(
    "aio autotuning checkpoint comet comms_logger compile csv_monitor data_types dataloader_drop_last "
    "disable_allgather dump_state elasticity flops_profiler fp32_allreduce gradient_predivide_factor graph_harvesting "
    "load_universal_checkpoint memory_breakdown nebula prescale_gradients seq_parallel_communication_data_type "
    "sparse_gradients timers use_data_before_expert_parallelism wall_clock_breakdown zero_allow_untested_optimizer "
    "zero_force_ds_cpu_optimizer".split()
)
"""Keys that say how DeepSpeed works, not what it computes."""
DEVICES = {"none": "hbm", "cpu": "cpu", "nvme": "nvme"}


@dataclass
class Translation:
    """Our keys, with their values as `--set` takes them; and what was left out."""

    sets: dict[str, str] = field(default_factory=dict)
    without: list[str] = field(default_factory=list)
    """`key: reason` of what has no counterpart."""
    notes: list[str] = field(default_factory=list)
    """What differs although it has a counterpart."""


def translate(path: str) -> Translation:
    """Return the translation of a DeepSpeed config; raise ConfigError with everything that must be refused."""
    values, places, _ = configfile.read_values(path)
    reader = _Reader(path, values, places)
    _batches(reader)
    _precision(reader)
    _zero(reader)
    _optimizer(reader)
    _scheduler(reader)
    _activations(reader)
    _logging(reader)
    _others(reader)
    if reader.problems:
        raise ConfigError(reader.problems, hint="the file without these keys, or the run as DeepSpeed's")
    return reader.made


class _Reader:
    """The values of a file, and what was made of them; each key is taken once, the rest is listed."""

    def __init__(self, path: str, values: Mapping[str, Any], places: Mapping[str, str]) -> None:
        self._path, self._places = path, places
        self.values = dict(values)
        self.made = Translation()
        self.problems: list[Problem] = []

    def _table_of(self, key: str) -> tuple[dict[str, Any], str]:
        """Return the table that a dotted key is in, empty if there is none, and its name in it."""
        table: Any = self.values
        *outer, name = key.split(".")
        for each in outer:
            table = table.get(each) if isinstance(table, dict) else None
        return table if isinstance(table, dict) else {}, name

    def take(self, key: str, default: Any = None) -> Any:
        """Return and remove the value of a dotted key; `default` if it is absent or "auto"."""
        table, name = self._table_of(key)
        value = table.pop(name, default)
        return default if value == AUTO or value is None else value

    def has(self, key: str) -> bool:
        """Return whether a key is there, "auto" included."""
        table, name = self._table_of(key)
        return name in table

    def is_auto(self, key: str) -> bool:
        table, name = self._table_of(key)
        return bool(table.get(name) == AUTO)

    def set_number(self, ours: str, theirs: str, default: float) -> None:
        """Set our key to a number of theirs, or to their default; "auto" is our own default."""
        self.set(ours, self.number(theirs, None if self.is_auto(theirs) else default))

    def number(self, key: str, default: float | None = None) -> Any:
        value = self.take(key, default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            self.refuse(key, f"{quote(value)} is not a number")
            return default
        return int(value) if isinstance(value, float) and value.is_integer() else value

    def set(self, key: str, value: Any) -> None:
        if value is not None:
            self.made.sets[key] = str(value).lower() if isinstance(value, bool) else str(value)

    def refuse(self, key: str, fact: str) -> None:
        self.problems.append(Problem(self._places.get(key, self._path), f"{key}: {fact}"))

    def leave(self, key: str, reason: str = NO_EFFECT) -> None:
        self.made.without.append(f"{key}: {reason}")

    def leave_rest(self, section: str, reason: str = NO_EFFECT) -> None:
        """List what is left of a section."""
        rest = self.values.pop(section, None)
        for key in rest if isinstance(rest, dict) else ():
            self.leave(f"{section}.{key}", reason)


def _batches(reader: _Reader) -> None:
    whole = reader.number("train_batch_size")
    each = reader.number("train_micro_batch_size_per_gpu")
    accumulate = reader.number("gradient_accumulation_steps")
    reader.set("train.batch", each)
    if whole is not None:
        reader.set("train.global_batch", whole)
        if each is None:
            reader.made.notes.append("train_batch_size without train_micro_batch_size_per_gpu: --batch is ours")
    else:
        reader.set("train.accumulate", accumulate)
    reader.set_number("train.clip", "gradient_clipping", 0)


def _precision(reader: _Reader) -> None:
    kinds = [kind for kind in ("bf16", "fp16", "bfloat16") if reader.has(f"{kind}.enabled")]
    ours = any(reader.is_auto(f"{kind}.enabled") for kind in kinds)
    chosen = [kind for kind in kinds if reader.take(f"{kind}.enabled", False)]
    if len(chosen) > 1:
        reader.refuse(f"{chosen[1]}.enabled", f"{chosen[0]} is on as well")
    if chosen or not ours:
        reader.set("train.precision", {"bfloat16": "bf16"}.get(chosen[0], chosen[0]) if chosen else "fp32")
    scale = reader.number("fp16.loss_scale", 0)
    if scale and "fp16" in chosen:
        reader.refuse("fp16.loss_scale", f"a fixed loss scale of {scale}: ours adapts (0 in DeepSpeed)")
    reader.leave_rest("fp16", "the loss scale adapts by our own rule")
    for section in ("bf16", "bfloat16"):
        reader.leave_rest(section)
    wire = reader.take("communication_data_type")
    if wire is not None:
        reader.set("zero.reduce", "fp32" if wire == "fp32" else "compute")
        if wire not in ("fp32", *chosen):
            reader.refuse("communication_data_type", f"{quote(wire)} is neither fp32 nor the compute type")


def _zero(reader: _Reader) -> None:
    section = "zero_optimization"
    reader.set_number("zero.stage", f"{section}.stage", 0)
    placed, paths = [], []
    if reader.take(f"{section}.cpu_offload", False):
        placed.append("optimizer=cpu")
    for theirs, ours in (("offload_param", "params"), ("offload_optimizer", "optimizer")):
        device = reader.take(f"{section}.{theirs}.device", "none")
        if device not in DEVICES:
            reader.refuse(f"{section}.{theirs}.device", f"{quote(device)} is not one of {', '.join(DEVICES)}")
        elif device != "none":
            placed.append(f"{ours}={DEVICES[device]}")
        path = reader.take(f"{section}.{theirs}.nvme_path")
        if device == "nvme" and path:
            paths.append(str(path))
        reader.leave(f"{section}.{theirs}", "its buffers are ours") if reader.take(f"{section}.{theirs}", {}) else None
    if placed:
        reader.set("offload.placement", ",".join(placed))
    if paths:
        reader.set("offload.nvme_path", ",".join(dict.fromkeys(paths)))
    if (shard_ranks := reader.number(f"{section}.mics_shard_size", -1)) > 0:
        reader.set("parallel.shard_ranks", shard_ranks)
    if (shard_ranks := reader.number(f"{section}.zero_hpz_partition_size", 1)) > 1:
        reader.set("parallel.shard_ranks", shard_ranks)
        reader.set("parallel.shard_states", "all")
    for key in ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights"):
        if reader.take(f"{section}.{key}", False):
            reader.refuse(f"{section}.{key}", "collectives of quantized values change the numbers")
    reader.leave_rest(section)


def _optimizer(reader: _Reader) -> None:
    kind = reader.take("optimizer.type")
    if kind is None:
        if reader.values.pop("optimizer", None) is None:
            reader.made.notes.append("no optimizer in the file: adamw, with our own settings")
        return
    params = reader.take("optimizer.params", {})
    params = {key: value for key, value in params.items() if value != AUTO} if isinstance(params, dict) else {}
    reader.values.pop("optimizer", None)
    name = str(kind)
    if name.lower() in ("adam", "adamw", "fusedadam", "deepspeedcpuadam", "cpuadam"):
        decoupled = params.pop("adam_w_mode", True) or name.lower() == "adamw"
        _adam(reader, "adamw" if decoupled else "Adam", params)
    elif name.lower() == "sgd":
        reader.set("optimizer.name", "SGD")
        reader.set("optimizer.momentum", params.pop("momentum", 0))
        reader.set("optimizer.weight_decay", params.pop("weight_decay", 0))
    elif name in TORCH_OPTIMIZERS:
        reader.set("optimizer.name", name)
        reader.set("optimizer.weight_decay", params.pop("weight_decay", 0))
    else:
        reader.refuse("optimizer.type", f"{quote(name)} has no counterpart: Adam, AdamW, SGD or a class of torch.optim")
        return
    reader.set("optimizer.lr", params.pop("lr", None))
    if float(reader.made.sets.get("optimizer.weight_decay", 0)) > 0:
        reader.made.notes.append("optimizer.params.weight_decay: ours decays matrices only, not biases and norms")
    for key, value in params.items():
        if reader.made.sets["optimizer.name"] in ("adamw", "Adam"):
            reader.leave(f"optimizer.params.{key}")
        else:
            reader.set(f"optimizer.options.{key}", value)


def _adam(reader: _Reader, name: str, params: dict[str, Any]) -> None:
    reader.set("optimizer.name", name)
    if not params.pop("bias_correction", True):
        reader.refuse("optimizer.params.bias_correction", "ours always corrects the moments' bias")
    if params.pop("amsgrad", False):
        reader.refuse("optimizer.params.amsgrad", "has no counterpart")
    betas = params.pop("betas", (0.9, 0.999))
    if isinstance(betas, list | tuple) and len(betas) == 2:
        reader.set("optimizer.betas", ",".join(map(str, betas)))
    else:
        reader.refuse("optimizer.params.betas", f"{quote(betas)} is not two numbers")
    reader.set("optimizer.eps", params.pop("eps", 1e-8))
    reader.set("optimizer.weight_decay", params.pop("weight_decay", 0))


def _scheduler(reader: _Reader) -> None:
    kind = reader.take("scheduler.type")
    if kind is None:
        reader.values.pop("scheduler", None)
        if "optimizer.name" in reader.made.sets:  # DeepSpeed's own, at a constant rate
            reader.set("optimizer.schedule", "constant")
            reader.set("optimizer.warmup", 0)
        return
    section = "scheduler.params"
    schedules = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    if kind not in schedules:
        reader.refuse("scheduler.type", f"{quote(kind)} has no counterpart: {', '.join(schedules)} have")
        reader.values.pop("scheduler", None)
        return
    reader.set("optimizer.schedule", schedules[str(kind)])
    reader.set_number("optimizer.warmup", f"{section}.warmup_num_steps", 1000)
    reader.set("optimizer.warmup_shape", reader.take(f"{section}.warmup_type", "log"))
    for key in ("warmup_min_lr", "warmup_min_ratio"):
        if reader.number(f"{section}.{key}", 0):
            reader.refuse(f"{section}.{key}", "our warm-up begins at 0")
    reader.set("optimizer.lr", reader.number(f"{section}.warmup_max_lr"))
    if kind != "WarmupLR":
        reader.set("train.steps", reader.number(f"{section}.total_num_steps"))
        least = reader.number(f"{section}.cos_min_ratio", 0.0001) if kind == "WarmupCosineLR" else 0
        reader.set("optimizer.min_lr", least)
    rest = reader.take(section, {})
    for key in rest if isinstance(rest, dict) else ():
        if rest[key] != AUTO:
            reader.leave(f"{section}.{key}", "a resumed run continues where it was")
    reader.values.pop("scheduler", None)


def _activations(reader: _Reader) -> None:
    section = "activation_checkpointing"
    if section not in reader.values:
        return
    reader.set("activations.policy", "recompute")
    reader.set("activations.partition", bool(reader.take(f"{section}.partition_activations", False)))
    if reader.take(f"{section}.cpu_checkpointing", False):
        before = reader.made.sets.get("offload.placement")
        reader.set("offload.placement", f"{before},activations=cpu" if before else "activations=cpu")
    reader.leave_rest(section)


def _logging(reader: _Reader) -> None:
    reader.set("train.log_every", reader.number("steps_per_print"))
    writers = [name for name in ("tensorboard", "wandb") if reader.take(f"{name}.enabled", False)]
    if writers:
        reader.set("train.log_to", ",".join(writers))
    for name in ("tensorboard", "wandb"):
        reader.leave_rest(name, "its files are in the run folder")
    tp = reader.number("tensor_parallel.autotp_size", 0)
    if tp:
        reader.set("parallel.tp", tp)
    reader.leave_rest("tensor_parallel")


def _others(reader: _Reader) -> None:
    for key, fact in REFUSED_IF_ON.items():
        value = reader.values.pop(key, None)
        if isinstance(value, dict) and value.get("enabled", key not in ("amp", "eigenvalue", "hybrid_engine")):
            reader.refuse(key, f"has no counterpart: {fact}")
    if "pipeline" in reader.values:
        reader.leave("pipeline", "there is no pipeline parallelism")
        reader.values.pop("pipeline")
    for key in reader.values:
        reader.leave(key, NO_EFFECT if key in HARMLESS else "not known here")
