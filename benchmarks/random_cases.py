"""Random configurations for `accuracy.py --random`, drawn by seed, as the `section.key=value` texts of a user."""

from __future__ import annotations

import random
from dataclasses import dataclass

MIB = 2**20
OPTIMIZERS = ("adamw", "adamw", "adamw", "adam", "sgd", "adagrad", "rmsprop", "adamax", "nadam")


@dataclass(frozen=True)
class RandomCase:
    """One configuration: its number, its ranks and what it sets on top of `tiny`."""

    number: int
    ranks: int
    sets: tuple[str, ...]

    def name(self) -> str:
        return f"{self.number}: {self.ranks} ranks, {' '.join(self.sets)}"


def draw_cases(count: int, seed: int, device: str, lora: bool = False) -> list[RandomCase]:
    """Return `count` configurations; the same seed, device and number give the same one, however many are drawn."""
    cases = [_draw(number, random.Random(f"{seed}/{device}/{number}"), device == "cuda") for number in range(count)]
    return [_adapted(case, random.Random(f"{seed}/{device}/{case.number}/lora")) for case in cases] if lora else cases


def _adapted(case: RandomCase, rng: random.Random) -> RandomCase:
    """Return the case with adapters beside a frozen base, and without tensor parallelism."""
    sets = [each for each in case.sets if not each.startswith("parallel.tp")]
    sets += [f"lora.rank={rng.choice((2, 4, 8))}", f"lora.dropout={rng.choice((0, 0, 0.1))}"]
    sets += rng.choice(([], ["lora.targets=qkv,up" if "model.family=gpt2" in sets else "lora.targets=q,v,down"]))
    base = rng.choice(("", "nf4", "nf4", "int8"))
    return RandomCase(case.number, case.ranks, (*sets, *([f"lora.base={base}"] if base else [])))


def _draw(number: int, rng: random.Random, cuda: bool) -> RandomCase:
    ranks = 1 if cuda else rng.choice((1, 2, 2, 2, 2, 3, 4))
    tp = 2 if ranks in (2, 4) and rng.random() < 0.12 else 1
    stage, dropout = rng.choice((0, 1, 2, 2, 3, 3, 3)), rng.random() < 0.3
    precisions = ("bf16", "bf16", "bf16", "fp16", "fp32") if cuda else ("fp32", "fp32", "fp32", "bf16", "fp16")
    precision = rng.choice(precisions)
    small = not cuda and precision != "fp32"  # half precision is slow on a CPU
    sets = [*_model(rng, cuda, small, tp, dropout), f"train.precision={precision}", f"zero.stage={stage}"]
    sets += [f"train.batch={rng.choice((1, 2) if small else (1, 2, 4) if cuda else (1, 2, 4, 8))}"]
    sets += [f"train.accumulate={rng.choice((1, 1, 1, 2, 3))}", f"train.clip={rng.choice((0, 1, 1))}"]
    sets += _activations(rng, cuda)
    sets += [f"parallel.tp={tp}"] if tp > 1 else []
    sets += _optimizer(rng, whole_options=not cuda)
    sets += _offload(rng, stage, cuda)
    sets += rng.choice(([], [], ["zero.reduce=fp32"], ["zero.buffers=3"], [f"zero.bucket={rng.choice((1, 4))}MiB"]))
    return RandomCase(number, ranks, tuple(sets))


def _model(rng: random.Random, cuda: bool, small: bool, tp: int, dropout: bool) -> list[str]:
    family = rng.choice(("gpt2", "llama"))
    if cuda:  # 0.03 to 0.8 billion parameters: seconds a case, also from a disk
        heads, size, layers = rng.choice((8, 12, 16)), rng.choice((64, 64, 128)), rng.choice((4, 8, 12, 16))
        vocab, seq = rng.choice((32000, 50257, 50304, 128256)), rng.choice((512, 1024, 2048))
    elif small:
        heads, size, layers = rng.choice((2, 4)), rng.choice((8, 16, 24)), rng.randint(1, 4)
        vocab, seq = rng.choice((256, 500)), rng.choice((16, 32))
    else:
        heads, size, layers = rng.choice((2, 4, 6, 8)), rng.choice((8, 16, 24, 32, 48)), rng.randint(1, 8)
        vocab, seq = rng.choice((256, 500, 1000, 2001, 6000)), rng.choice((16, 32, 64, 100, 192))
    kv_heads = rng.choice([0, 0, *(each for each in range(tp, heads, tp) if heads % each == 0)])
    sets = [f"model.family={family}", f"model.layers={layers}", f"model.hidden={heads * size}", f"model.heads={heads}"]
    sets += [f"model.kv_heads={kv_heads}", f"model.vocab={vocab}", f"train.seq={seq}"]
    sets += [f"model.tie={str(rng.random() < 0.5).lower()}", f"model.bias={str(rng.random() < 0.7).lower()}"]
    return [*sets, "model.dropout=0.1"] if dropout and family == "gpt2" else sets


def _activations(rng: random.Random, cuda: bool) -> list[str]:
    policy = rng.choice(("keep", "recompute", "auto"))
    sets = [f"activations.policy={policy}"]
    if policy == "auto":  # otherwise there is room to keep everything
        sets.append(
            f"train.gpu_memory={rng.choice((24, 48))}GiB" if cuda else f"train.gpu_memory={rng.choice((8, 32))}MiB"
        )
    return sets


def _optimizer(rng: random.Random, whole_options: bool) -> list[str]:
    name, master = rng.choice(OPTIMIZERS), rng.choice(("split", "split", "fp32"))
    sets = [f"optimizer.name={name}", f"optimizer.master={master}"]
    if name == "sgd":
        sets.append(f"optimizer.momentum={rng.choice((0, 0.9))}")
    if name == "adamw" and whole_options and rng.random() < 0.15:
        sets.append("optimizer.options={amsgrad=true}")
    return sets


def _offload(rng: random.Random, stage: int, cuda: bool) -> list[str]:
    """Return the placement: none, one tier for all states, or each kind by itself, with budgets and mixed tiers."""
    kind = rng.random()
    if kind < 0.3:
        return []
    if kind < 0.5 and stage:
        return [f"offload.placement={rng.choice(('cpu', 'nvme'))}"]
    parts = []
    for name, least, odds in (("params", 3, 0.6), ("grads", 2, 0.5), ("optimizer", 1, 0.8), ("activations", 0, 0.4)):
        if stage >= least and rng.random() < odds:
            parts.append(f"{name}={_tiers(rng, cuda)}")
    sets = [f"offload.placement={','.join(parts)}"] if parts else []
    if parts and rng.random() < 0.3:
        sets.append(f"offload.staging={rng.choice((8, 64))}MiB" if cuda else f"offload.staging={rng.choice((1, 4))}MiB")
    if parts and rng.random() < 0.4:
        sets.append(f"offload.update={rng.choice(('cpu', 'stream'))}")
    return sets


def _tiers(rng: random.Random, cuda: bool) -> str:
    budget = f"{rng.choice((64, 256, 1024))}MiB" if cuda else f"{rng.choice((64, 256, 1024))}KiB"
    plain = ("cpu", "cpu", "nvme")
    mixed = (f"hbm:{budget}+cpu", f"cpu:{budget}+nvme", f"hbm:{budget}+cpu:{budget}+nvme", f"hbm:{budget}+nvme")
    return rng.choice((*plain, *mixed))
