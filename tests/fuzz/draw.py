"""Programs drawn by hypothesis, out of the features that are switched on."""

from __future__ import annotations

import os
from dataclasses import replace

from hypothesis import strategies as st

from fuzz.program import WIDTH, WORLD, Alias, Block, Call, Event, Pass, Program, Rule, Second, Setting, Step
from fuzz.rules import ELEMENTWISE, OTHERS, SECOND, TORCH

KINDS = ("norm", "embedding", "gru", "conv", "scale", "complex", "ctx_attr")
STYLES = ("kwargs", "tuple", "dict", "object", "kept")
CONDITIONS = ("rank0", "rank1", "data", "odd_step")
PASSES = ("again", "two", "both", "both_reversed", "fail_forward", "fail_backward", "drop", "zero_grad")
PASSES += ("plain_backward", "leaf", "penalty")
TAKES_TWO = ("again", "two", "both", "both_reversed")
EVENTS = ("freeze", "unfreeze", "no_grad", "inference", "state", "gathered", "edit", "load", "optimizer_state")
EVENTS += ("plain_edit", "plain_load", "deepcopy", "unsharded")
AFTER = ("grad", "hand_grad")
CALLS = ("reuse", "unused", "raw", "detach", "aux", "inner", "checkpoint", "reentrant", "other", "second_input")
MODEL = ("mlp", "nested", "tied", "shared", "frozen", "adapted", "outside", "method", "returned_object")
SETTINGS = ("stage0", "stage1", "stage2", "stage3", "cpu", "nvme", "budget", "buffers", "accumulate", "partial")
SETTINGS += ("bf16", "mixed", "keep_fp32", "buckets", "clip", "adamw", "decay", "recompute", "class", "leaves", "list")
SETTINGS += ("stale", "selective", "shard_ranks", "shard_states", "average", "streamed")
STATE = ("counter", "ema", "expanded", "strided", "batchnorm", "spectral", "attribute", "dropout", "random")
RULES = ("torch_rule", "own_rule", "own_whole", "instance", "groups", "step_hook")
ALIASES = ("view", "detached", "data_alias", "chunk", "transposed", "first_forward", "read_alias", "cached")
SECONDS = ("chained", "towers", "frozen_second", "alternate")
UNEVEN = ("forward", "no_grad", "more", "fewer", "no_step", "state", "freeze")
OUTPUTS = ("kept_output", "fills")
FEATURES = frozenset((*KINDS, *STYLES, *CONDITIONS, *PASSES, *EVENTS, *AFTER, *CALLS, *MODEL, *SETTINGS))
FEATURES |= {*STATE, *RULES, *ALIASES, *SECONDS, *OUTPUTS, *(f"uneven_{kind}" for kind in UNEVEN)}
WAYS = {"view": "view", "detached": "detach", "data_alias": "data", "chunk": "chunk", "transposed": "transposed"}
WAYS |= {"first_forward": "first_forward"}

BUDGETS = {
    1: ("optimizer=hbm:400B+cpu", "optimizer=cpu:600B+nvme"),
    2: ("grads=cpu,optimizer=hbm:400B+cpu", "optimizer=hbm:300B+cpu:900B+nvme"),
    3: ("params=hbm:300B+cpu", "params=cpu:500B+nvme,optimizer=hbm:400B+cpu", "params=nvme,grads=cpu"),
}


def chosen_features(text: str | None = None) -> frozenset[str]:
    """Return the features that ZEROCLI_FUZZ_FEATURES names: `a,b` are only these, `-a,-b` all but these."""
    words = [
        word for word in (os.environ.get("ZEROCLI_FUZZ_FEATURES", "") if text is None else text).split(",") if word
    ]
    unknown = {word.removeprefix("-") for word in words} - FEATURES
    if unknown:
        raise ValueError(f"no fuzzer feature {', '.join(sorted(unknown))}; there are {', '.join(sorted(FEATURES))}")
    removed = {word[1:] for word in words if word.startswith("-")}
    named = {word for word in words if not word.startswith("-")}
    return frozenset((named or FEATURES) - removed)


@st.composite
def programs(draw: st.DrawFn, on: frozenset[str] = FEATURES) -> Program:
    """Draw a program that uses no feature but those that are on."""
    return _Drawing(draw, on).program()


