"""DeepSpeed configs: what becomes a key, what is listed, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zerocli import config as configs
from zerocli.config.deepspeed import Translation, translate
from zerocli.errors import ConfigError


def translated(folder: Path, values: dict[str, Any]) -> Translation:
    path = folder / "ds.json"
    path.write_text(json.dumps(values, indent=1))
    return translate(str(path))


def test_a_whole_config_becomes_keys(tmp_path):
    made = translated(
        tmp_path,
        {
            "train_batch_size": 64,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 8,
            "gradient_clipping": 0.5,
            "bf16": {"enabled": True},
            "communication_data_type": "fp32",
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "cpu", "pin_memory": True},
                "offload_optimizer": {"device": "nvme", "nvme_path": "/local", "buffer_count": 4},
                "overlap_comm": True,
                "mics_shard_size": 8,
            },
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
            "scheduler": {
                "type": "WarmupCosineLR",
                "params": {"warmup_num_steps": 10, "warmup_type": "linear", "total_num_steps": 100},
            },
            "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True},
            "steps_per_print": 50,
            "wall_clock_breakdown": True,
            "frobnicate": 1,
        },
    )
    config = configs.load("tiny", [f"{key}={value}" for key, value in made.sets.items()])
    assert (config.train.batch, config.train.global_batch, config.train.clip) == (4, 64, 0.5)
    assert (config.train.precision, config.zero.reduce, config.zero.stage) == ("bf16", "fp32", 3)
    assert str(config.offload.placement) == "params=cpu,optimizer=nvme,activations=cpu"
    assert config.parallel.shard_ranks == 8
    assert config.offload.nvme_path == ("/local",)
    optimizer = config.optimizer
    assert (optimizer.name, optimizer.lr, optimizer.betas, optimizer.eps) == ("adamw", 1e-4, (0.9, 0.95), 1e-8)
    assert (optimizer.schedule, optimizer.warmup, optimizer.min_lr, config.train.steps) == ("cosine", 10, 0.0001, 100)
    assert config.activations.policy == "recompute" and config.activations.partition and config.train.log_every == 50
    listed = " ".join(made.without)
    for name in ("offload_param", "offload_optimizer", "overlap_comm", "wall_clock_breakdown"):
        assert name in listed
    assert "frobnicate: not known here" in made.without
    assert "matrices only" in made.notes[0]


def test_defaults_are_those_of_deepspeed_and_auto_is_ours(tmp_path):
    bare = translated(tmp_path, {"optimizer": {"type": "Adam", "params": {"lr": 0.01}}})
    # No precision section is fp32, no clipping 0, stage 0, a constant rate, Adam with decoupled decay of 0.
    wanted = {"train.precision": "fp32", "train.clip": "0", "zero.stage": "0", "optimizer.schedule": "constant"}
    wanted |= {"optimizer.name": "adamw", "optimizer.weight_decay": "0", "optimizer.betas": "0.9,0.999"}
    assert {key: bare.sets[key] for key in wanted} == wanted and not bare.notes
    auto = translated(
        tmp_path,
        {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "bf16": {"enabled": "auto"},
            "zero_optimization": {"stage": "auto", "reduce_bucket_size": "auto"},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto"}},
        },
    )
    assert auto.sets == {"optimizer.schedule": "constant", "optimizer.warmup_shape": "log"}
    spread = translated(tmp_path, {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}).sets
    assert (spread["parallel.shard_ranks"], spread["parallel.shard_states"]) == ("8", "all")


@pytest.mark.parametrize(
    ("values", "fact"),
    [
        ({"optimizer": {"type": "OneBitAdam"}}, "has no counterpart: Adam, AdamW"),
        ({"optimizer": {"type": "Adam", "params": {"bias_correction": False}}}, "corrects the moments"),
        ({"scheduler": {"type": "OneCycle"}}, '"OneCycle" has no counterpart'),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-5}}}, "begins at 0"),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, "fixed loss scale of 128"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "is on as well"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "quantized"),
        ({"progressive_layer_drop": {"enabled": True}}, "layers are dropped"),
        ({"train_batch_size": "many"}, "is not a number"),
        ({"zero_optimization": {"offload_param": {"device": "tape"}}}, "is not one of none, cpu, nvme"),
    ],
)
def test_what_would_change_numbers_is_refused_with_its_place(tmp_path, values, fact):
    with pytest.raises(ConfigError, match=fact) as error:
        translated(tmp_path, values)
    assert "ds.json:" in str(error.value)


def test_all_refusals_come_at_once(tmp_path):
    with pytest.raises(ConfigError) as error:
        translated(tmp_path, {"optimizer": {"type": "Lamb"}, "scheduler": {"type": "OneCycle"}})
    assert len(error.value.lines) == 2
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ConfigError, match="JSON syntax"):
        translate(str(tmp_path / "bad.json"))
