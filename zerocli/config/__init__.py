"""The config: its keys, how it is read and checked. `load` is the entry point; all problems are reported at once."""

from zerocli.config.draft import assemble, from_dict, given_keys, load, notes_of, to_dict
from zerocli.config.file import bundled
from zerocli.config.placement import placement_at, read_placement, refuse_placement
from zerocli.config.schema import (
    FIELDS,
    SECTIONS,
    ActivationsConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    LoraConfig,
    ModelConfig,
    OffloadConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
    ZeroConfig,
)
from zerocli.config.sharding import (
    Sharding,
    arguments_of,
    num_micro_steps,
    refuse_shard_ranks,
    sharding_of,
    with_dividing_batch,
)
from zerocli.layout.recompute import AUTO

__all__ = [
    "AUTO",
    "FIELDS",
    "SECTIONS",
    "ActivationsConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "LoraConfig",
    "ModelConfig",
    "OffloadConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "Sharding",
    "TrainConfig",
    "ZeroConfig",
    "arguments_of",
    "assemble",
    "bundled",
    "from_dict",
    "given_keys",
    "load",
    "notes_of",
    "num_micro_steps",
    "placement_at",
    "read_placement",
    "refuse_placement",
    "refuse_shard_ranks",
    "sharding_of",
    "to_dict",
    "with_dividing_batch",
]