class _Drawing:
    def __init__(self, draw: st.DrawFn, on: frozenset[str]) -> None:
        self.draw, self.on = draw, on

    def of(self, plain: str, others: tuple[str, ...], plain_share: int = 1) -> str:
        """Draw a word: `plain`, or one of the others that are on."""
        return self.draw(st.sampled_from((plain,) * plain_share + tuple(word for word in others if word in self.on)))

    def rarely(self, feature: str, one_in: int = 4) -> bool:
        return feature in self.on and self.draw(st.integers(1, one_in)) == one_in

    def upto(self, most: int) -> int:
        return self.draw(st.integers(0, most)) if most else 0

    def program(self) -> Program:
        entry = self.of("root", ("outside", "method"), 6)
        setting = self.setting()
        self.half = setting.precision != "fp32"
        blocks = tuple(self.block(setting) for _ in range(1 + self.upto(3)))
        self.count = len(blocks)
        ties = ((self.upto(self.count - 1), self.upto(self.count - 1)),) if self.rarely("tied") else ()
        calls = [self.call(blocks) for _ in range(1 + self.upto(4))]
        if "reuse" not in self.on:
            calls = list({call.block: call for call in calls}.values())
        if "unused" not in self.on:
            called = {call.block for call in calls}
            calls += [Call(block=index) for index in range(self.count) if index not in called]
        if any(call.checkpoint == "reentrant" for call in calls):  # torch itself refuses the two together
            self.on -= {"penalty"}
        steps = tuple(self.step(setting, len(calls)) for _ in range(2 + self.upto(2)))
        rule, aliases, second = Rule(), (), None
        if not self.half:
            rule, aliases, second = self.rule(), self.aliases(), self.second(setting)
        if uneven := self.uneven():
            steps = (*steps[:-1], replace(steps[-1], uneven=uneven))
        return Program(
            setting=setting,
            blocks=blocks,
            ties=ties,
            shared=self.upto(self.count - 1) if self.rarely("shared") else -1,
            unused=self.rarely("unused"),
            calls=tuple(calls),
            entry=entry,
            returns=self.returns(second),
            fills=self.rarely("fills", 8),
            rule=rule,
            aliases=aliases,
            second=second,
            steps=steps,
            seed=self.upto(3),
        )

    def returns(self, second: Second | None) -> str:
        if second is None and self.rarely("kept_output", 8):
            return "kept"
        return "object" if self.rarely("returned_object") else "dict"

    def rule(self) -> Rule:
        kinds = [kind for kind in ("torch_rule", "own_rule", "own_whole") if kind in self.on]
        if not kinds or self.upto(2) < 2:
            return Rule()
        chosen = self.draw(st.sampled_from(kinds))
        if chosen == "torch_rule":
            kind = self.draw(st.sampled_from(sorted(TORCH)))
            options, terms = self.draw(st.sampled_from(TORCH[kind])), ()
        else:
            kind, options = "Own", (("lr", 0.1),)
            pool = ELEMENTWISE if chosen == "own_rule" else ELEMENTWISE + OTHERS * 2
            terms = tuple(self.draw(st.lists(st.sampled_from(pool), min_size=1, max_size=3, unique=True)))
        if not self.rarely("instance", 2):
            return Rule(kind, options, terms)
        split = self.draw(st.sampled_from(("", "dim", "half"))) if "groups" in self.on else ""
        second = self.draw(st.sampled_from(SECOND.get(kind, ((("lr", 0.02),),)))) if split else ()
        return Rule(kind, options, terms, True, split, second, self.rarely("step_hook", 4))

    def aliases(self) -> tuple[Alias, ...]:
        ways = [way for feature, way in WAYS.items() if feature in self.on]
        if not ways or self.upto(7) < 7:
            return ()
        use = "loop" if self.rarely("read_alias", 3) else "forward"
        return (Alias(self.upto(self.count - 1), self.draw(st.sampled_from(ways)), use, self.upto(1) == 1),)

    def second(self, setting: Setting) -> Second | None:
        links = [link for link in SECONDS if link in self.on]
        if not links or self.upto(7) < 7:
            return None
        blocks = tuple(replace(self.block(setting), frozen=False) for _ in range(1 + self.upto(1)))
        before, self.count = self.count, len(blocks)
        calls = tuple(self.call(blocks) for _ in range(1 + self.upto(1)))
        self.count = before
        stage = self.draw(st.sampled_from((setting.stage, 0, 3)))
        link = self.draw(st.sampled_from(links)).removesuffix("_second")
        return Second(blocks, calls, stage if f"stage{stage}" in self.on else setting.stage, link)

    def uneven(self) -> str:
        kinds = [kind for kind in UNEVEN if f"uneven_{kind}" in self.on]
        if not kinds or self.half or self.upto(24) < 24:
            return ""
        return self.draw(st.sampled_from(kinds))

    def setting(self) -> Setting:
        stages = tuple(stage for stage in range(4) if f"stage{stage}" in self.on) or (0,)
        stage = self.draw(st.sampled_from(stages + (3,) * (3 in stages)))
        offload = self.of("", ("cpu", "nvme", "budget"), 2) if stage else ""
        if offload == "budget":
            offload = self.draw(st.sampled_from(BUDGETS[stage]))
        streamed = bool(stage) and self.rarely("streamed", 3)
        if streamed and offload != "nvme" and "cpu" in self.on:
            offload = "optimizer=cpu"
        half = self.rarely("bf16", 8)
        units = self.of("default", ("class", "leaves", "list"), 2)
        sizes = [size for size in range(1, WORLD) if WORLD % size == 0]
        shard_ranks = self.draw(st.sampled_from(sizes)) if stage and self.rarely("shard_ranks", 3) else 0
        return Setting(
            stage=stage,
            offload=offload,
            gather_buffers=1 + self.upto(2) if "buffers" in self.on else 2,
            accumulate=1 + self.upto(2) if "accumulate" in self.on else 1,
            precision="bf16" if half else "fp32",
            reduce="fp32" if half else "compute",
            keep_fp32=self.draw(st.sampled_from(("head", "blocks.0"))) if half and self.rarely("keep_fp32", 3) else "",
            bucket_nbytes=self.draw(st.sampled_from((1 << 16, 512))) if "buckets" in self.on else 1 << 16,
            clip=0.1 if self.rarely("clip") else None,
            optimizer=self.of("sgd", ("adamw",)),
            weight_decay=0.1 if self.rarely("decay", 2) else 0.0,
            recompute="selective" if self.rarely("selective", 6) else self.rarely("recompute"),
            units=units,
            chosen=(0, *((self.upto(3),) if self.upto(1) else ())) if units == "list" else (),
            shard_ranks=shard_ranks,
            shard_states="all" if shard_ranks and self.rarely("shard_states", 2) else "group",
            streamed=streamed,
            average=0.5 if self.rarely("average", 4) else 0.0,
        )

    def block(self, setting: Setting, depth: int = 0) -> Block:
        nested = ("nested",) if depth == 0 else ()
        kind = self.of("linear", ("mlp", *KINDS, *nested), 2)
        kept = [state for state in STATE if state in self.on]
        state: tuple[str, ...] = ()
        if kept and not self.half and self.upto(9) == 9:
            kind = "stateful"
            state = tuple(self.draw(st.lists(st.sampled_from(kept), min_size=1, max_size=3, unique=True)))
        return Block(
            kind=kind,
            hidden=self.draw(st.sampled_from((WIDTH, 9))) if kind == "mlp" else WIDTH,
            frozen=self.rarely("frozen", 8),
            adapted=kind in ("linear", "mlp") and self.rarely("adapted", 6),
            half=setting.precision == "bf16" and not setting.keep_fp32 and self.rarely("mixed", 3),
            children=tuple(self.block(Setting(), 1) for _ in range(1 + self.upto(1))) if kind == "nested" else (),
            caches=not self.half and self.rarely("cached", 40),
            state=state,
        )

    def call(self, blocks: tuple[Block, ...]) -> Call:
        block, when = self.upto(self.count - 1), self.of("always", CONDITIONS, 4)
        return Call(
            block=block,
            inner=blocks[block].kind == "nested" and self.rarely("inner", 3),
            arg=self.upto(2) if self.rarely("unused", 3) else 0,
            also=self.upto(2) if self.rarely("second_input", 2) else 0,
            raw=self.rarely("raw", 6),
            style=self.of("plain", STYLES, 2),
            when=when,
            other=self.upto(self.count - 1) if when != "always" and self.rarely("other", 2) else -1,
            detach=self.rarely("detach", 8),
            aux=self.rarely("aux", 6),
            checkpoint="plain" if self.rarely("checkpoint", 8) else "reentrant" if self.rarely("reentrant", 12) else "",
        )

    def step(self, setting: Setting, calls: int) -> Step:
        before = []
        while len(before) < 2 and self.upto(2) == 2:
            if kinds := [kind for kind in EVENTS if kind in self.on]:
                before.append(Event(self.draw(st.sampled_from(kinds)), self.upto(self.count - 1)))
        passes: list[Pass] = []
        used, special = 0, [kind for kind in PASSES if kind in self.on]
        target = setting.accumulate
        if "partial" in self.on and target > 1:
            target -= self.upto(target - 1)
        while used < target:
            kind = self.draw(st.sampled_from(special)) if special and len(passes) < 4 and self.upto(4) == 4 else "train"
            if kind in TAKES_TWO and target - used < 2 or kind == "leaf" and not self.takes_leaf(setting):
                kind = "train"
            if kind == "plain_backward" and used:  # what a refusal leaves of earlier passes is nobody's promise
                kind = "train"
            passes.append(Pass(kind, self.upto(calls - 1) if kind.startswith("fail") else 0))
            used = self.made(used, kind)
        after = ()
        if kinds := [kind for kind in AFTER if kind in self.on and (kind != "grad" or used == setting.accumulate)]:
            if self.upto(5) == 5:
                after = (Event(self.draw(st.sampled_from(kinds)), self.upto(self.count - 1)),)
        return Step(tuple(before), tuple(passes), after, self.rarely("stale", 12))

    def takes_leaf(self, setting: Setting) -> bool:
        return setting.accumulate == 1 and setting.precision == "fp32"

    def made(self, used: int, kind: str) -> int:
        if kind in ("drop", "plain_backward", "fail_forward"):
            return used
        if kind in ("zero_grad", "fail_backward"):
            return 0
        return used + (2 if kind in TAKES_TWO else 1)
